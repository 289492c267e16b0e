"""Loads a file of `spmd.export` and runs it with JAX alone: no torch, no spmd. A copy of this module is in every such file.

    import sys
    sys.path.insert(0, "step.spmd")               # the file is a zip archive with this module in it
    import spmd_exported

    program = spmd_exported.load("step.spmd")
    state = program.state()                       # name -> jax.Array, laid out over the mesh
    state, loss = program(state, x, y)            # updated state is donated; compiled once per combination of sizes
    print(program)                                # also: python step.spmd

The module imports only jax and numpy.
"""

from __future__ import annotations

import io
import json
import math
import operator
import sys
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.core
import numpy as np
from jax import export
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

FORMAT = 2


class ExportedProgramError(ValueError):
    """A file that cannot run here, or a call that does not match its programs."""


def _error(what: str, *details: str, fix: str) -> ExportedProgramError:
    return ExportedProgramError("\n".join((what, *(f"  {detail}" for detail in details), f"  fix: {fix}")))


def load(path: str, devices: Sequence[Any] | None = None) -> ExportedProgram:
    """Load the program in a file.

    Args:
        path: a file that `spmd.export` wrote.
        devices: devices to run on, as many as the program's mesh has, in its order; None: the first of `jax.devices()`.

    Raises:
        ExportedProgramError: not such a file, a newer format or JAX version, another platform, or too few devices.
    """
    return ExportedProgram(path, devices)


class ExportedProgram:
    """A loaded program.

    Attributes:
        manifest: description in the file: names, shapes, dtypes, layouts.
        mesh: the mesh that it runs on; None: a single device.
    """

    def __init__(self, path: str, devices: Sequence[Any] | None) -> None:
        self._path = path
        try:
            self._archive = zipfile.ZipFile(path)
            self.manifest: dict[str, Any] = json.loads(self._archive.read("manifest.json"))
        except (FileNotFoundError, PermissionError, IsADirectoryError):
            raise
        except Exception as error:
            raise self._damaged("manifest.json", error) from error
        made_with = ", ".join(f"{name} {version}" for name, version in self.manifest["versions"].items())
        if self.manifest["format"] > FORMAT:
            raise _error(
                f"{path} has format {self.manifest['format']}, but this loader reads up to {FORMAT}",
                f"written with {made_with}",
                fix="use the loader in the file: sys.path.insert(0, path)",
            )
        self._place(path, list(jax.devices()) if devices is None else list(devices))
        try:
            self._calls = [self._callable(f"program{i}.bin", part) for i, part in enumerate(self.manifest["programs"])]
        except ExportedProgramError:
            raise
        except Exception as error:
            what = f"{path} cannot be read by jax {jax.__version__}"
            raise _error(what, f"written with {made_with}: {error}", fix=f"pip install jax=={self.manifest['versions']['jax']}") from error

    def _damaged(self, file: str, error: Exception) -> ExportedProgramError:
        """The error for a damaged file. zipfile, zlib and json raise a dozen different classes for damaged bytes."""
        what = f"{self._path} is not an exported program, or is damaged"
        return _error(what, f"{file}: {type(error).__name__}: {error}", fix="write one: spmd.export(step, (x, y), path)")

    def _read(self, file: str) -> bytes:
        try:
            return self._archive.read(file)
        except Exception as error:
            raise self._damaged(file, error) from error

    def _callable(self, file: str, part: dict[str, Any]) -> Any:
        call = part["call"]
        exported = self._exported(self._read(file), call, part["constraints"])
        with jax.enable_x64(True):
            jitted = jax.jit(exported.call, donate_argnums=range(len(part["written"])))
            jitted.lower(
                *(self._example(*item) for item in zip(self._largest_shapes(part), exported.in_avals, call["in_specs"], strict=True))
            )
        return jitted

    def _largest_shapes(self, part: dict[str, Any]) -> list[tuple[int, ...]]:
        """Shapes of the program's inputs for the largest sizes that it accepts."""
        shapes, first = [tuple(shape) for shape, _ in part["call"]["in"]], len(part["written"]) + len(part["read"])
        sizes = {name: most for name, (_, most, _, _) in part["sizes"].items()}
        given = [tuple(sizes.get(n, n) for n in item["stored"]) for item in part["arguments"]]
        return [*shapes[:first], *given, *shapes[first + len(given) :]]

    def _example(self, shape: tuple[int, ...], aval: Any, spec: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, aval.dtype, sharding=self.sharding(spec))

    def _exported(self, module: bytes, call: dict[str, Any], constraints: Sequence[str]) -> export.Exported:
        """The result of `jax.export.deserialize`, whose own file format needs a package that jax does not install."""
        scope = export.SymbolicScope(constraints)

        def avals(kinds: Any) -> tuple[Any, ...]:
            return tuple(jax.core.ShapedArray(_symbolic(shape, scope), jax.numpy.dtype(dtype)) for shape, dtype in kinds)

        def shardings(specs: Any) -> tuple[Any, ...]:
            mesh = None if self.mesh is None else self.mesh.abstract_mesh
            return tuple(None if mesh is None or spec is None else NamedSharding(mesh, _spec(spec)) for spec in specs)

        with jax.enable_x64(True):
            return export.Exported(
                fun_name=self.manifest["name"],
                in_tree=jax.tree.structure(((0,) * len(call["in"]), {})),
                in_avals=avals(call["in"]),
                out_tree=jax.tree.structure([0] * len(call["out"])),
                out_avals=avals(call["out"]),
                _has_named_shardings=True,
                _in_named_shardings=shardings(call["in_specs"]),
                _out_named_shardings=shardings(call["out_specs"]),
                in_shardings_hlo=(None,) * len(call["in"]),
                out_shardings_hlo=(None,) * len(call["out"]),
                nr_devices=call["num_devices"],
                platforms=tuple(self.manifest["platforms"]),
                ordered_effects=(),
                unordered_effects=(),
                disabled_safety_checks=(),
                mlir_module_serialized=module,
                calling_convention_version=call["version"],
                module_kept_var_idx=tuple(call["kept"]),
                uses_global_constants=call["uses_global_constants"],
                _get_vjp=None,
            )

    def _place(self, path: str, devices: list[Any]) -> None:
        platforms, layout = self.manifest["platforms"], self.manifest["mesh"]
        if devices[0].platform not in platforms and not (devices[0].platform == "gpu" and {"cuda", "rocm"} & set(platforms)):
            raise _error(
                f"{path} is a program for {' and '.join(platforms)}, but these devices are {devices[0].platform}",
                fix=f'spmd.export(..., platforms=("{devices[0].platform}",)), or load(path, jax.devices("{platforms[0]}"))',
            )
        count = 1 if layout is None else math.prod(layout["shape"])
        if len(devices) < count:
            raise _error(
                f"{path} is a program for {count} devices, but there are {len(devices)}",
                f"its mesh: {dict(zip(layout['axes'], layout['shape'], strict=True)) if layout else None}",
                fix=f"export it over a mesh of {len(devices)}, or to try it out: XLA_FLAGS=--xla_force_host_platform_device_count={count}",
            )
        self.mesh: Mesh | None = None
        self._device = devices[0]
        if layout is not None:
            grid = np.array(devices[:count], dtype=object).reshape(layout["shape"])
            self.mesh = Mesh(grid, tuple(layout["axes"]), axis_types=(AxisType.Auto,) * grid.ndim)

    def __str__(self) -> str:
        mesh = "one device" if self.mesh is None else f"mesh {dict(self.mesh.shape)}"
        lines = [f"{self.manifest['name']} for {' and '.join(self.manifest['platforms'])}, {mesh}"]
        listed = [("arguments", part["arguments"]) for part in self.manifest["programs"]]
        for title, items in [*listed, ("state", self.manifest["state"])]:
            lines.append(f"{title}:")
            for item in items:
                written = " updated" if item.get("is_written") else ""
                lines.append(f"  {item['name']}: {item['dtype']}{_listed(item['shape'])} {_shown(item['spec'])}{written}")
        if self.manifest["sizes"]:
            lines.append("sizes: " + ", ".join(f"{name} {_range(*own)}" for name, own in self.manifest["sizes"].items()))
        lines.append("numbers: " + (", ".join(f"{n['name']}={n['value']:g}" for n in self.manifest["numbers"]) or "none"))
        return "\n".join(lines)

    def sharding(self, spec: Sequence[Any] | None) -> Any:
        """The sharding of an array with this spec over the program's devices."""
        if self.mesh is None:
            return SingleDeviceSharding(self._device)
        return NamedSharding(self.mesh, _spec(spec or ()))

    def state(self, values: Mapping[str, Any] | None = None) -> dict[str, jax.Array]:
        """The state, laid out: exported values, or `values` by name where given.

        Raises:
            ExportedProgramError: the file has no values and some are not given, or a name or shape does not match the program.
        """
        given = dict(values or {})
        found = {item["name"]: self._laid_out(item, given.pop(item["name"], None)) for item in self.manifest["state"]}
        if given:
            raise _error(f"the program has no state {next(iter(given))!r}", fix=f"names are {', '.join(list(found)[:5])}, ...")
        return found

    def _laid_out(self, item: dict[str, Any], value: Any) -> jax.Array:
        if value is None:
            if not item["file"]:
                raise _error(f"the file has no value for {item['name']!r}", fix=f"program.state({{{item['name']!r}: array, ...}})")
            value = np.load(io.BytesIO(self._read(item["file"]))).view(_dtype(item)).reshape(item["stored"])
        return self._given(item, value, {})

    def _given(self, item: dict[str, Any], value: Any, sizes: Mapping[str, int]) -> jax.Array:
        """A value on the program's devices, padded as the program stores it."""
        with jax.enable_x64(True):
            if not hasattr(value, "dtype"):
                value = np.asarray(value, _dtype(item))
            _require_fit(item, value, sizes)
            shape, wanted = tuple(value.shape), tuple(sizes.get(n, n) for n in item["stored"])
            if value.dtype != _dtype(item):
                value = value.astype(_dtype(item))
            if shape != wanted:
                value = np.pad(np.asarray(value), [(0, n - m) for m, n in zip(shape, wanted, strict=True)])
            return jax.device_put(value, self.sharding(item["spec"]))

    def __call__(
        self, state: Mapping[str, Any], *args: Any, numbers: Mapping[str, float] | None = None, **kwargs: Any
    ) -> tuple[dict[str, Any], Any]:
        """Call the program. Returns (the new state, the function's result). Updated arrays of the state are donated.

        Args:
            state: from `state()` or an earlier call.
            args, kwargs: the function's arguments, with jax or numpy arrays instead of tensors.
            numbers: new values of Python numbers that are inputs, such as learning rates, by name; see `manifest["numbers"]`.

        Raises:
            ExportedProgramError: an argument does not match any program of the file.
            RuntimeError: a check of values in the function failed.
        """
        number, sizes = self._fitting(args, kwargs)
        part = self.manifest["programs"][number]
        arrays = [self._given(item, _at(args, kwargs, item), sizes) for item in part["arguments"]]
        values = {n["name"]: n["value"] for n in self.manifest["numbers"]}
        for name, value in (numbers or {}).items():
            if name not in values:
                raise _error(f"the program takes no number {name!r}", fix=f"names are {', '.join(values) or 'none'}")
            values[name] = value
        with jax.enable_x64(True):
            vector = jax.device_put(np.array([values[name] for name in part["numbers"]], np.float64), self.sharding(()))
            results = self._calls[number](*(state[name] for name in (*part["written"], *part["read"])), *arrays, vector)
        outputs = results[len(part["written"]) :]
        failed = np.asarray(outputs[-1]) if part["checks"] else ()
        for flag, text in zip(failed, part["checks"], strict=False):
            if flag:
                raise RuntimeError(text)
        return {**state, **dict(zip(part["written"], results, strict=False))}, _built(part["result"], outputs, sizes)

    def _fitting(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, dict[str, int]]:
        """Index of the program for these arguments, and its varying sizes; if none fits, the last program's error is raised."""
        raised: ExportedProgramError | None = None
        for number, part in enumerate(self.manifest["programs"]):
            try:
                sizes = self._sizes(part, [(item, _at(args, kwargs, item)) for item in part["arguments"]])
                for constant in part["constants"]:
                    value = _at(args, kwargs, constant)
                    if type(value) is not type(constant["value"]) or value != constant["value"]:
                        what = f"{constant['name']} is {constant['value']!r} in this program, but {value!r} in the call"
                        raise _error(what, fix="export a program for this value too: spmd.export(..., also=[(x, value)])")
                return number, sizes
            except ExportedProgramError as error:
                raised = error
        assert raised is not None
        raise raised

    def _sizes(self, part: dict[str, Any], given: Sequence[tuple[dict[str, Any], Any]]) -> dict[str, int]:
        """The varying sizes of a program, from these values.

        Raises:
            ExportedProgramError: the values do not fit the program.
        """
        sizes: dict[str, int] = {}
        where: dict[str, str] = {}
        for item, value in given:
            shape = np.shape(value)
            for d, name in enumerate(item["shape"]):
                if isinstance(name, str) and len(shape) == len(item["shape"]):
                    if sizes.setdefault(name, shape[d]) != shape[d]:
                        what = f"{name} has two sizes: {sizes[name]} in {where[name]}, {shape[d]} in {item['name']}"
                        raise _error(what, fix="pass arrays of one size there")
                    where.setdefault(name, item["name"])
            _require_fit(item, value, sizes)
        for name, size in sizes.items():
            least, most, multiple = self.manifest["sizes"][name]
            if not least <= size <= most or size % multiple:
                what = f"{name} is {size} in {where[name]}, but the program takes {_range(least, most, multiple)}"
                raise _error(what, fix=f'spmd.export(..., dynamic=...) with spmd.Dim("{name}", min=..., max=...), or other sizes')
        is_another = any(
            sizes[name] < least or sizes[name] % multiple != rest for name, (least, _, multiple, rest) in part["sizes"].items()
        )
        if is_another or not all(value_of(limit, sizes) for limit in part["limits"]):
            listed = ", ".join(f"{name} = {size}" for name, size in sizes.items())
            what = "a dim would have fewer than two elements, or Python's conditions on sizes would have other outcomes"
            raise _error(
                f"no program in this file covers {listed}", what, fix="export a program for these sizes too: spmd.export(..., also=[(x,)])"
            )
        return sizes


_OPERATIONS = {
    **{"+": operator.add, "-": operator.sub, "*": operator.mul, "//": operator.floordiv, "/": operator.truediv, "%": operator.mod},
    **{"**": operator.pow, "<": operator.lt, "<=": operator.le, ">": operator.gt, ">=": operator.ge, "==": operator.eq, "!=": operator.ne},
}


def value_of(tree: Any, sizes: Mapping[str, Any]) -> Any:
    """Evaluate an expression of sizes: a number, the name of a size, or [operator, operand, operand]."""
    if isinstance(tree, str):
        return sizes[tree]
    if not isinstance(tree, list):
        return tree
    sign, one, other = tree
    return _OPERATIONS[sign](value_of(one, sizes), value_of(other, sizes))


def _require_fit(item: dict[str, Any], value: Any, sizes: Mapping[str, int]) -> None:
    shape, dtype = np.shape(value), getattr(value, "dtype", _dtype(item))
    wanted = [tuple(sizes.get(n, n) for n in item[name]) for name in ("shape", "stored")]
    if tuple(shape) not in wanted or not _fits(dtype, _dtype(item)):
        raise _error(
            f"{item['name']} is {item['dtype']}{_listed(item['shape'])} in this program, but the value is {dtype}{list(shape)}",
            fix="export a program for it too: spmd.export(..., also=[(x,)])",
        )


def _symbolic(shape: Sequence[int | str], scope: Any) -> tuple[Any, ...]:
    """A shape whose strings are expressions of symbols."""
    return tuple(export.symbolic_shape(n, scope=scope)[0] if isinstance(n, str) else n for n in shape)


def _listed(shape: Sequence[int | str]) -> str:
    return f"[{', '.join(map(str, shape))}]"


def _range(least: int, most: int, multiple: int) -> str:
    return f"{least} to {most}" + (f" in multiples of {multiple}" if multiple > 1 else "")


def _spec(entries: Sequence[Any]) -> PartitionSpec:
    return PartitionSpec(*(tuple(e) if isinstance(e, list) else e for e in entries))


def _dtype(item: dict[str, Any]) -> np.dtype[Any]:
    return jax.numpy.dtype(item["dtype"])


def _fits(given: Any, wanted: np.dtype[Any]) -> bool:
    """Whether the dtypes are equal, or `given` is JAX's 32-bit substitute of a 64-bit dtype."""
    return given == wanted or (given.kind == wanted.kind and given.itemsize * 2 == wanted.itemsize == 8)


def _shown(spec: Sequence[Any] | None) -> str:
    return "" if spec is None else f"({', '.join('+'.join(e) if isinstance(e, list) else str(e) for e in spec)})"


def _at(args: tuple[Any, ...], kwargs: dict[str, Any], item: dict[str, Any]) -> Any:
    """The value at a path among the arguments."""
    value: Any = (args, kwargs)
    try:
        for key in item["path"]:
            value = value[key]
        return value
    except (KeyError, IndexError, TypeError) as error:
        raise _error(f"the call has no {item['name']}", fix="call it with the arguments that it was exported for") from error


def _built(tree: Any, outputs: Sequence[Any], sizes: Mapping[str, int]) -> Any:
    """The function's result, with outputs and constants in its containers."""
    kind, content = tree
    if kind == "output":
        return outputs[content]
    if kind == "value":
        return content
    if kind == "size":
        return value_of(content, sizes)
    if kind == "dict":
        return {key: _built(item, outputs, sizes) for key, item in content}
    made = [_built(item, outputs, sizes) for item in content]
    return made if kind == "list" else tuple(made)


if __name__ == "__main__":
    sys.stdout.write(f"{load(sys.argv[1] if len(sys.argv) > 1 else sys.argv[0])}\n")
