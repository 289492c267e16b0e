"""What a function prints, logs or writes to a file with numbers that only the device knows: done when a call ends, in every call.

print(f"loss {loss.item():.4f}"); logger.info("loss %.4f", loss.item()); bar.set_postfix(loss=loss.item())

Output without such numbers is written while the function is traced, unless the function also has output with some, or branches on a
value of the device. Then every call repeats all of it, in order. What a trace has written already is not repeated by the call that
follows the trace.
"""

from __future__ import annotations

import gc
import io
import itertools
import json
import logging
import os
import pprint
import sys
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from spmd.base._errors import TraceError, called_at, message
from spmd.program.reads._hidden_state import is_in_memory, is_output
from spmd.program.reads._hooks import without_hooks
from spmd.program.reads._journal import Effect
from spmd.program.reads._library import is_library, starts_trace
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._output_settings import is_kept, settings_of
from spmd.program.reads._pending import NotTaken, Pending, holds_copies, is_known_before, is_unknown, not_taken, parts_in, pending
from spmd.program.reads._pending_texts import TextsNeeded, text_method
from spmd.program.reads._varying import NumbersNeeded, Varying

if TYPE_CHECKING:
    from spmd.program.reads._recorder import Recording

_FUNCTIONS = (print, warnings.warn, json.dump, pprint.pprint, pprint.pp)
_SHOWS = ("builtins", "logging", "warnings", "_warnings")  # modules whose functions only show an argument
_OF_LOGGERS = ("debug", "info", "warning", "warn", "error", "exception", "critical", "fatal", "log")
_OF_BARS = ("set_postfix", "set_postfix_str", "set_description", "set_description_str", "update", "write", "refresh")
_OF_BOARDS = ("add_scalar", "add_scalars", "add_text", "add_hparams")
_METHODS: dict[str, tuple[str, ...]] = {  # functions and methods in Python, by the start of their module's name
    "logging": _OF_LOGGERS,
    "csv": ("writerow", "writerows", "writeheader"),
    "pathlib": ("write_text", "write_bytes"),
    "tqdm": _OF_BARS,
    "rich": ("print", "log"),
    "torch.utils.tensorboard": _OF_BOARDS,
    "tensorboardX": _OF_BOARDS,
    "wandb": ("log",),
}
_OF_STREAMS = ("write", "writelines", "flush")
_RETURN_LENGTHS = ("write", "write_text", "write_bytes")
_RETURN_OTHERS = ("writerow", "writerows", "writeheader", "update", "refresh")
_CALLED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType)
_NAMES = frozenset((*_OF_STREAMS, *(fn.__name__ for fn in _FUNCTIONS), *itertools.chain.from_iterable(_METHODS.values())))


class Shown:
    """Stands for an object that is printed: every call prints the texts of the trace."""

    def __init__(self, value: Any) -> None:
        self._value = value
        self._texts: tuple[str, str] | None = None

    def settle(self) -> None:
        """Take the texts of the object, and drop it."""
        if self._texts is None:
            self._texts, self._value = (str(self._value), repr(self._value)), None

    def __str__(self) -> str:
        return self._texts[0] if self._texts else str(self._value)

    def __repr__(self) -> str:
        return self._texts[1] if self._texts else repr(self._value)


class _Line(NamedTuple):
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
    """

    fn: Callable[..., Any]
    frames: list[_Line]
    given: Pending
    streams: list[Any]
    shown: list[Shown]
    is_late: bool
    settings: tuple[Any, ...]


def is_output_call(fn: Any) -> bool:
    """Whether a function only shows what it is given: in a terminal, in a log, in a file."""
    if type(fn) not in _CALLED:
        return False
    name = getattr(fn, "__name__", None)
    if name not in _NAMES:
        return False
    if any(fn is each for each in _FUNCTIONS):
        return True
    owner = getattr(fn, "__self__", None)
    if name in _OF_STREAMS and owner is not None and is_output(owner, name):
        return True
    if type(fn) is types.BuiltinMethodType:
        return type(owner).__module__ == "_csv"
    if type(fn) not in (types.FunctionType, types.MethodType):
        return False
    module = str(fn.__module__)
    return any(name in names and (module == start or module.startswith(start + ".")) for start, names in _METHODS.items())


def is_captured(recording: Recording, fn: Any, args: tuple[Any, ...]) -> bool:
    """Whether it is a `print` of values that the host knows to a file that the function may read: then it is part of the call."""
    if fn is not print or is_unknown(*args) or holds_copies(*args) or any(text_method(arg) is not None for arg in args):
        return False
    streams = [arg for arg in args if isinstance(arg, io.IOBase)] or [sys.stdout]
    return any(_may_be_read(recording, stream) for stream in streams)


def _may_be_read(recording: Recording, stream: Any) -> bool:
    """Whether a stream is a file in memory, other than the standard output that the caller has put there."""
    return is_in_memory(stream) and not any(stream is standard for standard in recording.journal.standard)


def noted_output(
    recording: Recording, fn: Any, args: tuple[Any, ...], record: Callable[..., Any], frame: types.FrameType | None = None
) -> Callable[..., Any]:
    """The callable to use instead of a function of `is_output_call`, with its reads recorded.

    Args:
        recording, fn, args: the call.
        record: records a call of a function that is called now.
        frame: where it is called, by default the user's innermost frame.
    """
    frame = frame or user_frame(sys._getframe(1))
    if fn is print and any(text_method(arg) is not None for arg in args):
        return partial(_print, recording, frame, record)
    if is_kept(fn, recording.journal.shown):
        _require_known(recording, fn, args)
        return record(recording, fn, args)
    journal = recording.journal
    is_late = any(output.is_late for output in journal.outputs) or (journal.repeats_outputs and not journal.is_in_part)
    if not is_late and not any(True for arg in args for _ in parts_in(arg)) and not holds_copies(*args):
        return _at(_line(frame), partial(_note_early, recording, fn, frame), record(recording, fn, args))
    return partial(_later, recording, fn, frame)


def _require_known(recording: Recording, fn: Any, args: tuple[Any, ...]) -> None:
    """Check a warning that the function itself catches: it has no number that varies.

    Raises:
        TextsNeeded, NumbersNeeded: it has one.
        TraceError: only the device knows a number in it.
    """
    parts = [part for arg in args for part in parts_in(arg)]
    if parts or holds_copies(*args):
        raise _needed_now(recording, fn, "", None if holds_copies(*args) else parts)


def _require_same_settings(recording: Recording) -> None:
    """Check that outputs go where they went when the function made them, if calls repeat them at their end.

    Raises:
        TextsNeeded, NumbersNeeded: they go elsewhere, so those that wait must not.
        TraceError: they do, and only the device knows the number in one that waits.
    """
    outputs = recording.journal.outputs
    late = [output for output in outputs if output.is_late]
    other = next((output for output in outputs if output.settings != settings_of(output.fn)), None) if late else None
    if other is not None:
        line = other.frames[0]
        at = f"called at {os.path.basename(line.code.co_filename)}:{line.number}"
        raise _needed_now(recording, other.fn, at, [part for output in late for part in output.given.parts])


def _needed_now(recording: Recording, fn: Any, at: str, parts: list[Any] | None) -> Exception:
    """What to raise for outputs with these numbers that wait for the end of a call. `parts`: None for copies to the host."""
    if parts is not None and all(part.is_of_host() if type(part) is Pending else is_known_before(part) for part in parts):
        if any(type(part) is Varying for part in parts):
            return NumbersNeeded()
        if not recording.has_constant_texts:
            return TextsNeeded()
    return TraceError(
        message(
            f"{_name(fn)} where the function has changed what is shown of it, beside output of a number of the device",
            *([at] if at else called_at()),
            "Python writes such output when the call ends; filters, handlers and streams that the function sets and resets are gone then",
            fix="set them outside of the compiled function, or return the number and show it after the call: return loss.item()",
        )
    )


def _print(recording: Recording, frame: types.FrameType, record: Callable[..., Any], /, *given: Any, **options: Any) -> None:
    """`print` of objects whose texts the user's classes make, and may be pending."""
    texts = [value if (method := text_method(value)) is None else method(value) for value in given]
    without_hooks(recording, noted_output, recording, print, (*texts, *options.values()), record, frame)(*texts, **options)


def _later(recording: Recording, fn: Any, frame: types.FrameType, /, *given: Any, **options: Any) -> Any:
    if recording.journal.is_in_part:
        raise TraceError(
            message(
                f"{_name(fn)} in the body of a branch or loop in a compiled function, or in a micro-batch",
                *called_at(),
                "only the device knows whether and how often the body runs",
                fix="return the number from it, and print after the branch or loop: print(loss.item())",
            )
        )
    if fn is print and options.get("file") is None and sys.stdout is not recording.journal.standard[0]:
        options["file"] = sys.stdout  # redirected by the function
    _note(recording, fn, frame, True, given, options)
    name = getattr(fn, "__name__", "")
    if name in _RETURN_LENGTHS and given:
        return pending(len, given[:1], is_safe=True) if is_unknown(given[0]) else len(given[0])
    return pending(partial(_not_kept, name), (), None, lambda: ABSENT, is_safe=True) if name in _RETURN_OTHERS else None


def _not_kept(name: str) -> Any:
    what = f"a compiled function uses the result of {name}(), which a call does when it ends"
    raise TraceError(message(what, fix="do not use its result, or call it outside of the function"))


def _note_early(recording: Recording, fn: Any, frame: types.FrameType, given: Sequence[Any], options: dict[str, Any]) -> dict[str, Any]:
    """Note a call that is done now. Returns its options, for a call with one more frame."""
    _note(recording, fn, frame, False, given, options)
    return {**options, "stacklevel": options["stacklevel"] + 1} if options.get("stacklevel", 1) > 1 else options


def _note(recording: Recording, fn: Any, frame: types.FrameType, is_late: bool, given: Sequence[Any], options: dict[str, Any]) -> None:
    """Note one call. `is_late`: it is done when a call ends; otherwise now."""
    streams: list[Any] = [owner] if isinstance(owner := getattr(fn, "__self__", None), io.IOBase) else []
    shown: list[Shown] = []

    def other(value: Any) -> Any:
        if isinstance(value, io.IOBase) or value is sys.stdout or value is sys.stderr:
            streams.append(value)
            return value
        if str(getattr(fn, "__module__", "")) not in _SHOWS:
            raise NotTaken
        shown.append(Shown(value))
        return shown[-1]

    try:
        made = Pending(_arguments, tuple(given), options, lambda: None, other)
    except NotTaken:
        if is_late:
            raise not_taken(_name(fn)) from None
        return  # output of the trace alone
    if is_late and any(_may_be_read(recording, stream) for stream in streams):
        raise _in_memory(fn)
    for each in shown if is_late else ():
        recording.read_text(each._value)
        each.settle()
    frames = [frame]
    while len(frames) < options.get("stacklevel", 1) and frame.f_back is not None and not starts_trace(frame := user_frame(frame.f_back)):
        frames.append(frame)
    recording.journal.outputs.append(Output(fn, list(map(_line, frames)), made, streams, shown, is_late, settings_of(fn)))


def _arguments(*given: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    return given, options


def with_outputs(effects: list[Effect], recording: Recording) -> list[Effect]:
    """The writes of a trace, followed by its output if every call repeats that."""
    outputs, is_before = recording.journal.outputs, recording.is_before
    if not any(output.is_late for output in outputs):
        return effects
    _require_same_settings(recording)
    files = {id(stream): FileOfCall(stream) for output in outputs for stream in output.streams if not is_before(stream)}
    shown: list[Effect] = []
    for number, output in enumerate(outputs):
        for each in output.shown:
            each.settle()
        shown.append(_effect(output.given, _Put(output, files, not output.is_late or number < recording.journal.num_written)))
    for number, file in files.items():  # each is opened before its first output, and closed after its last one
        uses = [i for i, output in enumerate(outputs) if any(id(stream) == number for stream in output.streams)]
        file.first, file.last = shown[uses[0]], shown[uses[-1]]
    for file in files.values():
        shown.insert(shown.index(file.first), _effect(None, file.open))
        shown.insert(shown.index(file.last) + 1, _effect(None, file.close))
    return [*effects, *shown]


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
        mode, name = getattr(stream, "mode", ""), getattr(stream, "name", None)
        if not isinstance(mode, str) or mode.strip("bt") not in ("w", "a", "x") or not isinstance(name, str):
            raise not_taken("a write to a file that the function has opened")
        self._options = {} if "b" in mode else {"encoding": stream.encoding, "errors": stream.errors}
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

    def method(self, name: str) -> Callable[..., Any]:
        """A method of the file of each call."""
        return lambda *given, **options: getattr(self.file, name)(*given, **options)


class _Put:
    """Does an output with the arguments of a call."""

    def __init__(self, output: Output, files: dict[int, FileOfCall], is_done: bool) -> None:
        self._is_done = is_done
        self._files = {number: files[number] for number in map(id, output.streams) if number in files}
        its = self._files.get(id(getattr(output.fn, "__self__", None)))
        self._fn = output.fn if its is None else its.method(output.fn.__name__)
        for line in output.frames:
            self._fn = _at(line, None, self._fn)

    def __call__(self, arguments: tuple[Any, dict[str, Any]]) -> None:
        if self._is_done:  # by the trace, just before this call
            self._is_done = False
            return
        given, options = arguments
        self._fn(*map(self._of_call, given), **{name: self._of_call(value) for name, value in options.items()})

    def take(self) -> bool:
        """Whether it was done for the next call, which does it from now on."""
        is_done, self._is_done = self._is_done, False
        return is_done

    def _of_call(self, value: Any) -> Any:
        return self._files[id(value)].file if id(value) in self._files else value


def take_written(effects: Iterable[Effect]) -> int:
    """The number of outputs that the next call need not do, since the trace has done them. It does them from now on."""
    done = [effect.put for effect in effects if isinstance(effect.put, _Put) and effect.put.take()]
    return len(done)


def require_no_output(recording: Recording, fn: Any, args: tuple[Any, ...]) -> None:
    """Check a call of a method of a file in memory: it writes no number of the device, and follows no output that may be in that file.

    Raises:
        TraceError: the file would have to be written now.
    """
    if is_unknown(*args) or holds_copies(*args):
        raise _in_memory(fn)
    for output in recording.journal.outputs:
        if output.is_late and any(stream is fn.__self__ for stream in _files(output)):
            raise _in_memory(output.fn)


def require_no_late_output(recording: Recording, paths: Iterable[Any]) -> None:
    """Check a call that may read files: no output that is written when the call ends is in one of them.

    Raises:
        TraceError: the file would have to be written now.
    """
    late = [output for output in recording.journal.outputs if output.is_late]
    for output, path in itertools.product(late, paths):
        if any(_is_at(file, path) for file in _files(output)):
            raise TraceError(
                message(
                    f"the file {os.fspath(path)!r} is read after {_name(output.fn)} of a number of the device to it",
                    *called_at(),
                    "Python writes it when the call ends",
                    fix="read the file outside of the compiled function",
                )
            )


def _files(output: Output) -> Iterator[Any]:
    """The files, or their paths, that an output may write to: also those of a logger, a writer of CSV or a progress bar."""
    owner: Any = getattr(output.fn, "__self__", None)
    yield from (*output.streams, owner)
    if output.fn.__module__ == "logging":
        logger = owner if isinstance(owner, logging.Logger) else getattr(owner, "logger", logging.root)
        while logger is not None:
            yield from (getattr(handler, "stream", None) for handler in logger.handlers)
            logger = logger.parent if logger.propagate else None
    elif type(owner).__module__ in ("csv", "_csv"):
        yield from (part.__self__ for part in gc.get_referents(getattr(owner, "writer", owner)) if hasattr(part, "__self__"))
    else:
        yield from (getattr(owner, name, None) for name in ("fp", "file", "stream"))


def _is_at(file: Any, path: Any) -> bool:
    name = file if isinstance(file, os.PathLike) else getattr(file, "name", None)
    return isinstance(name, (str, bytes, os.PathLike)) and os.path.exists(name) and os.path.exists(path) and os.path.samefile(name, path)


def _name(fn: Any) -> str:
    return f"{getattr(fn, '__name__', 'an output')}()"


def _in_memory(fn: Any) -> TraceError:
    return TraceError(
        message(
            f"{_name(fn)} of a number of the device to a file in memory",
            *called_at(),
            "Python writes it when the call ends, and the function may read the file before",
            fix="collect the texts in a list, texts.append(f'{loss.item():.4f}'), and join them after the call",
        )
    )


def user_frame(frame: types.FrameType) -> types.FrameType:
    """The innermost frame of the user's code, from `frame` outwards."""
    while is_library(frame.f_globals.get("__name__")) and frame.f_back is not None and not starts_trace(frame):
        frame = frame.f_back
    return frame


def _line(frame: types.FrameType) -> _Line:
    return _Line(frame.f_code, frame.f_lineno, frame.f_globals)


def _at(line: _Line, note: Callable[..., dict[str, Any]] | None, fn: Callable[..., Any]) -> Callable[..., Any]:
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


__all__ = [
    "Output",
    "is_captured",
    "is_output_call",
    "noted_output",
    "require_no_output",
    "require_no_late_output",
    "user_frame",
    "with_outputs",
]
