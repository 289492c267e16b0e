"""The fix that an error names is a line of code: typed, it works."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest
import torch
from torch import nn

import mesh
import spmd

# what is wrong, and the same with the fix in place of {fix}
FIXES = {
    "a module is marked": ("spmd.mark_sharding(module, mesh, ('x', None))", "{fix}"),
    "an unknown argument": ("spmd.compile(fn, dynamic={'y': {0: rows}})", "spmd.compile(fn, {fix})(x)"),
    "an unknown dim": ("spmd.compile(fn, dynamic={'x': {0: 'rows'}})", "spmd.compile(fn, dynamic={{'x': {{0: {fix}}}}})(x)"),
    "no dim": ("spmd.compile(fn, dynamic={'x': {0: 64}})", "spmd.compile(fn, {fix})(x)"),
    "a size too large": ("spmd.compile(fn, dynamic={'x': {0: rows}})(x)", "spmd.compile(fn, dynamic={{'x': {{0: {fix}}}}})(x)"),
    "a size too small": (
        "spmd.compile(fn, dynamic={'x': {0: spmd.Dim('rows', min=9, max=32)}})(x)",
        "spmd.compile(fn, dynamic={{'x': {{0: {fix}}}}})(x)",
    ),
    "an option's value": ("spmd.compile(fn, roll='always')", "{fix}(x)"),
    "an option's count": ("spmd.compile(fn, max_programs=0)", "{fix}(x)"),
    "an option's word": ("spmd.compile(fn, on_retrace='raise')", "{fix}(x)"),
    "a policy that is text": ("spmd.mixed_precision(module, 'bf16')", "spmd.mixed_precision(module, {fix})(x)"),
    "the same for fully_shard": ("spmd.fully_shard(module, mesh, mp_policy='bf16')", "spmd.fully_shard(module, mesh, mp_policy={fix})"),
    "an axis": ("spmd.fully_shard(module, mesh, axis='fsdp')", "spmd.fully_shard(module, mesh, {fix})"),
    "a stage": ("spmd.fully_shard(module, mesh, stage=4)", "spmd.fully_shard(module, mesh, {fix})"),
    "a model of no family": ("spmd.shard_module(model, mesh, 'megatron')", "{fix}"),
    "a policy that is called": ("spmd.remat(module)", "{fix}(x)"),
    "a policy of no name": ("spmd.remat('all')", "spmd.remat({fix})(module)(x)"),
    "no programs": ("spmd.lazy(max_programs=0)", "{fix}"),
    "too small a mark": ("spmd.mark_dynamic(x, 0, max=4)", "{fix}"),
    "a CPU tensor": ("spmd.functionalize(nn.Linear(4, 4))", "{fix}"),
    "a tensor for a tuple": ("spmd.call_jax(jnp.square, x)", "fn = jnp.square; {fix}"),
    "the same in a file": ("spmd.export(fn, x, path)", "{fix}"),
    "tensor and mesh swapped": ("spmd.mark_sharding(mesh, x, spec)", "{fix}"),
    "no micro-batches": ("spmd.accumulate(0)", "{fix}(lambda x: x.sum())(x[:4])"),
    "a list of names": ("spmd.compile(fn, dynamic=['x'])", "spmd.compile(fn, {fix})(x)"),
    "no function": ("spmd.compile(3)", "{fix}(x)"),
    "another step": ("spmd.checkpoint.restore(folder, {'x': x}, step=7)", "spmd.checkpoint.restore(folder, {{'x': x}})"),
}


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("case", FIXES)
def test_the_fix_works_when_it_is_typed(case: str, num_devices: int, tmp_path: Path) -> None:
    wrong, right = FIXES[case]
    names: dict[str, Any] = {"spmd": spmd, "mesh": mesh.Mesh(range(num_devices), (num_devices,), ("model",)), "torch": torch, "nn": nn}
    names |= {"fn": lambda x: x * 2, "rows": spmd.Dim("rows", max=4), "x": torch.ones(8, 4, device="jax"), "folder": tmp_path}
    names |= {"jnp": jnp, "path": tmp_path / "fn.spmd", "spec": ("model", None)}
    names |= {"module": nn.Linear(4, 8).to("jax"), "rules": [("weight", ("model", None)), ("**", None)]}
    names["model"] = nn.Sequential(nn.Linear(4, 8)).to("jax")
    spmd.checkpoint.save(tmp_path, 3, {"x": names["x"]})
    spmd.checkpoint.join()
    with pytest.raises((spmd.SpmdError, mesh.MeshError, TypeError)) as caught:
        eval(wrong, names)
    (fix,) = re.findall(r"^  fix: (.*)$", str(caught.value), re.MULTILINE)
    exec(right.format(fix=re.split(r", or |, the default", fix)[0].removeprefix("choose one, e.g. ").removeprefix("make one: ")), names)
