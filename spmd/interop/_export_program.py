"""`export`: saves a step or a model as one file that runs with JAX alone.

    spmd.export(train_step, (x, y), "step.spmd")          # state in, state out
    spmd.export(model.eval(), (x,), "model.spmd")         # inference
    spmd.export(model.eval(), (x,), "model.spmd", dynamic={"x": {0: spmd.Dim("batch", max=512)}})    # for all sizes up to 512

The file is a zip archive. It contains `program.bin` (portable StableHLO, by `jax.export`), `manifest.json` (names, layouts,
structure of the result), the state's values as `.npy`, and the loader, `spmd_exported.py` (see `_exported_program`).
"""

from __future__ import annotations

import inspect
import io
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

from mesh import ShardingSpec
from spmd._version import __version__
from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, called_at, message, shown
from spmd.base._jax import call_of, exported_by
from spmd.base._torch import pytree
from spmd.base._written_files import file_to_write
from spmd.base._wrong_arguments import require_arguments, require_function, wrong_argument
from spmd.device._arrays import fetched
from spmd.device._partitioner import avoid_faults
from spmd.device._random_stream import advanced, default_stream
from spmd.device._storage import Buffer, buffer_of, is_device_tensor
from spmd.interop import _exported_program
from spmd.interop._export_traces import FileTraces, Traced
from spmd.interop._state_names import number_names, state_names
from spmd.program._sized_step import SizedStep
from spmd.program._step import Step
from spmd.program.find._discover import Reachable, reachable
from spmd.program.find._static import name_of
from spmd.program.reads import PutInCache
from spmd.program.sizes._expressions import Expression
from spmd.program.trace._host_results import HostTensor
from spmd.program.trace._output_tree import rebuilt
from spmd.program.trace._results import OUTPUTS, Leaf

_PLATFORMS = ("cpu", "cuda", "gpu", "rocm", "tpu")
_PLAIN = (type(None), bool, int, float, str)
RANDOM = "random state"


def export(
    fn: Callable[..., Any] | nn.Module,
    args: tuple[Any, ...],
    path: str | Path,
    kwargs: dict[str, Any] | None = None,
    *,
    also: Sequence[tuple[Any, ...]] = (),
    platforms: Sequence[str] | None = None,
    weights: bool = True,
    dynamic: Mapping[str, Any] | None = None,
) -> Path:
    """Save the program of a call of `fn` with these arguments, as a file that JAX runs without torch.

    Args:
        fn: a function of `spmd.compile`, any function that it accepts, or a module (run without gradients).
        args, kwargs: example arguments, which determine shapes, dtypes, layouts and Python values. CPU tensors are moved to the device.
        path: path of the file.
        also: further positional arguments, for other sizes or Python values. Each gets its own program; all share one state.
        platforms: target platforms ("cpu", "cuda" or "gpu", "rocm", "tpu"); None: the platform of the tensors.
        weights: save the values of the state. Otherwise they are passed when the file is loaded. Tensors over a topology have no values.
        dynamic: dims of varying size, as for `spmd.compile`; None: those that the step was compiled with, if any. Calls of the file may
            have any size from `min` to `max` that is a multiple of the number of shards. Nothing is padded, so buckets do not apply.

    Returns:
        The path.

    Raises:
        SpmdError: an argument is of a wrong type, `path` is not in a folder, or the program would need Python: the function writes to
            Python objects, updates an argument, returns more than containers of tensors and plain values, or depends on the host.
        TraceError: from `spmd.compile`; or it is not proved that one program, plus a few for small sizes, covers all sizes.
    """
    path, source = file_to_write(path, "spmd.export", "spmd.export(fn, args, {path})"), fn._fn if isinstance(fn, Step) else fn
    name = name_of(source)
    _require_call(fn, args, also, kwargs, platforms, name)

    @_named_like(source)
    def call(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad() if isinstance(source, nn.Module) else torch.enable_grad():
            result = source(*args, **kwargs)
        return pytree.tree_map(_copied, result)

    traces = FileTraces(call, (fn.dynamic if isinstance(fn, SizedStep) else {}) if dynamic is None else dynamic)
    calls: list[Any] = [_on_device((these, kwargs or {})) for these in (args, *also)]
    writer = _Writer(name, source, calls[0], [traced for given in calls for traced in traces.of_call(*given)])
    first = writer.parts[0].program
    chosen = _named_platforms((first.devices.platform,) if platforms is None else platforms)
    programs = [part.exported(chosen) for part in writer.parts]  # before the file is created, because it may raise
    with zipfile.ZipFile(path, "w") as archive:
        manifest: dict[str, Any] = {**writer.manifest(weights and not first.is_ahead), "platforms": chosen}
        for number, exported in enumerate(programs):
            manifest["programs"][number]["call"] = call_of(exported)
            archive.writestr(f"program{number}.bin", exported.mlir_module_serialized)
        archive.writestr("manifest.json", json.dumps(manifest, indent=1))
        code = Path(_exported_program.__file__).read_text(encoding="utf-8")
        archive.writestr("spmd_exported.py", code)
        archive.writestr("__main__.py", code)
        for item, value in zip(manifest["state"], writer.values(), strict=True):
            if item["file"]:
                archive.writestr(item["file"], _npy(value))
    return path


def _require_call(fn: Any, args: Any, also: Any, kwargs: Any, platforms: Any, name: str) -> None:
    require_function(fn, "export", "spmd.export(train_step, (x,), path)")
    require_arguments(args, f"export of {name}", "spmd.export(fn, (x,), path)")
    require_arguments(also, f"also= of the export of {name}", "spmd.export(fn, (x,), path, also=[(y,)])")
    for given in also:
        require_arguments(given, f"each item of also= of the export of {name}", "spmd.export(fn, (x,), path, also=[(y,)])")
    if kwargs is not None and not isinstance(kwargs, dict):
        raise wrong_argument(f"kwargs of the export of {name} must be a dict, got {shown(kwargs)}", 'spmd.export(fn, (), path, {"x": x})')
    if platforms is not None:
        _named_platforms(platforms)


def _named_platforms(platforms: Any) -> tuple[str, ...]:
    """The platforms by jax's names, each once."""
    listed = list(platforms) if isinstance(platforms, tuple | list | set | frozenset) else []
    unknown = [one for one in listed if one not in _PLATFORMS]
    if not listed or unknown:
        what = f"platforms of export must be names of platforms, got {shown(platforms) if not listed else ', '.join(map(shown, unknown))}"
        fix = f'spmd.export(fn, args, path, platforms=["{platforms if isinstance(platforms, str) and platforms in _PLATFORMS else "cpu"}"])'
        raise SpmdError(message(what, f"known: {', '.join(_PLATFORMS)}", *called_at(), fix=fix))
    return tuple(dict.fromkeys("cuda" if one == "gpu" else one for one in listed))


def _named_like(source: Any) -> Callable[[Any], Any]:
    """A decorator that gives a function the name and signature of `source`."""

    def rename(call: Any) -> Any:
        call.__name__ = call.__qualname__ = name_of(source)
        with suppress(TypeError, ValueError):  # without a signature it takes any arguments
            call.__signature__ = inspect.signature(source.forward if isinstance(source, nn.Module) else source)
        return call

    return rename


def _copied(leaf: Any) -> Any:
    """A result as a contiguous copy."""
    return leaf.detach().clone(memory_format=torch.contiguous_format) if is_device_tensor(leaf) else leaf


def _on_device(tree: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf.to("jax") if isinstance(leaf, torch.Tensor) else leaf, tree)


def _npy(value: Any) -> bytes:
    host = np.ascontiguousarray(value if isinstance(value, np.ndarray) else fetched(value))
    file = io.BytesIO()
    np.save(file, host.reshape(-1).view(np.uint8))
    return file.getvalue()


class _Writer:
    """The programs of a file and their common state.

    Attributes:
        state: buffers by name; buffers that some program writes come first.
    """

    def __init__(self, name: str, fn: Any, call: Any, traces: Sequence[Traced]) -> None:
        self.name = name
        found, programs = reachable(fn, *call), [traced.program for traced in traces]
        written, read = [b for p in programs for b in p.written.buffers], [b for p in programs for b in p.read.buffers]
        buffers = list({id(b): b for b in (*written, *read)}.values())
        names = state_names(found, buffers)
        self.state = {names[id(b)]: b for b in buffers}
        self.is_written = {names[id(b)] for b in written}
        self.parts = [_Part(name, traced, names, found) for traced in traces]
        self.draws = any(part.captured.inputs.draws for part in self.parts)

    def values(self) -> list[Any]:
        """The state's values, in the manifest's order."""
        state = [b.value for b in self.state.values()]
        return [*state, default_stream.words()] if self.draws else state

    def manifest(self, has_values: bool) -> dict[str, Any]:
        """The information that the loader needs."""
        mesh = self.parts[0].program.mesh
        if any(part.program.mesh != mesh for part in self.parts):
            raise SpmdError(message(f"the calls of {self.name} are over different meshes", fix="mark their arguments over one mesh"))
        numbers = {name: value for part in self.parts for name, value in part.numbers.items()}
        state = [
            {**_described(name, buffer, {}), "is_written": name in self.is_written, "file": f"state/{i}.npy" if has_values else None}
            for i, (name, buffer) in enumerate(self.state.items())
        ]
        if self.draws:
            words = {"name": RANDOM, "shape": [4], "stored": [4], "dtype": "uint32", "spec": None if mesh is None else [None]}
            state.append({**words, "is_written": True, "file": "state/random.npy"})
        return {
            "format": _exported_program.FORMAT,
            "name": self.name,
            "versions": {"spmd": __version__, "jax": jax.__version__},
            "mesh": None if mesh is None else {"shape": list(mesh.mesh_shape), "axes": [str(axis) for axis in mesh.axis_names]},
            "state": state,
            "numbers": [{"name": name, "value": value} for name, value in numbers.items()],
            "sizes": {name: [r.least, r.most, r.multiple] for part in self.parts for name, r in part.traced.declared.items()},
            "programs": [part.manifest() for part in self.parts],
        }


class _Part:
    """A program as a function of flat arrays (written state, other state, arguments, numbers), with its part of the manifest."""

    def __init__(self, name: str, traced: Traced, names: dict[int, str], found: Reachable) -> None:
        program = traced.program
        if traced.trace is not None:
            program.captured = traced.trace.captured
        self.name, self.traced, self.program, self.captured = name, traced, program, program.captured
        self._require_no_python()
        self.written = {names[id(b)]: b for b in program.written.buffers}
        self.read = {names[id(b)]: b for b in program.read.buffers}
        self.numbers = dict(zip(number_names(found, self.captured.inputs.numbers), self.captured.inputs.numbers.today, strict=False))
        self.arguments, self.constants = _paths(traced)

    def _require_no_python(self) -> None:
        captured = self.captured
        writes = [e for e in captured.writes.effects if not isinstance(e.put, PutInCache)]  # a file has no cache: it computes the result
        changed = [e.title for e in writes if not (isinstance(e.value, _PLAIN) and e.value is e.before)]
        if changed:
            raise _refused(self.name, f"writes to {changed[0]} in every call", "keep changing values in tensors")
        if captured.writes.actions:
            raise _refused(
                self.name, "counts in Python in an optimizer's state, or leaves a mode of torch changed", "keep the count in a tensor"
            )
        if captured.outputs.sides:
            line = captured.outputs.sides[0].line
            raise _refused(self.name, f"branches on a value of the device, at {line}", "torch.where(condition, a, b), or torch.cond")
        if self.program.arguments.written:
            raise _refused(self.name, "writes in place to an argument", "access the tensor from the function instead, as state")
        if captured.state.held:
            raise _refused(
                self.name, "reads a tensor under a name and assigns another tensor to it", "write to the tensor in place: t.copy_(new)"
            )
        if captured.inputs.numbers.has_varying or captured.inputs.num_hosts:
            raise _refused(self.name, "takes Python numbers that vary, or CPU tensors", "pass tensors on device 'jax'")
        if captured.outputs.num_objects:
            raise _refused(self.name, "takes an object that holds tensors", "access it from the function instead, as state")

    def exported(self, platforms: tuple[str, ...]) -> Any:
        """The program as a `jax.export.Exported`."""
        program, captured = self.program, self.captured
        inner = program._function()
        draws = captured.inputs.draws

        num_written, num_read = len(self.written) + bool(draws), len(self.read)

        def run(*flat: Any) -> list[Any]:
            state, read = list(flat[: len(self.written)]), list(flat[num_written : num_written + num_read])
            words = flat[num_written - 1] if draws else jnp.zeros(4, np.uint32)
            donated = state[: program.num_donated], []
            given, numbers = list(flat[num_written + num_read : -1]), captured.inputs.numbers.completed(flat[-1])
            new, _, _, outputs = inner(donated, state[program.num_donated :], read, given, [], numbers, words)
            return [*new, *([advanced(words, draws)] if draws else []), *outputs]

        run.__name__ = run.__qualname__ = self.name
        written, random = self._shapes(self.written.values()), [self._whole((4,), np.uint32)] if draws else []
        state = [*written, *random]
        flat = [*state, *self._shapes(self.read.values()), *self._given()]
        with exact_dtypes():
            count = len(jax.eval_shape(run, *flat, self._whole((len(self.numbers),), np.float64))) - len(state)
            pinned = None if program.mesh is None else [*(shape.sharding for shape in state), *[None] * count]
            jitted = jax.jit(run, donate_argnums=range(num_written), out_shardings=pinned)
            amend = (lambda lowered: None) if program.mesh is None else (lambda lowered: avoid_faults(lowered, program.devices.platform))
            try:
                return exported_by(jitted, (*flat, self._whole((len(self.numbers),), np.float64)), platforms, amend)
            except NotImplementedError as error:  # JAX supports an operation only for fixed sizes
                if self.traced.trace is None:
                    raise
                what = f"{self.name} cannot be exported for sizes that vary: JAX supports one of its operations only for a fixed size"
                fix = "drop the dim from dynamic=, and export the sizes that you need: also=[(x,)]"
                raise SpmdError(message(what, str(error).partition("\n")[0], fix=fix)) from error

    def _given(self) -> list[Any]:
        """The arguments' shapes; sizes may be symbols."""
        shapes, inputs = self._shapes(self.captured.inputs.arguments), self.captured.jaxpr.jaxpr.invars
        if self.traced.trace is None:
            return shapes
        return [jax.ShapeDtypeStruct(v.aval.shape, s.dtype, sharding=s.sharding) for v, s in zip(inputs, shapes, strict=False)]

    def _shapes(self, buffers: Any) -> list[Any]:
        return [self._shape(buffer) for buffer in buffers]

    def _shape(self, buffer: Buffer) -> Any:
        sharding = self.program.devices.replicated if buffer.annotation is None else buffer.annotation.to_jax()
        return jax.ShapeDtypeStruct(buffer.stored, buffer.dtype, sharding=sharding)

    def _whole(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype, sharding=self.program.devices.replicated)

    def manifest(self) -> dict[str, Any]:
        """The information that the loader needs to call the program."""
        captured, trace = self.captured, self.traced.trace
        written = [*self.written, *([RANDOM] if captured.inputs.draws else [])]
        described = [_described(item["name"], b, dims) for (item, dims), b in zip(self.arguments, captured.inputs.arguments, strict=True)]
        return {
            "written": written,
            "read": list(self.read),
            "arguments": [{**own, **item} for own, (item, _) in zip(described, self.arguments, strict=True)],
            "constants": self.constants,
            "numbers": list(self.numbers),
            "checks": [str(check.text) for check in captured.outputs.checks],
            "result": self._result(),
            "sizes": {name: [r.least, r.most, r.multiple, r.rest] for name, r in self.traced.ranges.items()},
            "limits": [] if trace is None else trace.limits,
            "constraints": [] if trace is None else trace.symbols.constraints,
        }

    def _result(self) -> Any:
        flat: list[Any] = []
        position = 0
        for leaf, own in zip(self.captured.outputs.leaves, self._leaves(), strict=True):
            if own.kind == "computed" and leaf.kind == "static":
                flat.append(own.value())  # of the sizes
            elif leaf.kind in OUTPUTS:
                flat.append(_Output(position))
                position += 1
            else:
                flat.append(flat[leaf.value] if leaf.kind == "again" else leaf.value if leaf.kind in ("static", "host") else leaf)
        (result, *_) = rebuilt(self.captured.outputs.nodes, self.captured.outputs.refs, flat)
        return self._described_result(result)

    def _leaves(self) -> Sequence[Leaf]:
        """The returned leaves. Numbers that are computed from sizes are expressions."""
        family = self.traced.family
        if family is None:
            return self.captured.outputs.leaves
        family.today = cast(Any, tuple(map(Expression, family.names)))
        return family.leaves()

    def _described_result(self, value: Any) -> Any:
        if isinstance(value, _Output):
            return "output", value.position
        if isinstance(value, Expression):
            return "size", value.tree
        if isinstance(value, dict):
            return "dict", [(str(key), self._described_result(item)) for key, item in value.items()]
        if isinstance(value, (list, tuple)):
            return ("list" if isinstance(value, list) else "tuple"), [self._described_result(item) for item in value]
        if isinstance(value, _PLAIN):
            return "value", value
        if isinstance(value, HostTensor):
            raise _refused(self.name, "returns a CPU tensor, whose values are constants", "create it on device 'jax'")
        raise _refused(
            self.name, f"returns a {type(value).__name__}", "return tensors in tuples, lists and dicts (transformers: use_cache=False)"
        )


class _Output:
    """Placeholder for an output of the program."""

    def __init__(self, position: int) -> None:
        self.position = position


def _refused(name: str, what: str, fix: str) -> SpmdError:
    return SpmdError(message(f"{name} cannot be exported: it {what}", "an exported file runs no Python", fix=fix))


def _described(name: str, buffer: Buffer, dims: Mapping[int, str]) -> dict[str, Any]:
    """One entry of the manifest. `dims`: names of the dims whose size varies."""
    spec: ShardingSpec | None = buffer.annotation
    entries = None if spec is None else [list(e) if isinstance(e, tuple) else e for e in spec.partition_spec]
    shape, stored = ([dims.get(d, n) for d, n in enumerate(own)] for own in (buffer.shape, buffer.stored))
    return {"name": name, "shape": shape, "stored": stored, "dtype": str(buffer.dtype), "spec": entries}


def _paths(traced: Traced) -> tuple[list[tuple[dict[str, Any], Mapping[int, str]]], list[dict[str, Any]]]:
    """(paths of the tensors among the arguments, with their dims of varying size; paths of the other values)."""
    tensors: list[tuple[dict[str, Any], Mapping[int, str]]] = []
    names = {id(named.tensor): named.dims for named in traced.named}
    constants: list[dict[str, Any]] = []
    seen: set[int] = set()

    def visit(value: Any, path: tuple[Any, ...], name: str) -> None:
        if isinstance(value, torch.Tensor):
            if id(buffer_of(value)) in seen:
                raise SpmdError(message(f"{name} is an argument twice", fix="pass a clone"))
            seen.add(id(buffer_of(value)))
            tensors.append(({"name": name, "path": path}, names.get(id(value), {})))
        elif isinstance(value, dict):
            for key, item in value.items():
                visit(item, (*path, key), f"{name}[{key!r}]" if len(path) > 1 or path[:1] == (0,) else str(key))
        elif isinstance(value, (list, tuple)):
            for i, item in enumerate(value):
                visit(item, (*path, i), f"{name}[{i}]")
        elif isinstance(value, _PLAIN):
            constants.append({"name": name, "path": path, "value": value})
        else:
            raise SpmdError(
                message(f"{name} is a {type(value).__name__}: an exported file takes arrays and plain values", fix="pass its tensors")
            )

    visit(traced.args, (0,), "args")
    visit(traced.kwargs, (1,), "kwargs")
    return tensors, constants


__all__ = ["export"]
