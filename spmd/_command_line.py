"""A command line read by tyro, and what is wrong with it in one line.

tyro says it in a box with the help of the argument; here it is "no option '--stpes'; did you mean '--steps'?".
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
    """What the arguments ask for, to be called: one of the commands with its values. Ends the process where they ask for help.

    Raises:
        UsageError: they make no sense.
    """
    app = tyro.extras.SubcommandApp()
    for name, function in commands.items():
        app.command(name=name)(_later(function))
    heard = io.StringIO()
    try:
        with redirect_stderr(heard):
            return app.cli(prog=prog, args=arguments, config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as end:
        if end.code in (0, None):
            raise
        known = [*commands] if not arguments or arguments[0] not in commands else words(commands[arguments[0]])
        raise UsageError(_line(_said(heard.getvalue()), known)) from None


def _later(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called when its result is: so that what it writes is not taken for tyro's."""

    @functools.wraps(function)
    def later(*args: Any, **kwargs: Any) -> Callable[[], Any]:
        return functools.partial(function, *args, **kwargs)

    return later


def words(function: Callable[..., Any]) -> list[str]:
    """The options and subcommands of a command."""
    found: list[str] = []
    hints = get_type_hints(function)
    for name in inspect.signature(function).parameters:
        kinds = [kind for kind in (get_args(hints[name]) or (hints[name],)) if dataclasses.is_dataclass(kind)]
        found += [str(kind.__name__).lower() for kind in kinds if isinstance(kind, type) and len(kinds) > 1]
        names = [field.name for kind in kinds for field in dataclasses.fields(kind)] or [name]
        found += [f"--{option.replace('_', '-')}" for option in names]
    return found


def _said(box: str) -> str:
    """What stands in tyro's box below its title and above its first rule, as one line."""
    parts: list[list[str]] = [[]]
    for line in box.splitlines():
        text = line.strip(" │")
        if line.startswith("╭") or not text.strip("─-"):  # the title with the box's upper edge; a rule, which stands under a title too
            parts.append([])
        else:
            parts[-1].append(text)
    filled = [" ".join(part) for part in parts if part]
    at = 0 if box.lstrip().startswith("╭") else 1
    return filled[at] if at < len(filled) else " ".join(filled)


def _line(said: str, known: Iterable[str]) -> str:
    """What tyro said, in our words where these are shorter."""
    known = list(known)
    if match := re.match(r"Unrecognized options: ([^,]+)", said):
        word = match[1].strip()
        return f"{'no option' if word.startswith('-') else 'no argument or command'} {word!r}{nearest(word, known)}"
    if match := re.match(r"Error parsing (\S+): invalid literal for int\(\) with base 10: (.*)", said):
        return f"{match[1]} takes a whole number, not {match[2]}"
    if match := re.match(r"Error parsing (\S+): could not convert string to float: (.*)", said):
        return f"{match[1]} takes a number, not {match[2]}"
    if match := re.match(r"Error parsing (\S+): no type matching \{None\}\|INT could be instantiated from \['(.*)'\]", said):
        return f"{match[1]} takes a whole number, not {match[2]!r}"
    if match := re.match(r"invalid choice '(.*?)' for argument '(.*?)'. Expected one of \((.*?),?\)", said):
        choices = [choice.strip(" '") for choice in match[3].split(",")]
        option = match[2].rpartition(".")[2]
        return f"{option} is one of {', '.join(choices)}, not {match[1]!r}{nearest(match[1], choices)}"
    if match := re.match(r"Expected one of \{(.*)\}", said):
        return f"say what: one of {match[1]}"
    if match := re.match(r"Missing from spmd [\w ]+: (.*?) ?\(required\)", said):
        name, _, what = match[1].partition(" ")
        return f"{name} is missing: {what}"
    if match := re.match(r"Missing value for argument '(.*?)'", said):
        return f"{match[1]} takes a value"
    return said or "these arguments make no sense"


__all__ = ["read", "words"]
