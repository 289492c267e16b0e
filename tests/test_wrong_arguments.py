"""Public functions refuse arguments of wrong types and sizes by name, with a fix, before anything changes."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import mesh
import spmd
from spmd import checkpoint, collectives
from tests.grids import line


def over_data(fn: Callable[[torch.Tensor], Any]) -> Any:
    """`fn` in a manual region, on rows of a tensor."""
    count = mesh.device_count()
    return spmd.shard_map(fn, line(), (("data", None),), ("data", None))(torch.ones(count * count, 2, device="jax"))


def reduced(x: Any, group: Any) -> Any:
    return over_data(lambda t: collectives.all_reduce(t if x is None else x, "sum", group))


def permuted(pairs: Any) -> Any:
    return over_data(lambda x: collectives.permute(x, pairs, "data"))


def mapped(fn: Any, in_specs: Any, out_specs: Any = ("data", None)) -> Any:
    return spmd.shard_map(fn, line(), in_specs, out_specs)


CASES: dict[str, tuple[Callable[[], Any], str]] = {
    "no dim": (lambda: over_data(lambda x: collectives.all_gather(x, "data", 0)), "all_gather got 'data' as a dim"),  # type: ignore[arg-type]
    "a dim too far": (lambda: over_data(lambda x: collectives.all_gather(x, 5, "data")), "its dims are -2 to 1"),
    "reduce_scatter": (lambda: over_data(lambda x: collectives.reduce_scatter(x, "sum", -3, "data")), "reduce_scatter got -3"),
    "all_to_all": (lambda: over_data(lambda x: collectives.all_to_all(x, 0, 2, "data")), "all_to_all got 2"),
    "no group": (lambda: reduced(None, None), "all_reduce takes a mesh axis or a tuple of different ones as its group, got None"),
    "a group twice": (lambda: reduced(None, ("data", "data")), r"as its group, got \('data', 'data'\)"),
    "a dim as a group": (lambda: reduced(None, ("data", 1)), r"as its group, got \('data', 1\)"),
    "a set as a group": (lambda: reduced(None, {"data"}), "as its group, got a set"),
    "a list to reduce": (lambda: reduced([torch.ones(2)], "data"), "all_reduce takes a shard, a tensor on device 'jax', got a list"),
    "a tensor of the host": (lambda: reduced(torch.ones(2), "data"), "got a tensor on cpu"),
    "a list of reductions": (lambda: over_data(lambda x: collectives.all_reduce(x, ["sum"], "data")), r"\['sum'\] is not a reduction"),  # type: ignore[arg-type]
    "an index of nothing": (lambda: over_data(lambda x: x + collectives.axis_index(None)), "axis_index takes a mesh axis"),  # type: ignore[arg-type]
    "a number as a group": (lambda: over_data(lambda x: collectives.all_gather(x, 0, 0)), "all_gather takes a mesh axis .* got 0"),  # type: ignore[arg-type]
    "a list to gather": (lambda: over_data(lambda x: collectives.all_gather([x], 0, "data")), "all_gather takes a shard"),  # type: ignore[arg-type]
    "a scatter over nothing": (
        lambda: over_data(lambda x: collectives.reduce_scatter(x, "sum", 0, None)),  # type: ignore[arg-type]
        "reduce_scatter takes a mesh axis",
    ),
    "an exchange over nothing": (lambda: over_data(lambda x: collectives.all_to_all(x, 0, 0, None)), "all_to_all takes a mesh axis"),  # type: ignore[arg-type]
    "no pairs": (lambda: permuted(5), r"permute takes pairs \(source, target\) of ints, got 5"),
    "pairs of floats": (lambda: permuted([(0.0, 1.0)]), r"got \(0.0, 1.0\)"),
    "pairs of bools": (lambda: permuted([(True, False)]), r"got \(True, False\)"),
    "three in a pair": (lambda: permuted([(0, 0, 0)]), r"got \(0, 0, 0\)"),
    "a flat list": (lambda: permuted([0, 0]), "of ints, got 0"),
    "nothing to map": (lambda: mapped(3, (("data", None),)), "shard_map takes a function, got 3"),
    "no specs": (lambda: mapped(torch.neg, None), "in_specs must be a tuple or list of specs, one per argument, got None"),
    "a dict of specs": (lambda: mapped(torch.neg, {"x": ("data", None)}), "in_specs must be .* got a dict"),
    "no spec of a result": (lambda: mapped(torch.neg, (("data", None),), None), "None is not a partition spec"),
    "trees": (lambda: spmd.shard_as([torch.ones(2).to("jax")], [torch.ones(2).to("jax")] * 2), "got 1 and 2 leaves, in list and list"),  # type: ignore[misc]
    "shapes": (lambda: spmd.shard_as(torch.ones(8, 8).to("jax"), torch.ones(3).to("jax")), r"shape \(8, 8\) and a tensor of shape \(3,\)"),
    "numbers": (lambda: spmd.shard_as(3, 4), "got 3 and 4"),
    "no tensor": (lambda: spmd.mark_dynamic(3, 0), "takes a tensor and the number of a dim, got 3 and 0"),  # type: ignore[arg-type]
    "a name": (lambda: spmd.mark_dynamic(torch.ones(2), "n"), "got a Tensor and 'n'"),  # type: ignore[arg-type]
    "seconds": (lambda: spmd.configure(progress_after_s="x"), "must be a number of seconds"),  # type: ignore[arg-type]
    "a float of rounds": (lambda: spmd.accumulate(2.0), "got 2.0 micro-batches"),  # type: ignore[arg-type]
    "a bool of rounds": (lambda: spmd.accumulate(True), "got True micro-batches"),
    "no micro-batch": (lambda: spmd.accumulate(2)(3), "accumulate takes a function, got 3"),  # type: ignore[arg-type]
    "no function": (lambda: spmd.assume_pure(3), "assume_pure takes a function, got 3"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_refused_by_name(name: str) -> None:
    call, text = CASES[name]
    with pytest.raises((spmd.SpmdError, mesh.SpecError), match=text) as refused:
        call()
    assert "\n  fix: " in str(refused.value)


def test_what_is_no_module_is_not_saved(tmp_path: Path) -> None:
    with pytest.raises(spmd.SpmdError, match="takes a module, got 3"):
        checkpoint.save_safetensors(tmp_path / "new", 3)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())


def test_a_wrong_placement_leaves_all_parameters_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).to("jax")
    given = iter([None, None, 7])
    with pytest.raises(spmd.SpmdError, match="shard_placement_fn gave 7 for a parameter of shape"):
        spmd.fully_shard(model, line(), shard_placement_fn=lambda p: next(given))
    assert all(not isinstance(p, spmd.XLAShardedTensor) for p in model.parameters())
