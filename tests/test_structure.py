"""The house rules, read off the source: floors (an import only goes down), sizes, exports, and a few forbidden things."""

import ast
import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]

# What a room must not import although no floor forbids it.
NEVER: dict[str, tuple[str, ...]] = {"mesh": ("torch",), "spmd.lowering": ("mesh",)}
# dotted name -> the only files and folders that may say it
ONLY_IN: dict[str, tuple[str, ...]] = {
    # the last two set what libtpu and glibc read
    "os.environ": (
        "mesh/job/_join.py",
        "mesh/launch",
        "mesh/_topology.py",
        "mesh/platform/_allocator.py",
        "mesh/platform/_threads.py",
        "spmd/base/_program_files.py",
    ),
    "os.environb": ("mesh/job/_join.py", "mesh/launch"),
    "os.getenv": ("mesh/job/_join.py", "mesh/launch"),
    "os.putenv": ("mesh/job/_join.py", "mesh/launch"),
    "jax.devices": ("mesh/_devices.py", "spmd/interop/_exported_program.py"),  # the second runs alone, in a file of spmd.export
    "jax.local_devices": ("mesh/_devices.py",),
}
PRINTERS = ("spmd/cli.py",)
CATCH_ALL_NAMES = {"utils", "misc", "common", "core", "helpers"}
MAX_FILE_LINES = 500
MAX_FUNCTION_LINES = 60

SOURCES = sorted(path.relative_to(ROOT).as_posix() for package in ("mesh", "spmd") for path in (ROOT / package).rglob("*.py"))


@functools.cache
def parsed(source: str) -> ast.Module:
    return ast.parse((ROOT / source).read_text(encoding="utf-8"), source)


def module_name(source: str) -> str:
    return source.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


MODULES = {module_name(source) for source in SOURCES}


def is_under(name: str, prefix: str, separator: str = ".") -> bool:
    return name == prefix or name.startswith(prefix + separator)


# A line of the map in docs/architecture.md: floor and room, where they change, then names of files and what they are for.
MAP_LINE = re.compile(r"(?P<floor>\d)? *(?P<room>(?:mesh|spmd)[\w/]*)? {2,}(?P<names>\w+(?:, \w+)*) {2,}\S")
ROOM_LINE = re.compile(r"(?P<floor>\d)? *(?P<room>(?:mesh|spmd)[\w/]*) {2,}")


@functools.cache
def floors() -> dict[str, int]:
    """Module -> floor, as the map says. A room stands on the floor of its first line; `__init__` of the two packages is listed."""
    found: dict[str, int] = {}
    level, room = 0, ""
    block = (ROOT / "docs/architecture.md").read_text(encoding="utf-8").split("```text\n")[1].split("```")[0]
    for line in block.splitlines():
        match = MAP_LINE.match(line)
        heading = match or ROOM_LINE.match(line)
        assert heading, f"not a line of the map: {line!r}"
        level, room = int(heading["floor"] or level), heading["room"] or room
        package = room.replace("/", ".")
        if heading["room"] and "/" in room:
            found.setdefault(package, level)
            found.setdefault(f"{package}.__main__", level)
        for name in match["names"].split(", ") if match else ():
            module = package if name == "__init__" else f"{package}.{name}"
            assert module not in found, f"{module} is on the map twice"
            found[module] = level
    return found


def floor(module: str) -> int | None:
    return floors().get(module)


def test_the_map_has_every_file_and_no_other() -> None:
    listed = {name for name in floors() if not name.endswith(".__main__")}
    existing = {name for name in MODULES if not name.endswith(".__main__")}
    report(
        [f"{name} is on no floor: add it to the map in docs/architecture.md" for name in sorted(existing - listed)]
        + [f"{name} is on the map of docs/architecture.md, but there is no such file" for name in sorted(listed - existing)]
    )


def test_no_basename_occurs_twice() -> None:
    """`_name` and `name` count as one: a file is found by its name alone."""
    places: dict[str, list[str]] = {}
    for source in SOURCES:
        places.setdefault(Path(source).stem.strip("_"), []).append(source)
    twice = {name: sources for name, sources in places.items() if len(sources) > 1 and name not in ("init", "main")}
    report([f"{name!r} is the name of {' and '.join(sources)}" for name, sources in twice.items()])


def test_no_circles_between_files() -> None:
    """Among the imports that run when a module is imported (not those inside functions or for types alone)."""
    graph = {module_name(source): set(top_level_imports(source)) & MODULES for source in SOURCES}
    done: set[str] = set()
    findings: list[str] = []

    def visit(module: str, path: tuple[str, ...]) -> None:
        if module in path:
            findings.append(" -> ".join([*path[path.index(module) :], module]))
        elif module not in done:
            for other in sorted(graph[module]):
                visit(other, (*path, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())
    report(findings)


def top_level_imports(source: str) -> Iterator[str]:
    for node in parsed(source).body:
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from imported_from(node, source)


def imported_from(node: ast.ImportFrom, source: str) -> Iterator[str]:
    """`from package import name` is an import of `package.name` where that is a module, else of `package`."""
    base = node.module or ""
    if node.level:
        package = source.split("/")[: -node.level]
        base = ".".join([*package, *([node.module] if node.module else [])])
    for alias in node.names:
        full = f"{base}.{alias.name}"
        yield full if full in MODULES else base


def imports(source: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from ((node.lineno, name) for name in imported_from(node, source))


def wrong_import(source: str, target: str) -> str | None:
    module = module_name(source)
    own, other = floor(module), floor(target)
    if own is None:
        return f"{module} is on no floor\n  fix: add it to the map in docs/architecture.md, on the lowest floor that its imports allow"
    for part, banned in NEVER.items():
        if is_under(module, part) and any(is_under(target, name) for name in banned):
            return f"{part} must not import {target}"
    if not is_under(target, "mesh") and not is_under(target, "spmd"):
        return None
    if other is None:
        return f"imports {target}, which is on no floor\n  fix: add it to the map in docs/architecture.md"
    if other > own:
        return f"{module} (floor {own}) imports {target} (floor {other}): an import only goes down"
    return None


def report(findings: list[str]) -> None:
    assert not findings, "\n" + "\n".join(dict.fromkeys(findings))


def test_imports_only_go_down() -> None:
    findings = [f"{s}:{line}: {problem}" for s in SOURCES for line, target in imports(s) if (problem := wrong_import(s, target))]
    report(findings)


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        ("mesh/_spec.py", "torch.nn", "mesh must not import torch.nn"),
        ("mesh/_mesh.py", "mesh.job._join", "an import only goes down"),
        ("mesh/_spec.py", "spmd.base._errors", "an import only goes down"),
        ("spmd/lowering/norm.py", "mesh", "spmd.lowering must not import mesh"),
        ("spmd/sharding/_tensor.py", "spmd", "an import only goes down"),
        ("spmd/program/unheard_of.py", "torch", "add it to the map"),
        ("spmd/cli.py", "spmd.unheard_of", "add it to the map"),
    ],
)
def test_wrong_import_is_named(source: str, target: str, message: str) -> None:
    assert message in (wrong_import(source, target) or "")


@pytest.mark.parametrize(
    ("source", "target"), [("spmd/__init__.py", "spmd.cli"), ("spmd/device/_copy.py", "mesh"), ("mesh/_spec.py", "jax")]
)
def test_right_import_is_left_alone(source: str, target: str) -> None:
    assert wrong_import(source, target) is None


def test_environment_and_devices_have_one_reader() -> None:
    findings: list[str] = []
    for source in SOURCES:
        said = [(node.lineno, ast.unparse(node)) for node in ast.walk(parsed(source)) if isinstance(node, ast.Attribute)]
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ImportFrom):
                said += [(node.lineno, f"{node.module}.{alias.name}") for alias in node.names]
        for line, name in said:
            places = ONLY_IN.get(name, (source,))
            if not any(is_under(source.removesuffix(".py"), place.removesuffix(".py"), "/") for place in places):
                findings.append(f"{source}:{line}: {name} belongs in {' or '.join(places)}")
    report(findings)


def test_files_and_functions_stay_small() -> None:
    findings: list[str] = []
    for source in SOURCES:
        num_lines = len((ROOT / source).read_text(encoding="utf-8").splitlines())
        if num_lines > MAX_FILE_LINES:
            findings.append(f"{source}: {num_lines} lines, at most {MAX_FILE_LINES}: which two nouns live in it?")
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    findings.append(f"{source}:{node.lineno}: {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}")
    report(findings)


def documented(package: str) -> list[str]:
    """Names in the table under `## package` of docs/api.md, whose lines read "| `name` | what |"."""
    sections = re.split(r"^## ", (ROOT / "docs/api.md").read_text(encoding="utf-8"), flags=re.MULTILINE)
    section = next(text for text in sections if text.splitlines()[0].strip() == package)
    return re.findall(r"^\| `([\w.]+)` \|", section, flags=re.MULTILINE)


@pytest.mark.parametrize("package", ["mesh", "spmd"])
def test_exports_are_the_documented_names(package: str) -> None:
    module = importlib.import_module(package)
    names, exported = documented(package), list(module.__all__)
    findings = [f"{package}.{name} is in __all__, not in docs/api.md" for name in exported if name not in names]
    findings += [f"{package}.{name} is in docs/api.md, not in __all__" for name in names if name not in exported]
    findings += [f"{package}.{name} is in __all__ but does not exist" for name in exported if not hasattr(module, name)]
    findings += [f"{package}.{name} is listed twice" for names in (names, exported) for name in names if names.count(name) > 1]
    report(findings)


def test_nothing_forbidden_is_written() -> None:
    findings: list[str] = []
    for source in SOURCES:
        if CATCH_ALL_NAMES & {part.strip("_") for part in Path(source).with_suffix("").parts}:
            findings.append(f"{source}: name the file after the noun that lives in it")
        findings += [f"{source}:{line}: imports a debugger" for line, name in imports(source) if is_under(name, "pdb")]
        for node in ast.walk(parsed(source)):
            if isinstance(node, ast.ExceptHandler) and node.type is None:
                findings.append(f"{source}:{node.lineno}: bare except: name what you expect")
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                if node.func.id == "print" and source not in PRINTERS:
                    findings.append(f"{source}:{node.lineno}: print belongs in {' or '.join(PRINTERS)}")
                if node.func.id == "breakpoint":
                    findings.append(f"{source}:{node.lineno}: breakpoint left behind")
    report(findings)
