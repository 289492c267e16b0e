"""Reads recipes from TOML files and command line overrides, and checks every key against the dataclasses of `_recipe`.

    read_recipe("gpt2.toml", ["--steps", "200", "--optimizer.lr", "1e-4"])

Overrides are parsed as TOML values like those of the file, so both have the same errors, and free tables ([model.arguments]) need no
declared types.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args, get_origin, get_type_hints

from spmd.base._errors import message
from spmd.train._recipe import Recipe, RecipeError, choices, tables


def read_recipe(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> Recipe:
    """Read a recipe from a file, with overrides from a command line. Relative data paths become absolute.

    Args:
        path: a TOML file.
        overrides: `--key value` or `--table.key=value`, with values in TOML syntax. Text needs no quotes.

    Raises:
        RecipeError: the file is missing or not TOML, a key is unknown, a value has the wrong type, or keys contradict each other.
    """
    path = Path(path)
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise RecipeError(message(f"{path} cannot be read: {error.strerror}", fix=f"spmd train --init {path} writes one")) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise RecipeError(
            message(f"{path} is not valid TOML: {error}", fix="correct that line; see docs/recipes.md for examples")
        ) from error
    apply_overrides(found, overrides)
    recipe = recipe_of(found, str(path))
    folder = path.absolute().parent
    changes: dict[str, Any] = {}
    for name in ("data", "evaluation"):
        table = getattr(recipe, name)
        changes[name] = dataclasses.replace(table, paths=tuple(str(folder / given) for given in table.paths))
    return dataclasses.replace(recipe, **changes)


def recipe_of(found: Mapping[str, Any], source: str = "the recipe") -> Recipe:
    """Create a recipe from plain data, as read from TOML.

    Args:
        found: tables and keys.
        source: name of the data in errors, for example its file.

    Raises:
        RecipeError: a key is unknown, or a value has the wrong type.
    """
    try:
        return _table(found, Recipe, "", source)
    except RecipeError as error:
        text = str(error)
        raise (error if text.startswith(source) else RecipeError(f"{source}: {text}")) from error.__cause__


def apply_overrides(found: dict[str, Any], words: Sequence[str]) -> None:
    """Apply the overrides of a command line to plain data, in place.

    Raises:
        RecipeError: a word is not an override.
    """
    for name, value in parse_overrides(words):
        _put(found, name.split("."), value)


def with_changes(recipe: Recipe, changes: Mapping[str, Any]) -> Recipe:
    """A copy of the recipe with changed keys: at the top level, and in a table if the change is a dict.

    Raises:
        RecipeError: a key is unknown, or a value has the wrong type.
    """
    found = dataclasses.asdict(recipe)
    for name, value in changes.items():
        is_table = isinstance(value, Mapping) and isinstance(found.get(name), Mapping)
        found[name] = {**found[name], **value} if is_table else value
    return recipe_of(found, "changes of the recipe")


def parse_overrides(words: Sequence[str]) -> list[tuple[str, Any]]:
    """Parse `--table.key value` into pairs of dotted name and value.

    Raises:
        RecipeError: a word is not an option, or an option has no value.
    """
    found: list[tuple[str, Any]] = []
    rest = list(words)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.removeprefix("--").partition("=")
        if not word.startswith("--") or not name:
            raise RecipeError(message(f"{word!r} is not an override", fix="--steps 200 or --optimizer.lr=1e-4"))
        if not equals:
            if not rest:
                raise RecipeError(message(f"--{name} has no value", fix=f"--{name} VALUE"))
            value = rest.pop(0)
        found.append((name.replace("-", "_"), _value(value)))
    return found


def _value(text: str) -> Any:
    """The text parsed as a TOML value, or unchanged if it is not one."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(found: dict[str, Any], names: Sequence[str], value: Any) -> None:
    for name in names[:-1]:
        inner = found.setdefault(name, {})
        if not isinstance(inner, dict):
            raise RecipeError(message(f"--{'.'.join(names)}: {name!r} is a key, not a table", fix=f"--{name} VALUE"))
        found = inner
    found[names[-1]] = value


def _table(found: Mapping[str, Any], kind: type, name: str, source: str) -> Any:
    types = get_type_hints(kind)
    where = f"[{name}]" if name else "the top level"
    values: dict[str, Any] = {}
    for given, value in found.items():
        if given not in types:
            raise RecipeError(_unknown(given, name, list(types), f"{source}: {where} has no key {given!r}"))
        if dataclasses.is_dataclass(types[given]):
            if not isinstance(value, Mapping):
                raise RecipeError(message(f"{source}: {given!r} is a table, got {value!r}", fix=f"[{given}]"))
            values[given] = _table(value, types[given], given, source)
        else:
            values[given] = _typed(value, types[given], f"{source}: {where} {given}")
    return kind(**values)


def _unknown(given: str, table: str, known: Sequence[str], what: str) -> str:
    """The message for an unknown key. Its fix is a similar key of the table, or the table that the key belongs to."""
    near = difflib.get_close_matches(given, known, 1, 0.5)
    places = [other for other, kind in tables().items() if given in get_type_hints(kind)]
    fix = repr(near[0]) if near else None
    if places and not (near and near[0] == given):
        fix = f"it is a key of {f'[{places[0]}]' if places[0] else 'the top level, above all tables'}"
    return message(what, f"keys there: {', '.join(known)}", fix=f"write {fix}" if fix and near and not places else fix or "one of these")


def _typed(value: Any, wanted: Any, what: str) -> Any:
    """The value converted to the key's type: int to float, list to tuple, and a single text to a tuple.

    Raises:
        RecipeError: the value has another type, or is not one of the allowed values.
    """
    allowed = choices(wanted)
    if allowed:
        if value in allowed and type(value) is type(allowed[0]):
            return value
        near = difflib.get_close_matches(str(value), [str(choice) for choice in allowed], 1, 0.5)
        raise RecipeError(
            message(
                f"{what} = {value!r} is not allowed",
                f"allowed: {', '.join(map(repr, allowed))}",
                fix=repr(near[0] if near else allowed[0]),
            )
        )
    if get_origin(wanted) is tuple:
        entry = get_args(wanted)[0]
        values = [value] if isinstance(value, str) else value
        if not isinstance(values, list | tuple):
            raise RecipeError(message(f"{what} = {value!r} is not a list", fix="[...]"))
        return tuple(_typed(item, entry, what) for item in values)
    if get_origin(wanted) is dict:
        if not isinstance(value, Mapping):
            raise RecipeError(message(f"{what} = {value!r} is not a table", fix="{ name = value, ... }"))
        return dict(value)
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise RecipeError(message(f"{what} = {value!r} is of type {type(value).__name__}", fix=f"a value of type {wanted.__name__}"))
    return value


__all__ = ["apply_overrides", "parse_overrides", "read_recipe", "recipe_of", "with_changes"]
