"""`Output`: one call that prints, logs or writes, as every call of the program repeats it: at its line, to its file."""

from __future__ import annotations

import copy
import csv
import gc
import io
import types
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from spmd.program.reads._journal import Effect
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._output_code import OwnCode, files_of_rows
from spmd.program.reads._pending import Pending, not_taken

_NEWLINES = ("", "\n", "\r", "\r\n")


class Shown:
    """Stands for an object that is printed: every call prints the texts of the trace."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self._texts: tuple[str, str] | None = None

    def settle(self) -> None:
        """Take the texts of the object, and drop it."""
        if self._texts is None:
            self._texts, self.value = (str(self.value), repr(self.value)), None

    def __str__(self) -> str:
        return self._texts[0] if self._texts else str(self.value)

    def __repr__(self) -> str:
        return self._texts[1] if self._texts else repr(self.value)


class Line(NamedTuple):
    """A line of the user's code, and its global variables."""

    code: types.CodeType
    number: int
    variables: dict[str, Any]


@dataclass
class Output:
    """One call that prints, logs or writes.

    Attributes:
        fn: the function.
        frames: where it was called, and the callers that `stacklevel` may name: (code, line, globals), the innermost first.
        given: its arguments, as a pending value.
        streams: the files that it writes to.
        shown: the objects that it shows.
        is_late: whether it is done when a call ends. Otherwise the trace has done it.
        settings: what decided where it goes, see `settings_of`.
        own: the code of the user's that it runs; None if there is none.
        forget: drops the result of the function with a cache that has made it, which later calls find: they do not make the output.
            None if every call makes it.
    """

    fn: Callable[..., Any]
    frames: list[Line]
    given: Pending
    streams: list[Any]
    shown: list[Shown]
    is_late: bool
    settings: tuple[Any, ...]
    own: OwnCode | None
    forget: Callable[[], object] | None = None


def repeated(outputs: Sequence[Output], num_written: int, is_before: Callable[[Any], bool]) -> list[Effect]:
    """The writes with which every call does these outputs.

    Args:
        outputs: the outputs.
        num_written: the number of outputs that earlier traces for this call have written.
        is_before: whether an object existed before the trace.
    """
    files = {id(stream): FileOfCall(stream) for output in outputs for stream in output.streams if not is_before(stream)}
    shown: list[Effect] = []
    for number, output in enumerate(outputs):
        for each in output.shown:
            each.settle()
        shown.append(_effect(output.given, _Put(output, files, not output.is_late or number < num_written)))
    for number, file in files.items():  # each is opened before its first output, and closed after its last one
        uses = [i for i, output in enumerate(outputs) if any(id(stream) == number for stream in output.streams)]
        file.first, file.last = shown[uses[0]], shown[uses[-1]]
    for file in files.values():
        shown.insert(shown.index(file.first), _effect(None, file.open))
        shown.insert(shown.index(file.last) + 1, _effect(None, file.close))
    return shown


def _effect(value: Any, put: Callable[[Any], None]) -> Effect:
    return Effect(put, ABSENT, "what it prints", ABSENT, value, put)


class FileOfCall:
    """A file that a trace has opened, which every call opens anew.

    Attributes:
        file: the file in this call.
        first, last: the writes of its first and its last output.

    Raises:
        TraceError: it was not opened to write only.
    """

    def __init__(self, stream: Any) -> None:
        mode: Any = getattr(stream, "mode", "")
        name: Any = getattr(stream, "name", None)
        is_file = isinstance(stream, io.IOBase) and isinstance(mode, str) and isinstance(name, str)
        if not is_file or mode.strip("bt") not in ("w", "a", "x"):
            raise not_taken("a write to a file that the function has opened")
        self._options: dict[str, Any] = {}
        if "b" not in mode:
            self._options = {"encoding": stream.encoding, "errors": stream.errors, "newline": _newline(stream)}  # type: ignore[attr-defined]
        self._name, self._mode, self._is_new = name, mode, True
        self.first: Any = None
        self.last: Any = None
        self.file: Any = None

    def open(self, _: Any) -> None:
        """Open the file. For the call that follows the trace, the trace has emptied it."""
        mode = self._mode.replace("w", "a").replace("x", "a") if self._is_new else self._mode
        self.file, self._is_new = open(self._name, mode, **self._options), False  # noqa: SIM115

    def close(self, _: Any) -> None:
        """Close the file."""
        self.file.close()

    def method(self, owner: Any, name: str) -> Callable[..., Any]:
        """A method of the file of each call, or of a writer of CSV to it like `owner`."""
        return lambda *given, **options: getattr(self._like(owner), name)(*given, **options)

    def _like(self, owner: Any) -> Any:
        if type(owner).__module__ == "_csv":
            return csv.writer(self.file, owner.dialect)
        if type(owner).__module__ == "csv":
            made = copy.copy(owner)
            made.writer = csv.writer(self.file, owner.writer.dialect)
            return made
        return self.file


def _newline(stream: Any) -> str | None:
    """The `newline` that a file of text was opened with, which only the object itself refers to."""
    if not stream.closed:
        stream.flush()
    return next((part for part in gc.get_referents(stream) if type(part) is str and part in _NEWLINES), None)


class _Put:
    """Does an output with the arguments of a call."""

    def __init__(self, output: Output, files: dict[int, FileOfCall], is_done: bool) -> None:
        self._is_done = is_done
        self._forget, self._is_over = output.forget, False
        self._files = {number: files[number] for number in map(id, output.streams) if number in files}
        owner = getattr(output.fn, "__self__", None)
        its = next((self._files[id(file)] for file in (owner, *files_of_rows(owner)) if id(file) in self._files), None)
        self._fn = output.fn if its is None else its.method(owner, output.fn.__name__)
        for line in output.frames:
            self._fn = called_at_line(line, None, self._fn)

    def __call__(self, arguments: tuple[Any, dict[str, Any]]) -> None:
        is_done, self._is_done = self._is_done or self._is_over, False  # done by the trace, just before this call
        self._is_over = self._forget is not None
        if is_done:
            return
        given, options = arguments
        self._fn(*map(self._of_call, given), **{name: self._of_call(value) for name, value in options.items()})

    def take(self) -> bool:
        """Whether it was done for the next call, which does it from now on."""
        is_done, self._is_done = self._is_done, False
        if self._forget is None:
            return is_done
        if not is_done and not self._is_over:
            self._forget()
        self._is_over = True
        return False

    def _of_call(self, value: Any) -> Any:
        return self._files[id(value)].file if id(value) in self._files else value


def take_written(effects: Iterable[Effect]) -> int:
    """The number of outputs that the next call need not do, since the trace has done them. It does them from now on."""
    done = [effect.put for effect in effects if isinstance(effect.put, _Put) and effect.put.take()]
    return len(done)


def line_at(frame: types.FrameType) -> Line:
    """The line that a frame is at."""
    return Line(frame.f_code, frame.f_lineno, frame.f_globals)


def called_at_line(line: Line, note: Callable[..., dict[str, Any]] | None, fn: Callable[..., Any]) -> Callable[..., Any]:
    """`fn` as called from a line of the user's code, which loggers and warnings name.

    `note` gets the arguments before, and returns the options to pass.

    The frame of this call is one more: `stacklevel=2` becomes 3.
    """
    made: Any = _calling(fn) if note is None else _noting(note, fn)
    its = line.code
    code = made.__code__.replace(co_filename=its.co_filename, co_name=its.co_name, co_qualname=its.co_qualname, co_firstlineno=line.number)
    return types.FunctionType(code, line.variables, its.co_name, None, made.__closure__)


def _calling(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **options: fn(*given, **options)


def _noting(note: Callable[..., dict[str, Any]], fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *given, **options: fn(*given, **note(given, options))


__all__ = ["Line", "Output", "Shown", "called_at_line", "line_at", "repeated", "take_written"]
