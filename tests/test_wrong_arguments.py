"""Public functions refuse arguments of wrong types and sizes by name, with a fix, before anything changes."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
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


def nested_dims() -> Any:
    return spmd.compile(lambda x: x, dynamic={"x": {0: {9: spmd.Dim("n", max=8)}}})(X)


X = torch.ones(4, 4).to("jax")
LINEAR = nn.Linear(2, 2)
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
    "remat": (lambda: spmd.remat(3), "remat takes a policy, got 3"),  # type: ignore[arg-type]
    "remat of a number": (lambda: spmd.remat()(3), "remat takes a function, got 3"),  # type: ignore[type-var]
    "mixed_precision": (lambda: spmd.mixed_precision(3, spmd.MixedPrecisionPolicy()), "mixed_precision takes a module, got 3"),  # type: ignore[type-var]
    "compile": (lambda: spmd.compile(3), "compile takes a function, got 3"),  # type: ignore[call-overload]
    "check_indices": (lambda: spmd.compile(abs, check_indices=3), "check_indices must be True, False or None\n  got 3"),  # type: ignore[call-overload]
    "roll": (lambda: spmd.compile(abs, roll=1), "roll must be True, False or 'auto'"),  # type: ignore[call-overload]
    "dynamic": (lambda: spmd.compile(abs, dynamic=[]), r"dynamic must be a dict from arguments to dims, or True, got \[\]"),  # type: ignore[call-overload]
    "dynamic=()": (lambda: spmd.compile(abs, dynamic=()), r"dynamic must be a dict .*, got \(\)"),  # type: ignore[call-overload]
    "a dict for a dim": (lambda: nested_dims(), r"dynamic has \{9: Dim.* for dim 0 of x, where a Dim or its name is expected"),
    "call_jax": (lambda: spmd.call_jax(3, (X,)), "call_jax takes a function, got 3"),  # type: ignore[arg-type]
    "call_jax a dict": (lambda: spmd.call_jax(abs, {"x": X}), "abs takes a tuple of arguments, got a dict"),  # type: ignore[arg-type]
    "call_jax a tensor": (lambda: spmd.call_jax(abs, X), r"abs takes a tuple of arguments, got a tensor of shape \(4, 4\)"),  # type: ignore[arg-type]
    "call_jax kwargs": (lambda: spmd.call_jax(abs, (X,), 3), "kwargs of call_jax must be a dict, got 3"),  # type: ignore[arg-type]
    "a picture": (lambda: spmd.visualize_sharding(3), "visualize_sharding takes the text of a sharding, got 3"),  # type: ignore[arg-type]
    "prefetch": (lambda: spmd.shard_loader([X], line(), None, prefetch="a"), r"prefetch='a', check=True\)"),  # type: ignore[arg-type]
    "check": (lambda: spmd.shard_loader([X], line(), None, check=3), r"prefetch=2, check=3\)"),  # type: ignore[arg-type]
    "a rule of one argument": (
        lambda: spmd.shard_module(LINEAR, line(), lambda name: None),
        r"called with \(name, parameter\), and takes \(name\)",
    ),  # type: ignore[arg-type,misc]
    "no tensor to distribute": (lambda: spmd.xla_distribute_tensor(None, line()), "xla_distribute_tensor takes a tensor, got None"),  # type: ignore[arg-type]
    "an array to distribute": (
        lambda: spmd.xla_distribute_tensor(np.ones(2), line()),
        "takes a tensor, got a ndarray",
    ),  # type: ignore[arg-type]
    "no module to distribute": (lambda: spmd.xla_distribute_module(3, line()), "xla_distribute_module takes a module, got 3"),  # type: ignore[arg-type]
    "FSDPv2": (lambda: spmd.SpmdFullyShardedDataParallel(3, line()), "SpmdFullyShardedDataParallel takes a module, got 3"),  # type: ignore[arg-type]
    "shard_output": (lambda: spmd.SpmdFullyShardedDataParallel(LINEAR, line(), 3), "shard_output of .* must be a function or None, got 3"),  # type: ignore[arg-type]
    "batches": (lambda: spmd.MpDeviceLoader(3, "jax"), "MpDeviceLoader takes an iterable of batches, got 3"),  # type: ignore[arg-type]
    "a device": (lambda: spmd.MpDeviceLoader([X], "nope"), "device of MpDeviceLoader is always 'jax', got 'nope'"),
    "input_sharding": (lambda: spmd.MpDeviceLoader([X], input_sharding=("data",)), "input_sharding of MpDeviceLoader .*, got a tuple"),  # type: ignore[arg-type]
    "device_prefetch_size": (lambda: spmd.MpDeviceLoader([X], device_prefetch_size="a"), "must be a number of batches, got 'a'"),  # type: ignore[arg-type]
    "a spec without a mesh": (lambda: spmd.ShardingSpec(3, ("data",)), "a ShardingSpec needs a mesh.Mesh, got 3"),  # type: ignore[arg-type]
    "micro-batches": (lambda: spmd.gradient_accumulation(abs, (X,), 3), "gradient_accumulation takes a module, got 3"),  # type: ignore[arg-type]
    "one tensor": (lambda: spmd.gradient_accumulation(abs, X, LINEAR), "iterable_tensors .* must be a tuple of tensors, got a Tensor"),  # type: ignore[arg-type]
    "a barrier": (lambda: spmd.apply_backward_optimization_barrier(3), "barrier takes a module, got 3"),  # type: ignore[arg-type]
    "no devices": (lambda: mesh.Mesh(None, (2, 4), ("a", "b")), r"Mesh\(a=2, b=4\) needs 8 device ids, got None"),  # type: ignore[arg-type]
    "no names": (lambda: mesh.Mesh(range(8), (2, 4), 3), "axis_names=3 are no names"),  # type: ignore[arg-type]
    "no function": (lambda: spmd.assume_pure(3), "assume_pure takes a function, got 3"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", CASES)
def test_a_wrong_argument_is_refused_by_name(name: str) -> None:
    call, text = CASES[name]
    with pytest.raises((spmd.SpmdError, mesh.SpecError), match=text) as refused:
        call()
    assert "\n  fix: " in str(refused.value)


EXPORTS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no function": (lambda path: spmd.export(None, (X,), path), "export takes a function, got None"),  # type: ignore[arg-type]
    "no arguments": (lambda path: spmd.export(abs, None, path), "export of abs takes a tuple of arguments, got None"),  # type: ignore[arg-type]
    "also": (lambda path: spmd.export(abs, (X,), path, also=[X]), "each item of also= of the export of abs takes a tuple"),  # type: ignore[list-item]
    "kwargs": (lambda path: spmd.export(abs, (X,), path, 3), "kwargs of the export of abs must be a dict, got 3"),  # type: ignore[arg-type]
    "an unknown platform": (lambda path: spmd.export(abs, (X,), path, platforms=["gpu9"]), "must be names of platforms, got 'gpu9'"),
    "one platform": (lambda path: spmd.export(abs, (X,), path, platforms="tpu"), r"got 'tpu'(?s:.*)platforms=\[\"tpu\"\]"),
    "no platform": (lambda path: spmd.export(abs, (X,), path, platforms=[]), "must be names of platforms, got a list"),
    "a number": (lambda path: spmd.export(abs, (X,), path, platforms=[3]), "must be names of platforms, got 3"),  # type: ignore[list-item]
}


@pytest.mark.parametrize("name", EXPORTS)
def test_a_wrong_argument_of_export_writes_no_file(name: str, tmp_path: Path) -> None:
    call, text = EXPORTS[name]
    with pytest.raises(spmd.SpmdError, match=text) as refused:
        call(tmp_path / "abs.spmd")
    assert "\n  fix: " in str(refused.value) and not list(tmp_path.iterdir())


def test_wrong_functions_leave_a_module_where_it_is() -> None:
    for wrong in ({"partition_fn": 3}, {"partition_fn": lambda name: None}, {"input_fn": 3}, {"output_fn": lambda value: None}):
        with pytest.raises(spmd.SpmdError, match=f"{next(iter(wrong))} (?s:.*)\n  fix: "):
            spmd.xla_distribute_module(LINEAR, line(), **wrong)  # type: ignore[arg-type]
    assert LINEAR.weight.device.type == "cpu"


def test_a_wrong_type_is_a_type_error_too() -> None:
    with pytest.raises(TypeError, match="remat takes a policy"):
        spmd.remat(3)  # type: ignore[arg-type]


def test_platforms_have_two_names_for_one(tmp_path: Path) -> None:
    path = spmd.export(lambda x: x * 2, (X,), tmp_path / "twice.spmd", platforms=("cpu", "gpu", "cuda"))
    with zipfile.ZipFile(path) as archive:
        assert json.loads(archive.read("manifest.json"))["platforms"] == ["cpu", "cuda"]


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
