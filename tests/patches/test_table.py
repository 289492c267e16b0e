"""What is replaced in torch: every target is there with the parameters that are expected, and is as before where that is promised."""

import ast
import functools
import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import spmd.compat.torch_distributed
import spmd.compat.torch_xla
from mesh import Mesh
from spmd.huggingface import train_on
from spmd.patches._causal_masks import without_mask_reads
from spmd.patches._running_averages import counting_on_device
from spmd.patches._table import PATCHES, Patch, current, owner_of, replace, replaced
from spmd.program.flow._remat import barrier_on_recompute
from spmd.program.optim._preparation import traceable
from spmd.program.sizes._size_reads import sizes_read
from spmd.program.trace._module_calls import report_compiling
from tests.base.test_private_names import SOURCES, dotted

ROOT = Path(__file__).resolve().parents[2]
# Packages that are not installed are not looked at: environments of other versions of torch have none of Hugging Face's.
INSTALLED = [patch for patch in PATCHES if find_spec(patch.target.partition(".")[0]) is not None]
EXPECTED = [patch for patch in INSTALLED if patch.is_expected]
LASTING = [patch for patch in EXPECTED if not patch.undone_by and not patch.target.endswith("_foreach_supported_types")]

# Run without spmd, so that torch's own objects are looked at.
LOOK = """
import importlib, importlib.util, inspect, json, sys, threading
import torch, torch.amp.autocast_mode, torch.optim.swa_utils, torch.utils.checkpoint, torch.utils.dlpack, torch._higher_order_ops.utils
import torch.optim._adafactor, torch.optim.optimizer, torch.utils._device, torch.utils._foreach_utils
import jax._src.compilation_cache
import torch._dynamo, torch._higher_order_ops.associative_scan, torch.distributed.tensor.parallel, torch.distributed.fsdp

if importlib.util.find_spec("accelerate") and importlib.util.find_spec("transformers"):
    import transformers.trainer

found = {}
for target in json.load(sys.stdin):
    *path, name = target.split(".")
    loaded = max(i for i in range(1, len(path) + 1) if ".".join(path[:i]) in sys.modules)
    value = sys.modules[".".join(path[:loaded])]
    for part in [*path[loaded:], name]:
        value = getattr(value, part, None)
    try:
        parameters = ", ".join(inspect.signature(value).parameters) if callable(value) else None
    except ValueError:
        parameters = None
    found[target] = None if value is None else [parameters]
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def torchs_own() -> dict[str, list[str | None] | None]:
    """Target -> its parameters, or None if torch does not have it."""
    targets = json.dumps([patch.target for patch in INSTALLED])
    done = subprocess.run([sys.executable, "-c", LOOK], input=targets, capture_output=True, text=True, check=True, cwd="/")
    return json.loads(done.stdout)


def test_every_target_is_there_with_the_parameters_that_it_should_have(torchs_own: dict[str, list[str | None] | None]) -> None:
    wrong: list[str] = []
    for patch in INSTALLED:
        found = torchs_own[patch.target]
        if patch.target in ("torch.optim._adafactor.min", "torch.optim._adafactor.max"):  # globals over the builtins
            assert found is None
        elif not patch.is_expected:
            continue
        elif found is None:
            wrong.append(f"{patch.target} is gone")
        elif patch.parameters is not None and found[0] != patch.parameters:
            wrong.append(f"{patch.target} has parameters ({found[0]}), and should have ({patch.parameters})")
    assert not wrong, "\n" + "\n".join(wrong)


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.target} by {Path(patch.file).stem}")
def test_the_file_that_is_named_replaces_it_and_says_why(patch: Patch) -> None:
    text = (ROOT / patch.file).read_text(encoding="utf-8")
    assert patch.target in text or patch.target.rpartition(".")[2] in text or "_table" in text
    assert patch.why


@pytest.mark.parametrize("patch", LASTING, ids=lambda patch: patch.target)
def test_what_is_replaced_for_good_is_ours(patch: Patch) -> None:
    spmd.compat.torch_distributed.install()  # the first mesh of type "jax" would
    if patch.target.startswith("transformers."):
        importlib.import_module("transformers.generation.utils")  # a program's own import would
    importlib.import_module("spmd.dynamo")  # the first torch.compile(backend="spmd") would
    found = current(patch.target)
    code = getattr(found, "__code__", None)
    name: str = code.co_filename if code is not None else sys.modules[type(found).__module__].__file__ or ""
    assert Path(name).is_relative_to(ROOT / "spmd"), name


CONTEXTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "spmd.program.flow._remat.barrier_on_recompute": barrier_on_recompute,
    "spmd.patches._running_averages.counting_on_device": counting_on_device,
    "spmd.patches._causal_masks.without_mask_reads": without_mask_reads,
    "spmd.program.trace._module_calls.report_compiling": report_compiling,
    "spmd.program.optim._preparation.traceable": lambda: traceable([]),
    "spmd.program.sizes._size_reads.sizes_read": sizes_read,
    "spmd.compat.torch_xla.uninstall": spmd.compat.torch_xla.installed,
    "spmd.huggingface.train_on": lambda: train_on(Mesh(range(1), (1,), ("data",))),
}


@pytest.mark.parametrize("by", sorted({patch.undone_by for patch in EXPECTED if patch.undone_by}))
def test_what_is_replaced_for_a_while_is_as_before_afterwards_and_after_an_error(by: str) -> None:
    targets = [patch.target for patch in EXPECTED if patch.undone_by == by]
    if by == "spmd.huggingface.train_on":
        importlib.import_module("transformers.trainer")  # which takes seconds

    def standing() -> list[Any]:
        return [vars(owner).get(name) for owner, name in map(owner_of, targets)]

    before = standing()
    with pytest.raises(KeyError), CONTEXTS[by]():
        assert all(now is not then for now, then in zip(standing(), before, strict=True))
        raise KeyError
    assert all(now is then for now, then in zip(standing(), before, strict=True))


def test_what_is_not_listed_is_not_replaced() -> None:
    with pytest.raises(AssertionError, match="torch.randn is not listed"):
        replace("torch.randn", print)
    with pytest.raises(AssertionError, match="torch.randn is not listed"), replaced("torch.randn", print):
        pass


@functools.cache
def nodes(source: str) -> list[ast.AST]:
    return list(ast.walk(ast.parse((ROOT / source).read_text(encoding="utf-8"))))


@pytest.mark.parametrize("library", ["torch", "jax", "numpy", "transformers", "accelerate"])
def test_nothing_is_replaced_in_another_way(library: str) -> None:
    findings: list[str] = []
    for source in SOURCES:
        theirs = {
            alias.asname or alias.name.partition(".")[0]
            for node in nodes(source)
            if isinstance(node, ast.Import | ast.ImportFrom)
            for alias in node.names
            if (alias.name if isinstance(node, ast.Import) else node.module or "").partition(".")[0] == library
        }
        for node in nodes(source) if theirs else ():
            written = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AugAssign) else []
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "setattr":
                written = [ast.Attribute(node.args[0], "set")]
            for target in written:
                if isinstance(target, ast.Attribute) and (dotted(target) or "").partition(".")[0] in theirs:
                    findings.append(f"{source}:{node.lineno}: {ast.unparse(target)} is replaced past spmd/patches/_table.py")
    assert not findings, "\n" + "\n".join(findings)
