"""Reads a command line with tyro and reports an error in one line.

tyro prints a box with the argument's help. Here the error is "no option '--stpes'; did you mean '--steps'?".
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import redirect_stderr
from typing import Any, get_args, get_type_hints

import tyro

from mesh._mesh_errors import nearest
from spmd.base._errors import UsageError


def read(prog: str, arguments: Sequence[str], commands: Mapping[str, Callable[..., Any]]) -> Callable[[], Any]:
    """Parse the arguments. Returns the selected command bound to its values, to be called. `--help` ends the process.

    Raises:
        UsageError: the arguments are invalid.
    """
    app = tyro.extras.SubcommandApp()
    for name, function in commands.items():
        app.command(name=name)(_deferred(function))
    captured = io.StringIO()
    try:
        with redirect_stderr(captured):
            return app.cli(prog=prog, args=arguments, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as end:
        if end.code in (0, None):
            raise
        known = [*commands] if not arguments or arguments[0] not in commands else words(commands[arguments[0]])
        raise UsageError(_one_line(_box_text(captured.getvalue()), known)) from None


def _deferred(function: Callable[..., Any]) -> Callable[..., Any]:
    """Bind the arguments and call `function` only when the result is called, so that its stderr is not taken for tyro's."""

    @functools.wraps(function)
    def later(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(function, *args, **kwargs)

    return later


def words(function: Callable[..., Any]) -> list[str]:
    """The options and subcommands that a command accepts."""
    found: list[str] = []
    hints = get_type_hints(function)
    for name in inspect.signature(function).parameters:
        kinds = [kind for kind in (get_args(hints[name]) or (hints[name],)) if dataclasses.is_dataclass(kind)]
        found += [str(kind.__name__).lower() for kind in kinds if isinstance(kind, type) and len(kinds) > 1]
        names = [field.name for kind in kinds for field in dataclasses.fields(kind)] or [name]
        found += [f"--{option.replace('_', '-')}" for option in names]
    return found


def _box_text(box: str) -> str:
    """The text of tyro's error box between its title and its first rule, as one line."""
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip(" │")
        if line.startswith("╭") or not text.strip("─-"):  # the box's top edge with its title, or a rule
            parts.append([])
        else:
            parts[-1].append(text)
    filled = [" ".join(part) for part in parts if part]
    at = 0 if box.lstrip().startswith("╭") else 1
    return filled[at] if at < len(filled) else " ".join(filled)


def _one_line(text: str, known: Iterable[str]) -> str:
    """tyro's message, reworded where that is shorter."""
    known = list(known)
    if match := re.match(r"Unrecognized options: ([^,]+)", text):
        word = match[1].strip()
        return f"{'no option' if word.startswith('-') else 'no argument or command'} {word!r}{nearest(word, known)}"
    if match := re.match(r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)", text):
        return f"{match[1]} takes a whole number, not {match[2]}"
    if match := re.match(r"Error parsing (\S+): could not convert string to float: (.*)", text):
        return f"{match[1]} takes a number, not {match[2]}"
    if match := re.match(r"Error parsing (\S+): no type matching \{None\}\|INT could be instantiated from \['(.*)'\]", text):
        return f"{match[1]} takes a whole number, not {match[2]!r}"
    if match := re.match(r"invalid choice '(.*?)' for argument '(.*?)'. Expected one of \((.*?),?\)", text):
        choices = [choice.strip(" '") for choice in match[3].split(",")]
        option = match[2].rpartition(".")[2]
        return f"{option} is one of {', '.join(choices)}, not {match[1]!r}{nearest(match[1], choices)}"
    if match := re.match(r"Expected one of \{(.*)\}", text):
        return f"choose one of {match[1]}"
    if match := re.match(r"Missing from spmd [\w ]+: (.*?) ?\(required\)", text):
        name, _, what = match[1].partition(" ")
        return f"{name} is missing: {what}"
    if match := re.match(r"Missing value for argument '(.*?)'", text):
        return f"{match[1]} takes a value"
    return text or "invalid arguments"


__all__ = ["read", "words"]
