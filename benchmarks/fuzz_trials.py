"""Runs one program of `fuzz_programs` on CPU torch and on device "jax", and compares them after every call.

print(trial(17))     # {"mode": "compiled", "result": "equal", "calls": 6, "traces": 3}
"""

from __future__ import annotations

import collections
import contextlib
import contextvars
import functools
import math
import sys
import types
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

import mesh
import spmd
from benchmarks.fuzz_programs import LAZY, NUM_CALLS, source

RTOL, ATOL = 1e-5, 1e-6
LARGEST = 1e6  # a program whose values grow beyond this multiplies any rounding error, so the rest of its calls is not compared
MODES = ("compiled", "compiled", "compiled", "compiled", "sharded", "sharded", "compiled", "sharded", "eager", "compiled")
OURS = (spmd.SpmdError, mesh.MeshError, mesh.JobError)
_SPECS = {1: ("model",), 2: ("data", "model")}


def trial(seed: int) -> dict[str, Any]:
    """Run the program of a seed.

    Returns:
        "mode", "result" ("equal", "refused: ...", "wrong: ..." or "error: ..."), "calls" that were compared, "traces", and
        "has_grown" if its values grew beyond `LARGEST` and the comparison ended before its last call.
    """
    if seed >= LAZY:
        return run(source(seed - LAZY), "lazy sharded" if seed % 2 else "lazy", f"fuzzed_{seed}")
    return run(source(seed), MODES[seed % len(MODES)], f"fuzzed_{seed}")


def run(text: str, mode: str, name: str = "fuzzed") -> dict[str, Any]:
    """Run the program with source text `text`. Returns the same as `trial`."""
    host, device = _Machine(text, "cpu", name), _Machine(text, mode, name)
    found: dict[str, Any] = {"mode": mode, "result": "equal", "calls": 0}
    for i in range(NUM_CALLS):
        want, got = host.call(i), device.call(i)
        if want.error is None and largest(want.value) > LARGEST:
            found["has_grown"] = True
            break
        found["calls"] = i + 1
        found["result"] = _verdict(got, want, i)
        if found["result"] != "equal" or want.error is not None:
            break
    found["traces"] = device.num_traces()
    return found


@dataclass
class _Outcome:
    value: Any = None
    error: Exception | None = None


class _Machine:
    """A program with its state on one device, in one mode."""

    def __init__(self, text: str, mode: str, name: str) -> None:
        self.mode = mode
        self.grid = mesh.Mesh(range(8), (4, 2), ("data", "model")) if mode.endswith("sharded") else None
        self.lazy = spmd.lazy(max_retraces=10_000) if mode.startswith("lazy") else contextlib.nullcontext()
        module = sys.modules[f"{name}_{mode}"] = types.ModuleType(f"{name}_{mode}")  # dataclasses look up their module in sys.modules
        space = vars(module)
        space.update(tensor=self.tensor, fill=self.fill)
        torch.manual_seed(0)
        exec(compile(text, f"<{name}>", "exec"), space)
        self.space = space
        self.step = self.raw = space["raw_step"] = space["step"]
        if mode in ("compiled", "sharded"):
            self.step = spmd.compile(self.raw, max_retraces=10_000)

    def tensor(self, seed: int, *shape: int) -> torch.Tensor:
        made = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.5
        return self.placed(made)

    def placed(self, made: torch.Tensor) -> torch.Tensor:
        if self.mode == "cpu":
            return made
        moved = made.to("jax")
        return moved if self.grid is None else spmd.mark_sharding(moved, self.grid, _SPECS[made.dim()])

    def fill(self, model: torch.nn.Module, seed: int) -> None:
        """Initialize a model with the same weights in every mode, and move it to the device."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn(p.shape, generator=generator) * 0.3)
        if self.mode != "cpu":
            model.to("jax")
        for p in model.parameters() if self.grid is not None else ():
            spmd.mark_sharding(p, self.grid, _SPECS[p.dim()])

    def call(self, i: int) -> _Outcome:
        try:
            with self.lazy:
                self.space["between"](i)
                args, kwargs = self.space["given"](i)
                result = self.step(*args, **kwargs)
            state = [eval(root, self.space) for root in self.space["STATE"]]
            return _Outcome(snapshot([result, state, args, kwargs]))
        except Exception as error:
            return _Outcome(error=error)

    def num_traces(self) -> int:
        return getattr(self.step, "num_traces", 0)


def snapshot(value: Any) -> Any:
    """Values as plain data for a comparison. Objects and storages are numbered by first occurrence, to compare identity."""
    return _Snapshot().of(value)


@dataclass
class _Snapshot:
    seen: dict[int, int] = field(default_factory=dict[int, int])
    storages: dict[int, int] = field(default_factory=dict[int, int])
    kept: list[Any] = field(default_factory=list[Any])

    def of(self, value: Any) -> Any:
        if value is None or isinstance(value, (bool, int, float, str, bytes, np.generic, slice)):
            return value
        if type(value) is tuple:
            return ("tuple", [self.of(v) for v in value])
        if isinstance(value, types.FunctionType) and not (vars(value) or value.__defaults__ or value.__kwdefaults__):
            return ("function", value.__name__)
        if id(value) in self.seen:
            return ("again", self.seen[id(value)])
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)
        return self.new(value)

    def new(self, value: Any) -> Any:
        name = type(value).__name__
        if isinstance(value, torch.Tensor):
            storage = self.storages.setdefault(value.untyped_storage()._cdata, len(self.storages))
            self.kept.append(value.untyped_storage())
            return _Tensor(value.detach().cpu().as_subclass(torch.Tensor).clone(), storage)
        if isinstance(value, np.ndarray):
            return ("array", value.dtype.str, value.tolist())
        if isinstance(value, torch.optim.Optimizer):
            groups = [{k: v for k, v in g.items() if k in ("lr", "momentum", "weight_decay", "betas")} for g in value.param_groups]
            return ("optimizer", self.of(groups), [self.of(dict(s)) for s in value.state.values()])
        if isinstance(value, torch.nn.Module):
            own = {k: v for k, v in vars(value).items() if not k.startswith("_")}
            return (name, self.of(own), [self.of(list(d.items())) for d in (value._parameters, value._buffers, value._modules)])
        if isinstance(value, (dict, collections.UserDict)):
            return (name, [(self.of(k), self.of(v)) for k, v in value.items()])
        if isinstance(value, collections.ChainMap):
            return (name, self.of(value.maps))
        if isinstance(value, (list, collections.deque, tuple)):
            return (name, [self.of(v) for v in value])
        if isinstance(value, (set, frozenset)):
            return (name, sorted(map(repr, value)))
        if isinstance(value, bytearray):
            return (name, bytes(value))
        if isinstance(value, contextvars.ContextVar):
            return (name, self.of(value.get()))
        if isinstance(value, functools.partial):
            return (name, self.of(value.args), self.of(value.keywords))
        if isinstance(value, (types.FunctionType, type, types.ModuleType)):
            defaults = [value.__defaults__, value.__kwdefaults__] if isinstance(value, types.FunctionType) else []
            own = {k: v for k, v in vars(value).items() if not k.startswith("__")}
            return (name, self.of(own), self.of(defaults))
        slots = [s for cls in type(value).__mro__ for s in getattr(cls, "__slots__", ())]
        own = {s: getattr(value, s) for s in slots if hasattr(value, s)} | getattr(value, "__dict__", {})
        return (name, self.of(own))


@dataclass
class _Tensor:
    value: torch.Tensor
    storage: int


def _verdict(got: _Outcome, want: _Outcome, call: int) -> str:
    where = f"call {call}: "
    if got.error is not None:
        kind = type(got.error).__name__
        if want.error is not None and kind == type(want.error).__name__:
            return "equal"
        text = f"{kind}: {str(got.error).strip()[:300]}"
        return (
            f"refused: {text}"
            if isinstance(got.error, OURS)
            else f"{'error' if want.error is None else 'wrong'}: {where}{text} (CPU: {want.error!r})"
        )
    if want.error is not None:
        return f"wrong: {where}CPU torch raises {want.error!r}"
    text = difference(got.value, want.value, "")
    return f"wrong: {where}{text}" if text else "equal"


def largest(value: Any) -> float:
    """The largest finite magnitude of a tensor's element in a snapshot."""
    if isinstance(value, _Tensor):
        sizes = value.value.double().abs().flatten()
        return max(sizes[sizes.isfinite()].tolist(), default=0.0)
    if isinstance(value, dict):
        return largest(list(value.values()))
    return max(map(largest, value), default=0.0) if isinstance(value, (list, tuple)) else 0.0


def difference(got: Any, want: Any, path: str) -> str:
    """A text about the first difference between two snapshots, or ""."""
    if type(got) is not type(want):
        return f"{path}: {_short(got)}, expected {_short(want)}"
    if isinstance(want, _Tensor):
        if got.storage != want.storage:
            return f"{path}: shares memory with others: storage {got.storage}, expected {want.storage}"
        return _tensor_difference(got.value, want.value, path)
    if isinstance(want, float):
        return (
            ""
            if got == want or (math.isnan(got) and math.isnan(want)) or math.isclose(got, want, rel_tol=RTOL, abs_tol=ATOL)
            else f"{path}: {got}, expected {want}"
        )
    if isinstance(want, (list, tuple)):
        if len(got) != len(want):
            return f"{path}: {len(got)} items, expected {len(want)}: {_short(got)}, expected {_short(want)}"
        return next((s for i, (a, b) in enumerate(zip(got, want, strict=True)) if (s := difference(a, b, f"{path}.{i}"))), "")
    if isinstance(want, dict):
        return difference(list(got.items()), list(want.items()), path)
    return "" if got == want else f"{path}: {_short(got)}, expected {_short(want)}"


def _tensor_difference(got: torch.Tensor, want: torch.Tensor, path: str) -> str:
    if got.shape != want.shape or got.dtype != want.dtype:
        return f"{path}: {got.dtype}{list(got.shape)}, expected {want.dtype}{list(want.shape)}"
    if torch.allclose(got, want, rtol=RTOL, atol=ATOL, equal_nan=True):
        return ""
    off, shown = float((got.double() - want.double()).abs().max()), [t.flatten()[:4].tolist() for t in (got, want)]
    return f"{path}: off by {off:.3g}: {shown[0]}, expected {shown[1]}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 120 else text[:120] + "..."


__all__ = ["MODES", "difference", "largest", "run", "snapshot", "trial"]
