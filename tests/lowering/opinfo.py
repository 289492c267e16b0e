"""Torch's own operator samples as an oracle: each OpInfo sample runs on the CPU and on device 'jax', and both must agree.

    failure = check(by_name("add"), torch.float32, "forward")      # None, or the first line of what went wrong

Kinds: "forward" (value, dtype, shape), "grad" (gradients of every differentiable input), "inplace" and "out"; "sharded" and
"sharded_grad": the same with every input split at random over 8 devices; "error": what torch says must raise, does. A sample
that torch's CPU itself refuses is left out. Tolerances are `torch.testing.assert_close`'s own, but for `TOLERANCE`.
"""

from __future__ import annotations

import functools
import random
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.utils._pytree as pytree
from torch.testing._internal import common_utils
from torch.testing._internal.common_methods_invocations import op_db
from torch.testing._internal.opinfo import core
from torch.testing._internal.opinfo.core import OpInfo, SampleInput

import mesh
import spmd

KINDS = ("forward", "grad", "inplace", "out", "sharded", "sharded_grad", "error")
MAX_SAMPLES = 8
_HALF = (torch.bfloat16, torch.float16)
# Not equal by value, whatever the device: drawn at random, or memory nobody wrote.
# fmt: off
VALUELESS = frozenset({
    "bernoulli", "cauchy", "empty", "empty_like", "empty_permuted", "empty_strided", "exponential", "geometric", "log_normal",
    "multinomial", "new_empty", "new_empty_strided", "nn.functional.alpha_dropout", "nn.functional.dropout",
    "nn.functional.dropout2d", "nn.functional.dropout3d", "nn.functional.feature_alpha_dropout",
    "nn.functional.fractional_max_pool2d", "nn.functional.fractional_max_pool3d", "nn.functional.multi_head_attention_forward",
    "nn.functional.rrelu", "nn.functional.scaled_dot_product_attention", "normal", "pca_lowrank", "rand_like", "randint",
    "randint_like", "randn", "randn_like", "svd_lowrank", "uniform",
})
# fmt: on
# (name, dtype or kind) -> (rtol, atol, reason), where torch's default is too narrow for two correct implementations.
TOLERANCE: dict[tuple[str, str], tuple[float, float, str]] = {
    ("add", "float16"): (2e-3, 1e-5, "torch's CPU rounds alpha * other to float16 before it adds, its CUDA and we do not"),
    ("__rpow__", "complex64"): (1e-5, 1e-5, "exp(y log x): the rounding of y log x is multiplied by its size, on both sides"),
    ("pow", "complex64"): (1e-5, 1e-5, "as __rpow__"),
    ("logcumsumexp", "grad"): (5e-3, 1e-2, "torch's formula subtracts nearly equal logarithms: CPU float32 is 3e-3 from float64 too"),
}


@dataclass(frozen=True)
class Skipped:
    """Why an (op, dtype, kind) has nothing to check."""

    reason: str


def full_name(op: OpInfo) -> str:
    """`name`, or `name:variant` where torch keeps several OpInfos of one name."""
    return f"{op.name}:{op.variant_test_name}" if op.variant_test_name else op.name


@functools.cache
def _index() -> dict[str, OpInfo]:
    return {full_name(op): op for op in op_db}


def by_name(name: str) -> OpInfo:
    """The OpInfo with this `full_name`."""
    return _index()[name]


def names() -> list[str]:
    """Every `full_name`, sorted."""
    return sorted(_index())


def has_error_inputs(op: OpInfo) -> bool:
    """True if torch's tests name inputs that the op must refuse, and kind "error" applies."""
    return torch.float32 in op.supported_dtypes("cpu") and not _inapplicable(op, torch.float32, "error")


def _seed(seed: int) -> None:
    """Seed what samples are drawn from; of torch the CPU alone, because the others write the whole stack down each time."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


# Before each sample torch looks for a unittest.TestCase on the stack, which takes longer than running the sample: there is none.
common_utils.extract_test_fn = core.extract_test_fn = lambda: None  # type: ignore[attr-defined]
common_utils.set_rng_seed = _seed


def samples(op: OpInfo, dtype: torch.dtype, requires_grad: bool = False, limit: int = MAX_SAMPLES) -> Iterable[SampleInput]:
    """The op's samples, the same ones in every run: first `limit` that are spread over the list, then the others."""
    torch.manual_seed(0)
    made = op.sample_inputs("cpu", dtype, requires_grad=requires_grad)
    if limit == 1:
        return made  # one by one: most are never asked for
    found = list(made)
    if len(found) <= limit:
        return found
    spread = [round(i * (len(found) - 1) / max(limit - 1, 1)) for i in range(limit)]
    return [found[i] for i in [*spread, *sorted(set(range(len(found))) - set(spread))]]


def mapped(tree: Any, device: str) -> Any:
    """The tree with leaf copies of its tensors on `device`: same strides, overlaps, conj and neg bits, `requires_grad`.

    Storages are shared again where tensors shared them; device arguments become `device`.
    """
    storages: dict[int, torch.Tensor] = {}
    tensors: dict[int, torch.Tensor] = {}

    def moved(leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return torch.device(device)
        if isinstance(leaf, str) and leaf == "cpu":
            return device
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in tensors:
            tensors[id(leaf)] = _copied(leaf, device, storages).requires_grad_(leaf.requires_grad)
        return tensors[id(leaf)]

    return pytree.tree_map(moved, tree)


def _copied(tensor: torch.Tensor, device: str, storages: dict[int, torch.Tensor]) -> torch.Tensor:
    tensor = tensor.detach()
    if tensor.layout != torch.strided or tensor.device.type != "cpu":
        return tensor.to(device)
    if tensor.is_conj():
        return _copied(tensor.conj(), device, storages).conj()
    if tensor.is_neg():
        return _copied(torch._neg_view(tensor), device, storages)._neg_view()  # type: ignore[attr-defined]
    storage = tensor.untyped_storage()
    key = storage.data_ptr() or id(storage)
    if (key, tensor.dtype) not in storages:
        flat = torch.empty(0, dtype=tensor.dtype).set_(storage)
        storages[key, tensor.dtype] = flat.clone().to(device)
    return storages[key, tensor.dtype].as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())


def to_cpu(tree: Any) -> Any:
    """The tree with device tensors as CPU tensors."""
    return pytree.tree_map(lambda leaf: leaf.detach().cpu() if isinstance(leaf, torch.Tensor) else leaf, tree)


def check(op: OpInfo, dtype: torch.dtype, kind: str, limit: int = MAX_SAMPLES) -> str | Skipped | None:
    """None if every sample agrees, the first line of the first failure, or why there is nothing to check.

    The first `limit` samples are run, and more only until one applies.
    """
    if kind not in KINDS:
        raise ValueError(f"kind is one of {KINDS}, not {kind!r}")
    if dtype not in op.supported_dtypes("cpu"):
        return Skipped(f"{dtype} is not supported on the CPU")
    reason = _inapplicable(op, dtype, kind)
    if reason:
        return Skipped(reason)
    if kind == "error":
        return _must_raise(op)
    run = _RUNS[kind]
    num_run = 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, sample in enumerate(samples(op, dtype, requires_grad=kind.endswith("grad"), limit=limit)):
            if number >= limit and num_run:
                break
            try:
                expected = run(op, sample, "cpu")
            except Exception:  # torch's own CPU refuses this sample
                continue
            if expected is None:
                continue
            num_run += 1
            try:
                actual = run(op, sample, "jax")
                compare(op.name, actual, expected, tolerance=_tolerance(op, dtype, kind))
            except Exception as error:
                is_rounding = isinstance(error, AssertionError) and dtype in _HALF
                if not (is_rounding and _equals_rounded_float32(op, sample, run, actual, expected)):
                    return f"sample {number}: {first_line(error)}"
    return None if num_run else Skipped("no sample applies")


def _equals_rounded_float32(op: OpInfo, sample: SampleInput, run: Callable[..., Any], actual: Any, expected: Any) -> bool:
    """True if a 16-bit result equals the CPU's float32 result, rounded once.

    Torch's CPU rounds intermediate values of some ops to 16 bits, which its CUDA and we do not: either answer is right.
    """

    def widened(leaf: Any) -> Any:
        if isinstance(leaf, torch.Tensor) and leaf.dtype in _HALF:
            return leaf.detach().to(torch.float32).requires_grad_(leaf.requires_grad)
        return torch.float32 if leaf in _HALF else leaf

    def rounded(leaf: Any, like: Any) -> Any:
        return leaf.to(like.dtype) if isinstance(like, torch.Tensor) else leaf

    first, args, kwargs = pytree.tree_map(widened, (sample.input, tuple(sample.args), dict(sample.kwargs)))
    wide_sample = SampleInput(first, args=args, kwargs=kwargs, output_process_fn_grad=sample.output_process_fn_grad)
    try:
        wide = run(op, wide_sample, "cpu")
        compare(op.name, actual, pytree.tree_map(rounded, wide, expected))
    except (AssertionError, RuntimeError, ValueError):
        return False
    return True


def first_line(error: BaseException) -> str:
    """The exception's type and message on one line, short enough for a table."""
    text = " | ".join(line.strip() for line in str(error).splitlines() if line.strip())
    return f"{type(error).__name__}: {text}"[:300]


def _tolerance(op: OpInfo, dtype: torch.dtype, kind: str) -> dict[str, float]:
    """Keyword arguments for `assert_close`; none where torch's default holds."""
    entry = TOLERANCE.get((op.name, kind)) or TOLERANCE.get((op.name, str(dtype).removeprefix("torch.")))
    return {"rtol": entry[0], "atol": entry[1]} if entry else {}


def compare(name: str, actual: Any, expected: Any, tolerance: dict[str, float] | None = None) -> None:
    """Values, dtypes and shapes of two trees of tensors and numbers; only dtypes and shapes of the ops in `VALUELESS`."""
    actual_leaves, expected_leaves = pytree.tree_leaves(to_cpu(actual)), pytree.tree_leaves(to_cpu(expected))
    assert len(actual_leaves) == len(expected_leaves), f"{len(actual_leaves)} results, expected {len(expected_leaves)}"
    for got, want in zip(actual_leaves, expected_leaves, strict=True):
        if not isinstance(want, torch.Tensor):
            torch.testing.assert_close(got, want, equal_nan=True) if isinstance(want, int | float | complex) else None
            continue
        assert isinstance(got, torch.Tensor), f"a {type(got).__name__}, expected a tensor"
        if name in VALUELESS:
            assert (got.dtype, got.shape) == (want.dtype, want.shape), f"{got.dtype} {got.shape}, expected {want.dtype} {want.shape}"
        else:
            torch.testing.assert_close(got, want, equal_nan=True, **(tolerance or {}))


def _inapplicable(op: OpInfo, dtype: torch.dtype, kind: str) -> str:
    if kind == "error" and (op.error_inputs_func is None or dtype != torch.float32):
        return "no inputs that must raise" if op.error_inputs_func is None else "inputs that must raise have their own dtypes"
    if kind.endswith("grad") and not (op.supports_autograd and dtype in op.supported_backward_dtypes("cpu")):
        return "no gradient"
    if kind == "inplace" and op.inplace_variant is None:
        return "no in-place form"
    if kind == "out" and not op.supports_out:
        return "no out= form"
    return ""


def _arguments(sample: SampleInput, device: str, split: bool = False) -> tuple[Any, tuple[Any, ...], dict[str, Any]]:
    arguments = mapped((sample.input, tuple(sample.args), dict(sample.kwargs)), device)
    return spread(arguments) if split and device == "jax" else arguments


def spread(tree: Any) -> Any:
    """The tree with every device tensor split at random over 8 devices: a view by splitting its base."""
    rng, done = random.Random(0), dict[int, torch.Tensor]()

    def marked(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.device.type != "jax" or leaf.layout != torch.strided:
            return leaf
        if id(leaf) not in done:
            whole = leaf.is_contiguous() and leaf._base is None and not leaf.is_conj() and not leaf.is_neg()
            done[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad) if whole else leaf
            base = done[id(leaf)] if whole or leaf._base is None else leaf._base
            spmd.mark_sharding(base.detach(), mesh.Mesh(range(8), (4, 2), ("data", "model")), _any_spec(base.dim(), rng))
        return done[id(leaf)]

    return pytree.tree_map(marked, tree)


def _any_spec(num_dims: int, rng: random.Random) -> tuple[Any, ...]:
    """Each axis splits one dim or none."""
    entries: list[list[str]] = [[] for _ in range(num_dims)]
    for axis in ("data", "model"):
        chosen = rng.randrange(-1, num_dims)
        if chosen >= 0:
            entries[chosen].append(axis)
    return tuple(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in entries)


def _call(op: OpInfo, device: str, arguments: tuple[Any, tuple[Any, ...], dict[str, Any]], fn: Callable[..., Any] | None = None) -> Any:
    first, args, kwargs = arguments
    torch.manual_seed(0)
    with torch.device(device):  # factory functions without a device argument
        return (fn or op.get_op())(first, *args, **kwargs)


def _must_raise(op: OpInfo) -> str | None:
    """The first input that torch's CPU refuses, as torch says it must, and the device does not."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number, error_input in enumerate(op.error_inputs("cpu")):
            sample = error_input.sample_input
            try:
                _call(op, "cpu", _arguments(sample, "cpu"))
            except Exception:
                try:
                    out = _call(op, "jax", _arguments(sample, "jax"))
                except Exception:
                    continue
                shapes = [tuple(leaf.shape) for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor)]
                return f"error input {number}: gave {shapes}, expected {error_input.error_type.__name__}: {error_input.error_regex}"[:300]
    return None


def _forward(op: OpInfo, sample: SampleInput, device: str, split: bool = False) -> Any:
    out = _call(op, device, _arguments(sample, device, split))
    _assert_on(device, out)
    return _unique(op, sample, out)


def _unique(op: OpInfo, sample: SampleInput, out: Any) -> Any:
    """Decompositions are unique only up to signs and phases: compare what is."""
    if op.name in ("linalg.svd", "svd", "linalg.eigh", "symeig"):
        return sample.output_process_fn_grad(out) if isinstance(out, tuple) else out
    if op.name == "mode":  # of equal values torch's unstable sort may choose any position
        dim = sample.kwargs.get("dim", sample.args[0] if sample.args else -1)
        source, places = sample.input.detach(), out[1].cpu()
        if source.dim() and places.dim() < source.dim():
            places = places.unsqueeze(dim)
        return out[0], (source.gather(dim, places) if source.dim() else places)
    if op.name in ("linalg.eig", "linalg.eigvals"):
        values = out[0] if isinstance(out, tuple) else out
        return torch.sum(values, -1), torch.sum(values * values, -1)
    return out


def _assert_on(device: str, out: Any) -> None:
    for leaf in pytree.tree_leaves(out):
        if isinstance(leaf, torch.Tensor):
            assert leaf.device.type == device, f"a result is on {leaf.device}, expected {device}"


def _gradient(op: OpInfo, sample: SampleInput, device: str, split: bool = False) -> Any:
    arguments = _arguments(sample, device, split)
    inputs = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    wrapper = op.gradcheck_wrapper
    out = _call(op, device, arguments, fn=lambda *args, **kwargs: wrapper(op.get_op(), *args, **kwargs))
    out = sample.output_process_fn_grad(out)
    outs = [leaf for leaf in pytree.tree_leaves(out) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not inputs or not outs:
        return None
    cotangents = [_cotangent(i, leaf).to(device) for i, leaf in enumerate(outs)]
    return torch.autograd.grad(outs, inputs, cotangents, allow_unused=True)


def _cotangent(seed: int, out: torch.Tensor) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(out.shape, dtype=out.dtype, generator=generator)


def _in_place(op: OpInfo, sample: SampleInput, device: str) -> Any:
    if sample.broadcasts_input or not isinstance(sample.input, torch.Tensor):
        return None
    first, args, kwargs = _arguments(sample, device)
    target = first.clone()
    version = target._version
    out = _call(op, device, (target, args, kwargs), fn=op.inplace_variant)
    assert out is target, "the in-place form did not return its input"
    assert target._version > version, "the in-place form did not advance the version counter"
    return target


def _out(op: OpInfo, sample: SampleInput, device: str) -> Any:
    expected = _call(op, "cpu", _arguments(sample, "cpu"))
    single = isinstance(expected, torch.Tensor)
    if not (single or (isinstance(expected, tuple | list) and all(isinstance(e, torch.Tensor) for e in expected))):
        return None
    outs = tuple(torch.empty_like(e, device=device) for e in ([expected] if single else expected))
    first, args, kwargs = _arguments(sample, device)
    _call(op, device, (first, args, {**kwargs, "out": outs[0] if single else outs}))
    return _unique(op, sample, outs[0] if single else type(expected)(*outs) if hasattr(expected, "_fields") else outs)


def applicable(op: OpInfo, dtypes: tuple[torch.dtype, ...], kinds: tuple[str, ...] = KINDS) -> Iterator[tuple[torch.dtype, str]]:
    """The (dtype, kind) pairs that make sense for the op."""
    for dtype in dtypes:
        for kind in kinds:
            if dtype in op.supported_dtypes("cpu") and not _inapplicable(op, dtype, kind):
                yield dtype, kind


_RUNS: dict[str, Callable[..., Any]] = {
    "forward": _forward,
    "grad": _gradient,
    "inplace": _in_place,
    "out": _out,
    "sharded": functools.partial(_forward, split=True),
    "sharded_grad": functools.partial(_gradient, split=True),
}
