"""The GPT-2 training step, Megatron-sharded: collectives and memory of the compiled program are those of JAX by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from spmd.bench._task import Job
from spmd.bench.peers import by_hand, ours
from spmd.program.xla import _hlo

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
SIZES = (("vocabulary", 512), ("width", 128), ("heads", 4), ("layers", 2), ("seq", 64), ("batch", 8))
AXES = (("data", 4), ("model", 2))


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("topology", ["", "v5e:2x4"], ids=["virtual", "v5e:2x4"])
def test_collectives_and_peak_memory_are_those_of_jax_by_hand(topology: str) -> None:
    if topology:
        pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'spmd-mesh[tpu]'")
    job = Job("gpt2", str(BENCHMARKS), overrides=SIZES, axes=AXES, topology=topology)
    mine, hand = (peer.Contender(job).program() for peer in (ours, by_hand))
    found, theirs = (_hlo.collectives(program["hlo"], ("data", "model"), (4, 2)) for program in (mine, hand))
    assert found.by_axis() == theirs.by_axis()
    sent = [sum(c.count * c.num_bytes for c in report) for report in (found, theirs)]
    assert sent[0] == pytest.approx(sent[1], rel=0.03)
    assert mine["memory"]["peak_bytes"] <= 1.03 * hand["memory"]["peak_bytes"]
