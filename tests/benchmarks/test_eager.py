"""The benchmark of eager operators times both sides, also inside a trace."""

from benchmarks import eager


def test_a_chain_is_timed_where_it_is_traced() -> None:
    for side in eager.traces(rounds=1, calls=1):
        assert len(side) == 1
        assert all(seconds > 0 for seconds in side[0].values())
