"""One trial of random layouts: a seed draws an operation or a training step, a mesh, layouts and a dtype. CPU torch is the oracle.

print(trial(17))     # {"what": "conv2d float32 eager ...", "result": "right"}
"""

from __future__ import annotations

import copy
import math
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.utils._pytree as pytree

import spmd
from benchmarks.layout_ops import OPS, Case, Draw
from benchmarks.layout_steps import JOBS, optimizer
from mesh import JobError, Mesh, MeshError

MESHES = ((8,), (4, 2), (2, 4), (2, 2, 2))
AXES = ("a", "b", "c")
STEP_EVERY = 6  # one of this many trials is a training step
NUM_STEPS = 3
# Relative to the largest value of a result of one operation. Training steps use a tolerance derived from it.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 4e-2}
LAZY = 1_000_000
"""Seeds from LAZY on run the trials of seed - LAZY under `spmd.lazy()` instead of compiled or eager."""
OURS = (spmd.SpmdError, MeshError, JobError)


def trial(seed: int) -> dict[str, str]:
    """Run the trial of a seed.

    Returns:
        "what": a description of the trial. "result": "right", "refused: ..." (our own error, or an error as in CPU torch), "wrong: ..." or
        "foreign: ..." (another exception).
    """
    drawn = seed % LAZY
    d = Draw(drawn)
    mesh = _mesh(d)
    run = _step if drawn % STEP_EVERY == 0 else _operation
    torch.manual_seed(drawn)
    return run(d, mesh, "lazy" if seed >= LAZY else "")


def _mesh(d: Draw) -> Mesh:
    shape = d.one(*MESHES)
    return Mesh(range(8), shape, AXES[: len(shape)])


def any_spec(d: Draw, mesh: Mesh, rank: int) -> tuple[Any, ...]:
    """A random spec in which each axis splits at most one dim."""
    entries: list[list[str]] = [[] for _ in range(rank)]
    for axis in mesh.axis_names:
        chosen = d.rng.randrange(-1, rank) if rank else -1
        if chosen >= 0:
            entries[chosen].append(str(axis))
    return tuple(tuple(axes) if len(axes) > 1 else axes[0] if axes else None for axes in entries)


@dataclass
class _Outcome:
    values: list[Any]
    error: Exception | None


def _operation(d: Draw, mesh: Mesh, mode: str) -> dict[str, str]:
    op = OPS[d.rng.choice(sorted(OPS))]
    d.dtype = getattr(torch, d.rng.choice(op.dtypes))
    case = op.make(d)
    drawn = "compiled" if op.is_compilable and d.one(True, False) else "eager"
    mode = mode or drawn
    with_gradient = op.has_gradient and d.dtype.is_floating_point and d.one(True, True, False)
    specs = [any_spec(d, mesh, t.dim()) if d.rng.random() < 0.8 else None for t in case.inputs]
    shapes = " ".join(f"{tuple(t.shape)}:{'-' if s is None else s}" for t, s in zip(case.inputs, specs, strict=True))
    modes = f"{mode}{' gradient' if with_gradient else ''}"
    what = f"{op.name} {str(d.dtype)[6:]} {modes} {mesh.mesh_shape} {shapes}"
    cotangents = _Cotangents(d.rng.randrange(2**31))
    want = _outcome(case, case.inputs, with_gradient, "eager", cotangents)
    with_layouts = [_laid(t.clone(), mesh, s) for t, s in zip(case.inputs, specs, strict=True)]
    got = _outcome(case, with_layouts, with_gradient, mode, cotangents)
    result = _verdict(got, want, TOLERANCE.get(d.dtype, 0.0))
    if result.startswith("wrong: result") and d.dtype == torch.bfloat16:  # the CPU rounds intermediate results and may be far off itself
        wide = [t.double() if t.is_floating_point() else t for t in case.inputs]
        exact = _outcome(case, wide, with_gradient, "eager", cotangents)
        exact.values = [t.to(d.dtype) if t.is_floating_point() else t for t in exact.values]
        result = _verdict(got, exact, TOLERANCE[d.dtype]) if exact.error is None else result
    return {"what": what, "result": result}


def _laid(tensor: torch.Tensor, mesh: Mesh, spec: Any) -> torch.Tensor:
    moved = tensor.to("jax")
    return moved if spec is None else spmd.mark_sharding(moved, mesh, spec)


def _outcome(case: Case, given: list[torch.Tensor], with_gradient: bool, mode: str, cotangents: _Cotangents) -> _Outcome:
    def run(*inputs: torch.Tensor) -> list[Any]:
        inputs = tuple(t.detach().requires_grad_(with_gradient and t.dtype.is_floating_point) for t in inputs)
        found = [t for t in pytree.tree_leaves(case.fn(*inputs)) if isinstance(t, torch.Tensor)]
        made = [t for t in found if t.requires_grad]
        if made:
            wanted = [t for t in inputs if t.requires_grad]
            found += [g for g in torch.autograd.grad(made, wanted, cotangents.of(made), allow_unused=True) if g is not None]
        return found

    try:
        with _lazily(mode):
            out = (spmd.compile(run) if mode == "compiled" else run)(*given)
        return _Outcome([t.detach().cpu().as_subclass(torch.Tensor) for t in out], None)
    except Exception as error:
        return _Outcome([], error)


def _lazily(mode: str) -> AbstractContextManager[Any]:
    return spmd.lazy(max_retraces=10_000) if mode == "lazy" else nullcontext()


class _Cotangents:
    """Random cotangents: drawn for the CPU's results and reused for the device's, where they are constants of the program."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self._drawn: list[torch.Tensor] = []

    def of(self, results: list[torch.Tensor]) -> list[torch.Tensor]:
        """One cotangent for each result, on the device of the result."""
        if not self._drawn:
            self._drawn = [torch.randn(t.shape, generator=self._generator, dtype=torch.float64).to(t.dtype) for t in results]
        return [drawn.to(t.device, t.dtype) for drawn, t in zip(self._drawn, results, strict=True)]


def _verdict(got: _Outcome, want: _Outcome, tolerance: float) -> str:
    if got.error is not None:
        text = str(got.error).strip().partition("\n")[0][:200]
        kind = "refused" if isinstance(got.error, OURS) or want.error is not None else "foreign"
        return f"{kind}: {type(got.error).__name__}: {text}"
    if want.error is not None:
        return f"wrong: CPU torch refuses it: {str(want.error)[:200]}"
    if len(got.values) != len(want.values):
        return f"wrong: {len(got.values)} results, expected {len(want.values)}"
    for number, (a, b) in enumerate(zip(got.values, want.values, strict=True)):
        text = _difference(a, b, tolerance)
        if text:
            return f"wrong: result {number} of {len(got.values)}: {text}"
    return "right"


def _difference(got: torch.Tensor, want: torch.Tensor, tolerance: float) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}"
    if not want.dtype.is_floating_point:
        count = int((got != want).sum())
        return f"{count} of {want.numel()} are different" if count else ""
    a, b = got.double(), want.double()
    if not torch.equal(a.isfinite(), b.isfinite()) or not torch.equal(a[~b.isfinite()].nan_to_num(), b[~b.isfinite()].nan_to_num()):
        return "not finite in different places"
    a, b = a[b.isfinite()], b[b.isfinite()]
    largest = float(b.abs().max()) if b.numel() else 0.0
    off = float((a - b).abs().max()) if b.numel() else 0.0
    return f"off by {off:.3g} where the largest is {largest:.3g}" if off > tolerance * max(1.0, largest) else ""


def _step(d: Draw, mesh: Mesh, mode: str) -> dict[str, str]:
    name, d.dtype = d.rng.choice(sorted(JOBS)), d.one(torch.float32, torch.float64)
    job = JOBS[name](d)
    model, rule, compiled = job.model.to(d.dtype), d.one("sgd", "adamw"), d.one(True, True, False)
    share = d.one(0.0, 0.5, 1.0)
    parameters = {n: any_spec(d, mesh, p.dim()) for n, p in model.named_parameters() if d.rng.random() < share}
    batch = [any_spec(d, mesh, t.dim()) for t in job.batch]
    sizes = " ".join(f"{tuple(t.shape)}:{s}" for t, s in zip(job.batch, batch, strict=True))
    mode = mode or ("compiled" if compiled else "eager")
    what = f"step {name} {rule} {str(d.dtype)[6:]} {mode} {mesh.mesh_shape} {sizes} {parameters}"
    on_device = copy.deepcopy(model).to("jax")
    want = _trained(model, job, job.batch, rule, "eager")
    try:
        for key, spec in parameters.items():
            spmd.mark_sharding(on_device.get_parameter(key), mesh, spec)
        given = [_laid(t, mesh, s) for t, s in zip(job.batch, batch, strict=True)]
    except Exception as error:
        return {"what": what, "result": _verdict(_Outcome([], error), want, 0.0)}
    got = _trained(on_device, job, given, rule, mode)
    # each step amplifies the rounding errors of the previous one
    return {"what": what, "result": _verdict(got, want, math.sqrt(TOLERANCE[d.dtype]) / 10)}


def _trained(model: Any, job: Any, batch: list[torch.Tensor], rule: str, mode: str) -> _Outcome:
    chosen = optimizer(rule, model.parameters())

    def step(*batch: torch.Tensor) -> torch.Tensor:
        chosen.zero_grad()
        loss = job.loss(model, *batch)
        loss.backward()
        chosen.step()
        return loss

    try:
        run = spmd.compile(step) if mode == "compiled" else step
        with _lazily(mode):
            losses = [run(*batch).detach() for _ in range(NUM_STEPS)]
        losses = [loss.cpu() for loss in losses]
        values = [t.detach().cpu().as_subclass(torch.Tensor) for t in (*losses, *model.state_dict().values())]
        return _Outcome(values, None)
    except Exception as error:
        return _Outcome([], error)


__all__ = ["trial"]
