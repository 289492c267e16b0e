"""Reads the text of compiled XLA programs: collectives, FLOPs and the number of instructions.

The input is the text of `jax.stages.Compiled.as_text()`, for CPU, GPU or TPU, from a program that ran or was compiled ahead of time. The
mesh is passed as axis names and sizes, because a partition id in the text is a row-major position in that mesh.

This module does not depend on torch, jax or Mesh objects, and never runs a program.

Example:
    compiled = jax.jit(mlp).lower(x, up, down).compile()
    report = collectives(compiled.as_text(), ("data", "model"), (4, 2))
    assert report.by_axis() == {("all-reduce", ("model",)): 1}
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import numpy.typing as npt

from mesh import size_text

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Collective", "CollectiveReport", "collectives", "flops", "instruction_count"]

_Groups = tuple[tuple[int, ...], ...]
_Array = tuple[str, tuple[int, ...]]  # dtype and dims
_Scalar = tuple[int, int]  # (element of a loop's state, offset to it), or (_CONSTANT, value)
_CONSTANT = -1
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)((?:, \w+=.*)?)$")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$")
_ANNOTATIONS = re.compile(r"(?=, (?:frontend_attributes|metadata|backend_config)=)")
_KIND = r"^(all-reduce|all-gather|reduce-scatter|(?:ragged-)?all-to-all|collective-permute|collective-broadcast)(?:-start)?$"
_GROUPS = r"(?:replica_groups|source_target_pairs)=(mesh\[[^{]*\{[^}]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{(?:\{[\d,]*\},?)*\})"
_CHANNEL = r"channel_id=(\d+)"
_OP_NAME = r'op_name="((?:[^"\\]|\\.)*)"'
_CALLEES = r"\b(calls|body|condition|to_apply|\w+_computations?)=(\{.*?\}|[^,]+)"


@dataclass(frozen=True)
class Collective:
    """One communicating instruction of a compiled program.

    Attributes:
        kind: HLO opcode without `-start`: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", ...
        axes: mesh axes over which it communicates, in mesh order; () if its groups are not slices of the mesh (see `groups`).
        count: executions in one call of the program. Trip counts of loops are multiplied in; every branch of a conditional counts.
        num_bytes: per-device bytes of one execution: the result of an all-gather, otherwise all operands (only the data operand if
            the others are offsets and sizes).
        dtype: HLO name of the payload's dtype ("f32", "bf16"); several are joined with "+".
        shapes: per-device shapes of the payload.
        groups: positions of the devices that communicate with each other; for collective-permute, (source, target) pairs.
        op_name: jax's name stack; "" if the program has none.
        source: "file.py:12"; "" if the program has none.
        count_is_lower_bound: the trip count of an enclosing loop is unknown, and one trip was counted.
    """

    kind: str
    axes: tuple[str, ...]
    count: int
    num_bytes: int
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    groups: _Groups
    op_name: str = ""
    source: str = ""
    count_is_lower_bound: bool = False


@dataclass(frozen=True)
class CollectiveReport:
    """The collectives of one program, one `Collective` per instruction; prints as a table."""

    collectives: tuple[Collective, ...] = ()

    def __iter__(self) -> Iterator[Collective]:
        return iter(self.collectives)

    def __len__(self) -> int:
        return len(self.collectives)

    @property
    def num_bytes(self) -> int:
        """Per-device bytes of one call of the program: `count * num_bytes` over all collectives."""
        return sum(item.count * item.num_bytes for item in self.collectives)

    @property
    def count_is_lower_bound(self) -> bool:
        """Whether the trip count of some loop is unknown."""
        return any(item.count_is_lower_bound for item in self.collectives)

    def counts(self) -> dict[str, int]:
        """Executions by kind."""
        return {kind: sum(item.count for item in self if item.kind == kind) for kind in dict.fromkeys(item.kind for item in self)}

    def by_axis(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Executions by (kind, axes)."""
        keys = dict.fromkeys((item.kind, item.axes) for item in self)
        return {key: sum(item.count for item in self if (item.kind, item.axes) == key) for key in keys}

    def to_dict(self) -> dict[str, object]:
        """The report as JSON-serializable data. `groups` is empty where `axes` describes the groups."""
        rows = [{**vars(item), "groups": () if item.axes else item.groups} for item in self]
        return {"num_bytes": self.num_bytes, "counts": self.counts(), "collectives": rows}

    def _table(self) -> list[tuple[str, str, str, str, str]]:
        grouped: dict[tuple[str, str, str], list[Collective]] = {}
        for item in self.collectives:
            grouped.setdefault((item.kind, ", ".join(item.axes) or f"({len(item.groups)} groups)", item.dtype), []).append(item)
        rows = [(*key, *_count_and_bytes(CollectiveReport(tuple(grouped[key])))) for key in sorted(grouped)]
        return [("kind", "axes", "dtype", "count", "bytes"), *rows, ("total", "", "", *_count_and_bytes(self))]

    def __str__(self) -> str:
        rows = self._table()
        width = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join((*map(str.ljust, row[:3], width), *map(str.rjust, row[3:], width[3:]))) for row in rows)

    def __rich__(self) -> "Table":
        from rich.table import Table

        header, *rows, total = self._table()
        table = Table(show_footer=True)
        for name, footer in zip(header, total, strict=True):
            table.add_column(name, footer, justify="right" if name in ("count", "bytes") else "left")
        for row in rows:
            table.add_row(*row)
        return table


def _count_and_bytes(report: CollectiveReport) -> tuple[str, str]:
    bound = ">=" if report.count_is_lower_bound else ""
    return f"{bound}{sum(report.counts().values())}", size_text(report.num_bytes)


def collectives(hlo_text: str, axis_names: tuple[str, ...] = (), axis_sizes: tuple[int, ...] = ()) -> CollectiveReport:
    """The collectives of a compiled program, with their counts, mesh axes and bytes.

    Args:
        hlo_text: the result of `jax.stages.Compiled.as_text()`.
        axis_names, axis_sizes: the axes of the mesh, equally many. Without them, every `Collective.axes` is ().

    Returns:
        One `Collective` per instruction that is reachable from the entry computation. An asynchronous start/done pair is one collective,
        and so is a chain of fusions over which XLA:TPU distributes one.

    Raises:
        ValueError: names and sizes differ in length, or the text is not a compiled program.
    """
    if len(axis_names) != len(axis_sizes):
        raise ValueError(
            f"axis_names and axis_sizes differ in length\n  {len(axis_names)} names {axis_names}, {len(axis_sizes)} sizes {axis_sizes}\n"
            "  fix: pass mesh.axis_names and mesh.axis_sizes of one mesh"
        )
    module = _parse(hlo_text)
    async_starts = _async_starts(module)
    known: dict[tuple[str, bool], tuple[_Groups, tuple[str, ...]]] = {}
    found: list[Collective] = []
    for computation, runs in _executions(module):
        for instruction in computation.instructions.values():
            kind, channel = _first(_KIND, instruction.opcode), _first(_CHANNEL, instruction.attributes)
            is_chained = "async_collective_fusion_config" in instruction.annotations and channel in async_starts.values()
            if not kind or (is_chained and instruction.name not in async_starts):
                continue
            if computation.name.startswith("all-reduce-scatter"):  # XLA:TPU writes one as a fusion of all-reduce and dynamic-slice
                kind = "reduce-scatter"
            key = _first(_GROUPS, instruction.attributes), kind == "collective-permute"
            if key not in known:
                groups = _groups(*key, math.prod(axis_sizes) if axis_sizes else module.num_devices)
                known[key] = groups, _axes(groups, axis_names, axis_sizes, is_pairs=key[1])
            groups, axes = known[key]
            arrays = _payload(computation, instruction, kind)
            dtype, shapes = "+".join(dict.fromkeys(dtype for dtype, _ in arrays)), tuple(dims for _, dims in arrays)
            notes = instruction.annotations if "op_name=" in instruction.annotations else runs.annotations
            name, source = _first(_OP_NAME, notes), module.sources.get(_first(r"stack_frame_id=(\d+)", notes), "")
            found.append(Collective(kind, axes, runs.num_runs, _num_bytes(arrays), dtype, shapes, groups, name, source, runs.is_bound))
    return CollectiveReport(tuple(found))


def instruction_count(hlo_text: str) -> int:
    """Number of instructions in the text of a compiled program, a measure of its size. A loop body or fusion counts once."""
    return sum(len(computation.instructions) for computation in _parse(hlo_text).computations.values())


def flops(hlo_text: str) -> int:
    """Per-device floating-point operations of the dots and convolutions in one call of the program, computed from their shapes.

    A dot counts 2*M*N*K. A convolution counts 2 per multiplication by an element of its input: padding and dilation holes are free, so
    the count is exact also for batched matmuls, which XLA:TPU rewrites as convolutions. Loops and conditionals count as in
    `Collective.count` (`cost_analysis()` counts a loop body once). Matmul calls of oneDNN and cuBLAS count as dots. Not counted: pointwise
    operations, cuDNN, Pallas kernels, and products that the compiler rewrote to multiply and reduce (XLA:TPU: matrix times vector).
    """
    counters = {"dot": _matmul_flops, "convolution": _convolution_flops, "custom-call": _matmul_flops}
    return sum(
        runs.num_runs * counters[instruction.opcode](computation, instruction)
        for computation, runs in _executions(_parse(hlo_text))
        for instruction in computation.instructions.values()
        if instruction.opcode in counters
    )


class _Instruction(NamedTuple):
    """One line: `%name = shape opcode(arguments), attributes, metadata=... backend_config=...`. The last two are `annotations`."""

    name: str
    shape: str
    opcode: str
    arguments: str
    attributes: str
    annotations: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.arguments)


class _Computation(NamedTuple):
    name: str
    instructions: dict[str, _Instruction]
    root: str

    def operand_arrays(self, instruction: _Instruction) -> list[_Array]:
        """One array per operand; for a tuple, its first leaf (XLA:TPU packs the data together with barrier handles)."""
        return [_arrays(self.instructions[name].shape)[0] for name in instruction.operands]


class _Runs(NamedTuple):
    """How often a computation runs, and the annotations of one of the instructions that call it."""

    num_runs: int = 0
    is_bound: bool = False  # only a lower bound
    annotations: str = ""


class _Module(NamedTuple):
    computations: dict[str, _Computation]
    entry: str
    num_devices: int
    sources: dict[str, str]


def _first(pattern: str, text: str) -> str:
    found = re.search(pattern, text)
    return found[1] if found else ""


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"-?\d+", text))


def _arrays(shape: str) -> list[_Array]:
    return [(dtype, _numbers(dims)) for dtype, dims in re.findall(r"\b([a-z]\w*)\[([\d,]*)\]", shape)]


def _num_bytes(arrays: list[_Array]) -> int:
    bits = (8 if dtype == "pred" else int(_first(r"(\d+)", dtype) or 0) for dtype, _ in arrays)  # a token has no bits
    return sum((math.prod(dims) * width + 7) // 8 for width, (_, dims) in zip(bits, arrays, strict=True))


def _parse(hlo_text: str) -> _Module:
    computations: dict[str, _Computation] = {}
    entry, name, root = "", "", ""
    instructions: dict[str, _Instruction] = {}
    for line in hlo_text.splitlines():
        if found := _INSTRUCTION.match(line):
            attributes, annotations = (*_ANNOTATIONS.split(found[6], maxsplit=1), "")[:2]
            instructions[found[2]] = _Instruction(found[2], found[3], found[4], found[5], attributes, annotations)
            root = found[2] if found[1] or not root else root
        elif (found := _HEADER.match(line)) and not line.startswith("HloModule"):
            name, root, instructions = found[2], "", {}
            entry = name if found[1] else entry
        elif line.startswith("}"):
            computations[name] = _Computation(name, instructions, root)
    if not entry:
        raise ValueError(
            f"this is not the text of a compiled program: it has no ENTRY computation\n  it starts with {hlo_text[:60]!r}\n"
            "  fix: pass jax.jit(fn).lower(...).compile().as_text(), not the lowered module"
        )
    header = hlo_text.partition("\n")[0]
    num_devices = int(_first(r"num_partitions=(\d+)", header) or 1) * int(_first(r"replica_count=(\d+)", header) or 1)
    return _Module(computations, entry, num_devices, _sources(hlo_text))


def _sources(hlo_text: str) -> dict[str, str]:
    """Map `stack_frame_id` to "file.py:12", from the tables before the first computation. The innermost frame is the user's line."""
    files = dict(re.findall(r'^(\d+) "(.*)"$', hlo_text.partition("\nFileNames\n")[2].partition("\n\n")[0], re.MULTILINE))
    locations = re.findall(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", hlo_text, re.MULTILINE)
    lines = {location: f"{files.get(file, '?')}:{line}" for location, file, line in locations}
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", hlo_text, re.MULTILINE)
    return {frame: lines.get(location, "") for frame, location in frames}


def _callees(module: _Module, computation: _Computation, instruction: _Instruction) -> list[tuple[str, int, bool]]:
    """(name, count, whether the count is a lower bound) of each computation that the instruction calls, without reduction regions."""
    called: dict[str, str] = dict(re.findall(_CALLEES, instruction.attributes.replace("%", "")))
    if instruction.opcode == "while":
        trips = _trip_count(module, computation, instruction)
        is_unknown, count = trips is None, 1 if trips is None else trips
        return [(called["body"], count, is_unknown), (called["condition"], count + (not is_unknown), is_unknown)]
    if instruction.opcode.endswith(("-done", "-update")):
        return []
    regions = [value for key, value in called.items() if key != "to_apply" or instruction.opcode in ("call", "call-start")]
    return [(name, 1, False) for value in regions for name in re.findall(r"[\w.\-]+", value)]


def _executions(module: _Module) -> list[tuple[_Computation, _Runs]]:
    """The computations that run, and how often. Callers come first: XLA prints a computation before its callers."""
    runs = {module.entry: _Runs(1)}
    for name in reversed(module.computations):
        for instruction in module.computations[name].instructions.values() if name in runs else ():
            for callee, count, is_bound in _callees(module, module.computations[name], instruction):
                known = runs.get(callee, _Runs())
                is_bound = is_bound or known.is_bound or runs[name].is_bound
                runs[callee] = _Runs(known.num_runs + runs[name].num_runs * count, is_bound, instruction.annotations)
    return [(module.computations[name], runs[name]) for name in reversed(module.computations) if name in runs]


def _called(module: _Module, instruction: _Instruction, key: str = "calls|to_apply") -> _Computation:
    return module.computations[_first(rf"\b(?:{key})=%?([\w.\-]+)", instruction.attributes)]


def _scalar(module: _Module, computation: _Computation, name: str, arguments: list[_Scalar | None] | None = None) -> _Scalar | None:
    """Value of a scalar instruction, or None if unknown.

    Args:
        arguments: the arguments of the fusion whose body is `computation`; None if it is the body or condition of a loop.
    """
    instruction = computation.instructions[name]
    opcode, operands = instruction.opcode, instruction.operands
    if opcode == "constant":
        return (_CONSTANT, int(instruction.arguments)) if re.fullmatch(r"-?\d+", instruction.arguments) else None
    if opcode == "parameter":
        return arguments[int(instruction.arguments)] if arguments else None
    if opcode == "get-tuple-element" and arguments is None and computation.instructions[operands[0]].opcode == "parameter":
        return int(_first(r"index=(\d+)", instruction.attributes)), 0
    if opcode not in ("copy", "bitcast", "reshape", "convert", "copy-start", "copy-done", "add", "subtract", "fusion", "call"):
        return None
    values = [_scalar(module, computation, operand, arguments) for operand in operands]
    if opcode in ("fusion", "call"):
        return _scalar(module, called := _called(module, instruction), called.root, values)
    left, right = (*values, (_CONSTANT, 0))[:2]
    if left is None or right is None or right[0] != _CONSTANT:  # XLA writes a constant operand on the right
        return None
    return left[0], left[1] - right[1] if opcode == "subtract" else left[1] + right[1]


def _trip_count(module: _Module, computation: _Computation, loop: _Instruction) -> int | None:
    """Trip count of a while loop, or None if unknown.

    XLA's annotation gives it. XLA:TPU drops that annotation, so it is then derived from the start, step and bound of a counter.
    """
    if noted := _first(r'"known_trip_count":\{"n":"(\d+)"', loop.annotations):
        return int(noted)
    region, body = _called(module, loop, "condition"), _called(module, loop, "body")
    compare, arguments, start = region.instructions[region.root], None, computation.instructions[loop.operands[0]]
    while compare.opcode in ("fusion", "call"):
        arguments = [_scalar(module, region, operand, arguments) for operand in compare.operands]
        region = _called(module, compare)
        compare = region.instructions[region.root]
    compare = _low_word_comparison(region, compare)
    if compare.opcode != "compare" or start.opcode != "tuple":
        return None
    gap, step = 0, 0  # left minus right side of the comparison: before the first trip, and its change per trip
    for sign, operand in zip((1, -1), compare.operands, strict=True):
        side = _scalar(module, region, operand, arguments)
        if side is None:
            return None
        gap += sign * side[1]
        if side[0] != _CONSTANT:
            first = _scalar(module, computation, start.operands[side[0]])
            following = _scalar(module, body, body.instructions[body.root].operands[side[0]])
            if first is None or first[0] != _CONSTANT or following is None or following[0] != side[0]:
                return None
            gap, step = gap + sign * first[1], step + sign * following[1]
    direction = _first(r"direction=(\w+)", compare.attributes)
    if direction in ("GT", "GE"):
        gap, step = -gap, -step
    gap -= direction in ("LE", "GE")
    return max(0, -(gap // step)) if step > 0 and direction in ("LT", "LE", "GT", "GE") else None


def _low_word_comparison(region: _Computation, compare: _Instruction) -> _Instruction:
    """The comparison of the low words, if XLA:TPU compares 64-bit counters as `high < 0 or (high == 0 and low < bound)`."""
    if compare.opcode != "or":
        return compare
    both = next((item for name in compare.operands if (item := region.instructions[name]).opcode == "and"), None)
    words = [region.instructions[name] for name in both.operands] if both is not None else []
    found = {_first(r"direction=(\w+)", item.attributes): item for item in words if item.opcode == "compare"}
    return found["LT"] if found.keys() == {"EQ", "LT"} else compare


def _async_starts(module: _Module) -> dict[str, str]:
    """Map name to channel of the collectives that XLA:TPU copies into each fusion that overlaps them. Only the copy in the start counts."""
    lines = ((region, item) for region in module.computations.values() for item in region.instructions.values())
    fed = [region.instructions[item.operands[0]] for region, item in lines if '"AsyncCollectiveStart"' in item.attributes]
    return {item.name: _first(_CHANNEL, item.attributes) for item in fed}


def _payload(computation: _Computation, instruction: _Instruction, kind: str) -> list[_Array]:
    if kind == "all-gather":
        arrays, inputs = _arrays(instruction.shape), len(instruction.operands)
        return arrays[inputs : 2 * inputs] if instruction.opcode == "all-gather-start" else arrays  # start: (operands, results, handles)
    arrays = computation.operand_arrays(instruction)
    return arrays[:1] if kind == "ragged-all-to-all" or (kind == "collective-permute" and len(arrays) == 4) else arrays  # offsets follow


def _groups(text: str, is_pairs: bool, num_devices: int) -> _Groups:
    """Device groups from any of XLA's formats: `{{0,1},{2,3}}`, `{}` (all), `[2,2]<=[4]T(0)`, `mesh['a'=2,'b'=2] {'b'}`."""
    if text.startswith("{") or not text:
        listed = tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text))
        return listed if listed or is_pairs else (tuple(range(num_devices)),)
    shape, _, tiling = text.partition("<=")
    grid = _mesh_grid(text) if text.startswith("mesh") else _iota(tiling).reshape(_numbers(shape))
    return tuple(tuple(group) for group in grid.tolist())


def _iota(text: str) -> npt.NDArray[np.int64]:
    """`[4,2]T(1,0)`: the positions 0..7 as a 4 x 2 array, transposed."""
    dims, _, order = text.partition("T")
    array = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return array.transpose(_numbers(order)) if order else array


def _mesh_grid(text: str) -> npt.NDArray[np.int64]:
    """One row per group of `mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0)) {'a':(2)4}`.

    `(2)4` is the sub-axis of size 4 after one of size 2.
    """
    axes, _, references = text.rpartition(" {")
    sizes = [(name, int(size)) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", axes.partition("]")[0])]
    listed = _first(r"device_ids=\((.*)\)$", axes)
    ids = _iota(listed) if "[" in listed else np.array(_numbers(listed) or range(math.prod(size for _, size in sizes)))
    parts: dict[str, list[tuple[int, int]]] = {name: [(size, size)] for name, size in sizes}
    for name, before, size in re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?[,}]", references):
        parts[name].append((int(before), int(before) * int(size)) if before else (1, dict(sizes)[name]))
    dims, grouped = list[int](), list[int]()
    for spans in parts.values():
        end = 1
        for low, high in sorted(spans):
            dims.append(low // end)
            if high > low:
                grouped.append(len(dims))
                dims.append(high // low)
            end = high
    grid = np.moveaxis(ids.reshape(dims), grouped, range(-len(grouped), 0))
    return grid.reshape(-1, math.prod(dims[index] for index in grouped))


def _axes(groups: _Groups, axis_names: tuple[str, ...], axis_sizes: tuple[int, ...], *, is_pairs: bool) -> tuple[str, ...]:
    """The axes such that each group is one slice along them; for pairs, the axes along which some source and target differ."""
    positions = [position for group in groups for position in group]
    if len({len(group) for group in groups}) != 1 or not axis_sizes or max(positions) >= math.prod(axis_sizes):
        return ()
    coordinates = np.stack(np.unravel_index(np.array(groups), axis_sizes))
    varies = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2)).tolist()
    group_size = math.prod(size for size, is_varying in zip(axis_sizes, varies, strict=True) if is_varying)
    is_exact = len(groups[0]) == group_size and len(positions) == len(set(positions)) == math.prod(axis_sizes)
    return tuple(name for name, is_varying in zip(axis_names, varies, strict=True) if is_varying and (is_pairs or is_exact))


def _convolution_flops(computation: _Computation, instruction: _Instruction) -> int:
    attributes = instruction.attributes
    (_, left), (_, right), (_, result) = *computation.operand_arrays(instruction), _arrays(instruction.shape)[0]
    left_labels, right_labels, result_labels = re.split("_|->", _first(r"dim_labels=([\w>\-]+)", attributes))
    channels = right[right_labels.index("i")] * right[right_labels.index("o")]
    total = 2 * channels * left[left_labels.index("b")] // int(_first(r"batch_group_count=(\d+)", attributes) or 1)
    window = dict(re.findall(r"(\w+)=([\dx_\-]+)", _first(r"window=\{(.*?)\}", attributes)))
    for dim in range(len(left) - 2):
        settings = (("size", 1), ("stride", 1), ("pad", 0), ("lhs_dilate", 1), ("rhs_dilate", 1))
        values = (_numbers(window[key].split("x")[dim])[0] if key in window else default for key, default in settings)
        size, stride, pad, holes, dilation = values
        outputs, inputs = result[result_labels.index(str(dim))], left[left_labels.index(str(dim))]
        places = np.arange(outputs)[:, None] * stride + np.arange(size)[None, :] * dilation - pad
        total *= int(((places >= 0) & (places <= (inputs - 1) * holes) & (places % holes == 0)).sum())
    return total


def _matmul_flops(computation: _Computation, instruction: _Instruction) -> int:
    """FLOPs of a dot or a library's matmul.

    The contracting dims are read from the text, or K is derived from the sizes: (B*M*K) * (B*K*N) = (B*M*N) * B*K*K.
    """
    if instruction.opcode != "dot" and not re.search(r'custom_call_target="(__onednn\$matmul|__cublas\$)', instruction.attributes):
        return 0
    left, right = (dims for _, dims in computation.operand_arrays(instruction)[:2])
    num_results = math.prod(_arrays(instruction.shape)[0][1])
    noted = re.search(r'lhs_contracting_dim(?:s=\{|ensions":\[)([\d,"]*)', instruction.attributes + instruction.annotations)
    if noted or instruction.opcode == "dot":
        return 2 * num_results * math.prod(left[dim] for dim in _numbers(noted[1] if noted else ""))
    batch = min(math.prod(left[:-2]), math.prod(right[:-2]))
    return 2 * num_results * math.isqrt(math.prod(left) * math.prod(right) // (num_results * batch))
