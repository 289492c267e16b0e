"""Our programs beside those of hand-written JAX, at tiny sizes: what they count, and the losses they give. Times are not asserted."""

from pathlib import Path
from typing import Any

import pytest

from spmd.bench._facts import model_flops, program_facts
from spmd.bench._task import Job
from spmd.bench.peers import by_hand, ours

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
STEPS = 4  # rounding grows from step to step, most with batch norm over 16 images
# name, variant, mesh; and the collectives of both, where they are as anyone would write them by hand
RUNS: dict[str, tuple[str, str, str, dict[str, int] | None]] = {
    "megatron 2-D": ("megatron", "plain", "data=4,model=2", {"all-reduce over data": 1, "all-reduce over model": 3}),
    "megatron 1-D": ("megatron", "plain", "model=8", {"all-reduce over model": 3}),
    "megatron sequence": ("megatron", "sequence", "data=2,model=4", None),
    "gpt2 data x model": ("gpt2", "own", "data=2,model=4", {"all-reduce over data": 2, "all-reduce over model": 12}),
    "gpt2 data": ("gpt2", "own", "data=8", {"all-reduce over data": 2}),
    "gpt2 data x fsdp x model": ("gpt2", "own", "data=2,fsdp=2,model=2", None),
    "gpt2 of Hugging Face": ("gpt2", "hf", "data=2,model=4", None),
    "resnet50 data": ("resnet50", "v1.5", "data=8", None),
    "resnet50 data x spatial": ("resnet50", "v1.5", "data=4,spatial=2", None),
}


def job(name: str, variant: str, mesh: str, **more: Any) -> Job:
    axes = tuple((axis, int(size)) for axis, _, size in (part.partition("=") for part in mesh.split(",")))
    return Job(name, str(BENCHMARKS), variant, "tiny", axes=axes, **more)


def trained(contender: Any) -> tuple[list[float], dict[str, Any]]:
    """Losses of some steps, and the facts of the program."""
    losses: list[float] = []
    for _ in range(STEPS):
        contender.step()
        contender.wait()
        losses.append(contender.loss())
    found = contender.program()
    return losses, program_facts(found.pop("hlo"), found, contender.job)


SLOW = {"megatron 1-D", "megatron sequence", "gpt2 data", "resnet50 data"}  # the other rows have their axes too


@pytest.fixture(
    scope="module",
    params=[pytest.param(run, marks=[pytest.mark.slow] if name in SLOW else [], id=name) for name, run in RUNS.items()],
)
def pair(request: pytest.FixtureRequest) -> Any:
    """(collectives expected, ours, by hand), the latter two as (losses, facts)."""
    if request.config.getoption("--devices") != 8:
        pytest.skip("the meshes have 8 devices")
    *run, expected = request.param
    if run[1] == "hf":
        pytest.importorskip("transformers")
    return expected, trained(ours.Contender(job(*run))), trained(by_hand.Contender(job(*run)))


def test_program_counts_what_jax_by_hand_counts(pair: Any) -> None:
    expected, (_, mine), (_, hand) = pair
    assert (mine["executables"], mine["retraces"]) == (1, [])
    assert mine["flops"] == hand["flops"] > 0
    assert mine["collective_bytes"] <= 1.03 * hand["collective_bytes"]
    assert mine["peak_bytes"] <= 1.03 * hand["peak_bytes"]
    if expected is not None:
        assert {kind: row["count"] for kind, row in mine["collectives"].items()} == expected
        assert mine["collectives"].keys() == hand["collectives"].keys()


def test_loss_curves_overlap(pair: Any) -> None:
    _, (mine, _), (hand, _) = pair
    assert mine == pytest.approx(hand, rel=2e-3)
    assert mine[:2] == pytest.approx(hand[:2], rel=1e-5)


def test_model_flops_are_counted_without_memory_or_values() -> None:
    pytest.importorskip("transformers")
    own, hf = (model_flops(job("gpt2", variant, "data=8")) for variant in ("own", "hf"))
    batch, seq, width, layers, vocabulary = 8, 32, 64, 2, 256
    products = layers * (12 * width * width + 2 * seq * width) + vocabulary * width  # per token; attention over all pairs
    assert own == hf == 3 * 2 * batch * seq * products
