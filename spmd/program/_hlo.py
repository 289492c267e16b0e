"""Reads compiled XLA programs: what they send between devices, what they compute and what they keep in memory.

The input is the text of `jax.stages.Compiled.as_text()`, for CPU, GPU or TPU, run or compiled ahead of time. The mesh comes in as
plain data, axis names and sizes, because a partition id in the text is a row-major position in that mesh.

It refuses to know torch, jax, Mesh objects and how the program came to be; it never runs anything.

Example:
    compiled = jax.jit(mlp).lower(x, up, down).compile()
    report = collectives(compiled.as_text(), ("data", "model"), (4, 2))
    assert report.by_axis() == {("all-reduce", ("model",)): 1}
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["Collective", "CollectiveReport", "MemoryReport", "collectives", "flops", "instruction_count", "memory"]

_Groups = tuple[tuple[int, ...], ...]
_Array = tuple[str, tuple[int, ...]]  # dtype and dims
_Runs = tuple[int, bool]  # how often, and whether that is only a lower bound
_Scalar = tuple[int, int]  # (element of a loop's state, offset to it), or (_CONSTANT, value)
_CONSTANT = -1

# patterns over one line of a program
_INSTRUCTION = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][\w\-]*)\((.*?)\)((?:, \w+=.*)?)$")
_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+)(?: \(.*)? \{$")
_ANNOTATIONS = re.compile(r"(?=, (?:frontend_attributes|metadata|backend_config)=)")
_KIND = r"^(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute|ragged-all-to-all|collective-broadcast)(?:-start)?$"
_GROUPS = r"(?:replica_groups|source_target_pairs)=(mesh\[[^{]*\{[^}]*\}|\[[\d,]+\]<=\[[\d,]+\](?:T\([\d,]+\))?|\{(?:\{[\d,]*\},?)*\})"
_CHANNEL = r"channel_id=(\d+)"
_OP_NAME = r'op_name="((?:[^"\\]|\\.)*)"'
_CALLEES = r"\b(calls|body|condition|to_apply|branch_computations|true_computation|false_computation|called_computations)=(\{.*?\}|[^,]+)"


@dataclass(frozen=True)
class Collective:
    """One communicating instruction of a compiled program.

    Attributes:
        kind: HLO opcode without `-start`: "all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", ...
        axes: mesh axes over which it communicates, in mesh order; () when its groups are no slices of the mesh: see `groups`.
        count: times it runs in one call of the program: loop trip counts multiplied in, every branch of a conditional counted.
        num_bytes: per-device bytes of one execution: of the result for all-gather, else of all operands (of the data operand
            alone where the others are offsets and sizes).
        dtype: HLO name of the payload's dtype ("f32", "bf16"); several are joined with "+".
        shapes: per-device shapes that make up `num_bytes`.
        groups: device positions that talk to each other; for collective-permute the (source, target) pairs.
        op_name: jax's name stack; source: "file.py:12"; each "" when the program has none.
        count_is_lower_bound: a loop around it has no readable trip count and was counted as one trip.
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
    """The collectives of one program, one `Collective` per instruction; prints as a table.

    Example:
        report.counts()   # {"all-reduce": 22}
        report.by_axis()  # {("all-reduce", ("model",)): 20, ("all-reduce", ("data",)): 2}
    """

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
        """Whether some loop's trip count could not be read."""
        return any(item.count_is_lower_bound for item in self.collectives)

    def counts(self) -> dict[str, int]:
        """Executions by kind."""
        return {kind: sum(item.count for item in self if item.kind == kind) for kind in dict.fromkeys(item.kind for item in self)}

    def by_axis(self) -> dict[tuple[str, tuple[str, ...]], int]:
        """Executions by (kind, axes)."""
        totals = dict.fromkeys(((item.kind, item.axes) for item in self), 0)
        for item in self:
            totals[item.kind, item.axes] += item.count
        return totals

    def to_dict(self) -> dict[str, object]:
        """The report as JSON-able data; groups are listed only where no axes name them."""
        rows = [{**vars(item), "groups": () if item.axes else item.groups} for item in self]
        return {"num_bytes": self.num_bytes, "counts": self.counts(), "collectives": rows}

    def _rows(self) -> list[tuple[str, str, str, str, str]]:
        grouped: dict[tuple[str, str, str], list[Collective]] = {}
        for item in self.collectives:
            grouped.setdefault((item.kind, ", ".join(item.axes) or f"({len(item.groups)} groups)", item.dtype), []).append(item)
        return [(*key, *_count_and_bytes(CollectiveReport(tuple(grouped[key])))) for key in sorted(grouped)]

    def __str__(self) -> str:
        rows = [("kind", "axes", "dtype", "count", "bytes"), *self._rows(), ("total", "", "", *_count_and_bytes(self))]
        width = [max(len(row[column]) for row in rows) for column in range(5)]
        return "\n".join("  ".join((*map(str.ljust, row[:3], width), *map(str.rjust, row[3:], width[3:]))) for row in rows)

    def __rich__(self) -> "Table":
        from rich.table import Table

        table = Table("kind", "axes", "dtype", show_footer=True)
        for name, total in zip(("count", "bytes"), _count_and_bytes(self), strict=True):
            table.add_column(name, total, justify="right")
        for row in self._rows():
            table.add_row(*row)
        return table


@dataclass(frozen=True)
class MemoryReport:
    """Per-device memory of a compiled program, in bytes, as the compiler planned it.

    `alias_bytes` are outputs that live in donated arguments (counted in both). `peak_bytes` is the compiler's own figure where it has
    one, else arguments + outputs + temporaries - aliases.
    """

    argument_bytes: int
    output_bytes: int
    temp_bytes: int
    alias_bytes: int
    generated_code_bytes: int
    peak_bytes: int


def _count_and_bytes(report: CollectiveReport) -> tuple[str, str]:
    value, units = float(report.num_bytes), ["B", "KiB", "MiB", "GiB", "TiB"]
    while value >= 1024 and len(units) > 1:
        value, units = value / 1024, units[1:]
    bound = ">=" if report.count_is_lower_bound else ""
    return f"{bound}{sum(report.counts().values())}", f"{value:.4g} {units[0]}"


def collectives(hlo_text: str, axis_names: tuple[str, ...] = (), axis_sizes: tuple[int, ...] = ()) -> CollectiveReport:
    """Every collective of a compiled program, with how often it runs, over which mesh axes and with how many bytes.

    Args:
        hlo_text: `jax.stages.Compiled.as_text()`.
        axis_names: names of the mesh axes; without them every `axes` is ().
        axis_sizes: their sizes, same length.

    Returns:
        One `Collective` per instruction that can be reached from the entry computation. An asynchronous pair is one collective, and so is
        the chain of fusions into which XLA:TPU spreads one.

    Raises:
        ValueError: the names and sizes differ in length, or the text is no compiled program.
    """
    if len(axis_names) != len(axis_sizes):
        raise ValueError(
            f"axis_names and axis_sizes differ in length\n  {len(axis_names)} names {axis_names}, {len(axis_sizes)} sizes {axis_sizes}\n"
            "  fix: pass mesh.axis_names and mesh.axis_sizes of one mesh"
        )
    module = _parse(hlo_text)
    starts = _async_starts(module)
    known: dict[str, tuple[_Groups, tuple[str, ...]]] = {}
    found: list[Collective] = []
    for (count, is_lower_bound), computation in _executions(module):
        for instruction in computation.instructions.values():
            kind, channel = _first(_KIND, instruction.opcode), _first(_CHANNEL, instruction.attributes)
            is_chained = "async_collective_fusion_config" in instruction.annotations and channel in starts.values()
            if not kind or (is_chained and instruction.name not in starts):
                continue
            text = _first(_GROUPS, instruction.attributes)
            if text not in known:
                groups = _groups(text, math.prod(axis_sizes) if axis_sizes else module.num_devices)
                known[text] = groups, _axes(groups, axis_names, axis_sizes, is_pairs=kind == "collective-permute")
            groups, axes = known[text]
            arrays = _payload(computation, instruction, kind)
            dtype, shapes, num_bytes = "+".join(dict.fromkeys(dtype for dtype, _ in arrays)), tuple(dims for _, dims in arrays), _num_bytes(arrays)
            source = module.sources.get(_first(r"stack_frame_id=(\d+)", instruction.annotations), "")
            name = _first(_OP_NAME, instruction.annotations)
            found.append(Collective(kind, axes, count, num_bytes, dtype, shapes, groups, name, source, is_lower_bound))
    return CollectiveReport(tuple(found))


def instruction_count(hlo_text: str) -> int:
    """Instructions in the text of a compiled program: a measure of its size, each loop body and fusion counted once."""
    return sum(len(computation.instructions) for computation in _parse(hlo_text).computations.values())


def flops(hlo_text: str) -> int:
    """Floating point operations of the dots and convolutions of one call of the program, per device, from their shapes.

    A dot counts 2*M*N*K. A convolution counts two operations per multiplication that meets a real element: padding and dilation holes
    are free, which keeps the convolutions exact that XLA:TPU makes out of batched matmuls. Loop bodies are multiplied by their trip counts
    (`cost_analysis()` counts them once; an unreadable trip count is one trip), every branch of a conditional counts. Also read: the matmul
    calls of oneDNN and cuBLAS. Not counted: pointwise work, and products that the compiler rewrote into multiply and reduce (XLA:TPU does
    so for matrix times vector).
    """
    counters = {"dot": _dot_flops, "convolution": _convolution_flops, "custom-call": _matmul_call_flops}
    total = 0
    for (count, _), computation in _executions(_parse(hlo_text)):
        for instruction in computation.instructions.values():
            if instruction.opcode in counters:
                total += count * counters[instruction.opcode](computation, instruction)
    return total


class _Compiled(Protocol):
    def memory_analysis(self) -> object: ...


def memory(compiled: _Compiled) -> MemoryReport:
    """Memory of one device, from `jax.stages.Compiled.memory_analysis()`.

    Raises:
        ValueError: the backend has no memory analysis.
    """
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise ValueError("this backend gives no memory analysis\n  fix: compile for cpu, gpu or a tpu topology")

    names = ("argument", "output", "temp", "alias", "generated_code")
    argument, output, temp, alias, code = (int(getattr(analysis, f"{name}_size_in_bytes")) for name in names)
    peak = int(getattr(analysis, "peak_memory_in_bytes", 0)) or argument + output + temp - alias
    return MemoryReport(argument, output, temp, alias, code, peak)


class _Instruction(NamedTuple):
    """One line: `%name = shape opcode(arguments), attributes, metadata=... backend_config=...` (the last two: annotations)."""

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
    instructions: dict[str, _Instruction]
    root: str

    def operand_arrays(self, instruction: _Instruction) -> list[_Array]:
        """One array per operand; of a tuple the first leaf (XLA:TPU packs the data together with barrier handles)."""
        return [_arrays(self.instructions[name].shape)[0] for name in instruction.operands]


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
            instructions[found[2]] = _Instruction(*found.group(2, 3, 4, 5), attributes, annotations)
            root = found[2] if found[1] or not root else root
        elif (found := _HEADER.match(line)) and not line.startswith("HloModule"):
            name, root, instructions = found[2], "", {}
            entry = name if found[1] else entry
        elif line.startswith("}"):
            computations[name] = _Computation(instructions, root)
    if not entry:
        raise ValueError(
            f"this is not the text of a compiled program: it has no ENTRY computation\n  it starts with {hlo_text[:60]!r}\n"
            "  fix: pass jax.jit(fn).lower(...).compile().as_text(), not the lowered module"
        )
    header = hlo_text.partition("\n")[0]
    num_devices = int(_first(r"num_partitions=(\d+)", header) or 1) * int(_first(r"replica_count=(\d+)", header) or 1)
    return _Module(computations, entry, num_devices, _sources(hlo_text))


def _sources(hlo_text: str) -> dict[str, str]:
    """`stack_frame_id` -> "file.py:12", from the tables ahead of the first computation; the innermost frame is the user's line."""
    files = dict(re.findall(r'^(\d+) "(.*)"$', hlo_text.partition("\nFileNames\n")[2].partition("\n\n")[0], re.MULTILINE))
    locations = re.findall(r"^(\d+) \{file_name_id=(\d+) .*?\bline=(\d+)", hlo_text, re.MULTILINE)
    lines = {location: f"{files.get(file, '?')}:{line}" for location, file, line in locations}
    frames = re.findall(r"^(\d+) \{file_location_id=(\d+)", hlo_text, re.MULTILINE)
    return {frame: lines.get(location, "") for frame, location in frames}


def _callees(module: _Module, computation: _Computation, instruction: _Instruction) -> list[tuple[str, _Runs]]:
    """Computations that the instruction runs, and how often for one run of it; the scalar regions of reductions and sorts do not count."""
    called: dict[str, str] = dict(re.findall(_CALLEES, instruction.attributes))
    if instruction.opcode == "while":
        trips = _trip_count(module, computation, instruction)
        body, condition = ((1, True), (1, True)) if trips is None else ((trips, False), (trips + 1, False))
        return [(called["body"].lstrip("%"), body), (called["condition"].lstrip("%"), condition)]
    if instruction.opcode.endswith(("-done", "-update")):
        return []
    is_call = instruction.opcode in ("call", "call-start")
    names = (name for key, value in called.items() if key != "to_apply" or is_call for name in re.findall(r"[\w.\-]+", value))
    return [(name, (1, False)) for name in names]


def _executions(module: _Module) -> list[tuple[_Runs, _Computation]]:
    """The computations that run, callers first, each with its number of runs: the sum over its callers.

    XLA prints a computation before the ones that call it, so the reverse of the text is an order in which callers come first.
    """
    runs: dict[str, _Runs] = {module.entry: (1, False)}
    ordered: list[tuple[_Runs, _Computation]] = []
    for caller, computation in reversed(module.computations.items()):
        if caller not in runs:
            continue
        ordered.append((runs[caller], computation))
        for instruction in computation.instructions.values():
            for callee, (count, is_lower_bound) in _callees(module, computation, instruction):
                known = runs.get(callee, (0, False))
                runs[callee] = (known[0] + runs[caller][0] * count, known[1] or runs[caller][1] or is_lower_bound)
    return ordered


def _called(module: _Module, instruction: _Instruction, key: str = "calls|to_apply") -> _Computation:
    return module.computations[_first(rf"\b(?:{key})=%?([\w.\-]+)", instruction.attributes)]


def _scalar(module: _Module, computation: _Computation, name: str, arguments: list[_Scalar | None] | None = None) -> _Scalar | None:
    """Value of a scalar instruction; `arguments` are those of the fusion whose body `computation` is, None in a loop's own regions."""
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
        called = _called(module, instruction)
        return _scalar(module, called, called.root, values)
    left, right = (*values, (_CONSTANT, 0))[:2]
    if left is None or right is None:
        return None
    if opcode == "subtract":
        return (left[0], left[1] - right[1]) if right[0] == _CONSTANT else None
    return (max(left[0], right[0]), left[1] + right[1]) if _CONSTANT in (left[0], right[0]) else None


def _trip_count(module: _Module, computation: _Computation, loop: _Instruction) -> int | None:
    """Trips of a while loop: XLA's own note, else read off a counter compared with a constant; None when neither is there.

    XLA:TPU drops the note, so its scans are read from the comparison, the counter's start and its step.
    """
    if noted := _first(r'"known_trip_count":\{"n":"(\d+)"', loop.annotations):
        return int(noted)
    region, body = _called(module, loop, "condition"), _called(module, loop, "body")
    compare, arguments, start = region.instructions[region.root], None, computation.instructions[loop.operands[0]]
    while compare.opcode in ("fusion", "call"):
        arguments = [_scalar(module, region, operand, arguments) for operand in compare.operands]
        region = _called(module, compare)
        compare = region.instructions[region.root]
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


def _async_starts(module: _Module) -> dict[str, str]:
    """Instruction -> channel of the collectives that XLA:TPU repeats, on one channel, in every fusion that runs beside them.

    Only the copy in the start counts: the one that feeds a custom call `AsyncCollectiveStart`.
    """
    instructions = [(computation, item) for computation in module.computations.values() for item in computation.instructions.values()]
    fed = [region.instructions[item.operands[0]] for region, item in instructions if '"AsyncCollectiveStart"' in item.attributes]
    return {item.name: _first(_CHANNEL, item.attributes) for item in fed}


def _payload(computation: _Computation, instruction: _Instruction, kind: str) -> list[_Array]:
    if kind == "all-gather":
        if instruction.opcode == kind:
            return _arrays(instruction.shape)
        inputs = len(instruction.operands)  # the start's shape is (operands, results, handles)
        return _arrays(instruction.shape)[inputs : 2 * inputs]
    arrays = computation.operand_arrays(instruction)
    has_offsets = kind == "ragged-all-to-all" or (kind == "collective-permute" and len(arrays) == 4)
    return arrays[:1] if has_offsets else arrays


def _groups(text: str, num_devices: int) -> _Groups:
    """Device groups in any of XLA's spellings: `{{0,1},{2,3}}`, `{}` (all), `[2,2]<=[4]T(0)`, `mesh['a'=2,'b'=2] {'b'}`."""
    if text.startswith("{") or not text:
        return tuple(_numbers(group) for group in re.findall(r"\{([\d,]+)\}", text)) or (tuple(range(num_devices)),)
    shape, _, tiling = text.partition("<=")
    grid = _mesh_grid(text) if text.startswith("mesh") else _iota(tiling).reshape(_numbers(shape))
    return tuple(tuple(group) for group in grid.tolist())


def _iota(text: str) -> npt.NDArray[np.int64]:
    """`[4,2]T(1,0)`: the positions 0..7 as a 4 x 2 array, transposed."""
    dims, _, order = text.partition("T")
    array = np.arange(math.prod(_numbers(dims))).reshape(_numbers(dims))
    return array.transpose(_numbers(order)) if order else array


def _mesh_grid(text: str) -> npt.NDArray[np.int64]:
    """One row per group of `mesh['a'=8,'b'=2], device_ids=([2,8]T(1,0)) {'a':(2)4}`; `(2)4` is the part of size 4 behind one of size 2."""
    axes, _, references = text.rpartition(" {")
    sizes = [(name, int(size)) for name, size in re.findall(r"'?([\w.\-]+)'?=(\d+)", axes.partition("]")[0])]
    listed = _first(r"device_ids=\((.*)\)$", axes)
    ids = _iota(listed) if "[" in listed else np.array(_numbers(listed) or range(math.prod(size for _, size in sizes)))
    parts: dict[str, list[tuple[int, int]]] = {name: [(size, size)] for name, size in sizes}
    for name, before, size in re.findall(r"'?([\w.\-]+)'?(?::\((\d+)\)(\d+))?[,}]", references):
        parts[name].append((int(before), int(before) * int(size)) if before else (1, dict(sizes)[name]))
    dims: list[int] = []
    grouped: list[int] = []
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
    """Axes whose every group is one slice along them; for pairs the axes along which some source and target differ."""
    positions = [position for group in groups for position in group]
    num_devices = math.prod(axis_sizes)
    if len({len(group) for group in groups}) != 1 or max(positions) >= num_devices:
        return ()
    coordinates = np.stack(np.unravel_index(np.array(groups), axis_sizes)) if axis_sizes else np.zeros((0, 1, 1))
    varies = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2)).tolist()
    axes = tuple(name for name, is_varying in zip(axis_names, varies, strict=True) if is_varying)
    group_size = math.prod(size for size, is_varying in zip(axis_sizes, varies, strict=True) if is_varying)
    is_exact = len(groups[0]) == group_size and len(positions) == len(set(positions)) == num_devices
    return axes if is_pairs or is_exact else ()


def _dot_flops(computation: _Computation, instruction: _Instruction) -> int:
    _, left = computation.operand_arrays(instruction)[0]
    contracted = _numbers(_first(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.attributes))
    return 2 * math.prod(_arrays(instruction.shape)[0][1]) * math.prod(left[dim] for dim in contracted)


def _convolution_flops(computation: _Computation, instruction: _Instruction) -> int:
    attributes = instruction.attributes
    (_, left), (_, right), (_, result) = *computation.operand_arrays(instruction), _arrays(instruction.shape)[0]
    left_labels, right_labels, result_labels = re.split("_|->", _first(r"dim_labels=([\w>\-]+)", attributes))
    groups = int(_first(r"batch_group_count=(\d+)", attributes) or 1)
    total = 2 * left[left_labels.index("b")] // groups
    total *= right[right_labels.index("i")] * right[right_labels.index("o")]
    window = _first(r"window=\{(.*?)\}", attributes)

    def setting(name: str, dim: int, default: int) -> int:
        values = _first(rf"\b{name}=([\dx_\-]+)", window).split("x")
        return _numbers(values[dim])[0] if values[0] else default

    for dim in range(len(left) - 2):
        num_outputs, num_inputs = result[result_labels.index(str(dim))], left[left_labels.index(str(dim))]
        outputs, taps = np.arange(num_outputs)[:, None], np.arange(setting("size", dim, 1))[None, :]
        places = outputs * setting("stride", dim, 1) + taps * setting("rhs_dilate", dim, 1) - setting("pad", dim, 0)
        holes = setting("lhs_dilate", dim, 1)
        total *= int(((places >= 0) & (places <= (num_inputs - 1) * holes) & (places % holes == 0)).sum())
    return total


def _matmul_call_flops(computation: _Computation, instruction: _Instruction) -> int:
    """A library's matmul: contracting dims as noted, else from the sizes, (B*M*K) * (B*K*N) = (B*M*N) * B*K*K."""
    if not re.search(r'custom_call_target="(__onednn\$matmul|__cublas\$)', instruction.attributes):
        return 0
    left, right = (dims for _, dims in computation.operand_arrays(instruction)[:2])
    num_results = math.prod(_arrays(instruction.shape)[0][1])
    if noted := re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.annotations):
        return 2 * num_results * math.prod(left[dim] for dim in _numbers(noted[1]))
    batch = min(math.prod(left[:-2]), math.prod(right[:-2]))
    return 2 * num_results * math.isqrt(math.prod(left) * math.prod(right) // (num_results * batch))
