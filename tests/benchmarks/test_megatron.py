"""The benchmark runs, and what it counts does not depend on the machine. Times are not asserted."""

import json
import platform
from typing import Any

import pytest

from benchmarks import megatron


@pytest.fixture(scope="module")
def results(request: pytest.FixtureRequest) -> dict[str, Any]:
    if request.config.getoption("--devices") != 8:
        pytest.skip("the benchmark's default mesh has 8 devices")
    patch = pytest.MonkeyPatch()
    patch.setattr(megatron, "SMALL", (8, 16, 32, 3))
    try:
        return megatron.measure(megatron.Options(preset="tiny", layers=2, rounds=1, retraces=1, calls=1).resolved())
    finally:
        patch.undo()


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        ("step", {"all-reduce over data": 1, "all-reduce over model": 3}),  # forward of 2 layers, backward of all but the first
        ("small", {"all-reduce over data": 1, "all-reduce over model": 5}),
    ],
)
def test_collectives_are_those_of_jax_by_hand(results: dict[str, Any], model: str, expected: dict[str, int]) -> None:
    ours, hand = (results["programs"][model][name] for name in ("ours", "jax"))
    assert ours["collectives"] == hand["collectives"] == expected
    assert ours["collective_bytes"] == hand["collective_bytes"]


@pytest.mark.parametrize("model", ["step", "small"])
def test_one_executable_with_the_flops_of_jax_by_hand(results: dict[str, Any], model: str) -> None:
    ours, hand = (results["programs"][model][name] for name in ("ours", "jax"))
    assert (ours["executables"], ours["retraces"]) == (1, 0)
    assert ours["flops"] == hand["flops"] > 0
    assert ours["peak_bytes"] <= 1.02 * hand["peak_bytes"]


def test_every_goal_is_reported(results: dict[str, Any]) -> None:
    assert {"step, s", "trace + lower of the step, cold, s"} < {row["what"] for row in results["goals"]}
    assert megatron.table(results).row_count == len(results["goals"]) + 5


def test_json_names_no_host_and_no_path(results: dict[str, Any]) -> None:
    text = json.dumps(results)
    assert str(megatron.ROOT) not in text
    assert platform.node() not in text
