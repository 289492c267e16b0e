"""Describes all keys of a recipe: for `spmd train --help`, and as the tables in docs/recipes.md (`spmd train --keys`)."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, get_args, get_origin, get_type_hints

from rich.console import Console

from spmd.train._recipe import choices, keys_of, tables

USAGE = """Train a model from a recipe. A run that was stopped resumes from its latest checkpoint.

    spmd train RECIPE.toml [--KEY VALUE] [--TABLE.KEY VALUE] ...
    spmd train --debug RECIPE.toml ...                        # shows the traceback of an error, otherwise written to OUT/error.txt
    spmd train --init RECIPE.toml [--TABLE.KEY VALUE] ...     # writes a recipe; at a terminal it asks for what the options leave open

Keys with their defaults. Keys without a table belong at the top of the file."""


def show_help(console: Console) -> None:
    """Print the usage and every key with its default and meaning."""
    console.print(USAGE)
    for table, kind in tables().items():
        if table:
            console.print(f"\n[{table}]  {meaning_of(kind)}", style="bold")
        for name, item in keys_of(kind).items():
            console.print(f"  {name} = {toml(default_of(item))}", f"      {item.metadata['meaning']}", sep="\n")


def markdown() -> str:
    """One Markdown table for each table of a recipe: key, type, default, meaning."""
    parts: list[str] = []
    for table, kind in tables().items():
        types = get_type_hints(kind)
        parts += [f"### {f'[{table}]' if table else 'Top level'}", "", meaning_of(kind), ""]
        parts += ["| key | takes | default | meaning |", "| --- | --- | --- | --- |"]
        for name, item in keys_of(kind).items():
            only = f" (kind {', '.join(item.metadata['kinds'])})" if item.metadata["kinds"] else ""
            parts.append(f"| `{name}` | {type_text(types[name])} | `{toml(default_of(item))}` | {item.metadata['meaning']}{only} |")
        parts.append("")
    return "\n".join(parts)


def meaning_of(kind: type) -> str:
    """The first paragraph of a table's docstring, as one line."""
    return " ".join((kind.__doc__ or "").split("\n\n")[0].split())


def default_of(item: dataclasses.Field[Any]) -> Any:
    """The default of a key."""
    return {} if item.default is dataclasses.MISSING else item.default


def toml(value: object) -> str:
    """A value in TOML syntax."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple | list):
        return f"[{', '.join(map(toml, value))}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{_key(name)} = {toml(item)}' for name, item in value.items())} }}" if value else "{}"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def _key(name: str) -> str:
    return name if name.isidentifier() and name.isascii() else json.dumps(name)


def type_text(kind: Any) -> str:
    """The type of a key's value, in words."""
    if choices(kind):
        return ", ".join(f"`{toml(value)}`" for value in choices(kind))
    if get_origin(kind) is tuple:
        return f"list of {type_text(get_args(kind)[0])}"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true or false"}.get(getattr(kind, "__name__", ""), "table")


__all__ = ["default_of", "markdown", "meaning_of", "show_help", "toml", "type_text"]
