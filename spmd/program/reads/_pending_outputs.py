"""What a function prints, logs or writes to a file with numbers that only the device knows: done when a call ends, in every call.

print(f"loss {loss.item():.4f}"); logger.info("loss %.4f", loss.item()); bar.set_postfix(loss=loss.item())

Output without such numbers is written while the function is traced, unless the function also has output with some, or branches on a
value of the device. Then every call repeats all of it, in order. What a trace has written already is not repeated by the call that
follows the trace.
"""

from __future__ import annotations

import csv
import io
import itertools
import json
import logging
import os
import pprint
import sys
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from spmd.base._errors import TraceError, called_at, message, user_line
from spmd.base._warning_registries import keep_shown_warnings
from spmd.program.reads._hidden_state import is_in_memory, is_output
from spmd.program.reads._hooks import without_hooks
from spmd.program.reads._journal import Effect
from spmd.program.reads._library import starts_trace, user_frame
from spmd.program.reads._logging_calls import is_off
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._output_code import (
    OutputsAtOnce,
    OutputsPutOff,
    OwnCode,
    files_of_rows,
    has_own_write,
    own_code,
    question_of_own_code,
)
from spmd.program.reads._output_settings import is_kept, settings_of
from spmd.program.reads._outside import question_of
from spmd.program.reads._pending import NotTaken, Pending, holds_copies, is_known_before, is_unknown, not_taken, parts_in, pending
from spmd.program.reads._pending_texts import TextsNeeded, text_method
from spmd.program.reads._questions import Question
from spmd.program.reads._repeated_outputs import Output, Shown, called_at_line, line_at, repeated
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
_OF_FILES = frozenset(map(id, (os.stat, os.lstat, os.path.getsize, os.path.getmtime, os.path.getatime, os.path.getctime)))
_OF_POSITIONS = ("tell", "seek", "truncate")
_RETURN_LENGTHS = ("write", "write_text", "write_bytes")
_RETURN_UNKNOWN = (*_RETURN_LENGTHS, "writerow", "writerows", "writeheader", "update", "refresh")
_CALLED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, types.MethodDescriptorType)
_NAMES = frozenset((*_OF_STREAMS, *(fn.__name__ for fn in _FUNCTIONS), *itertools.chain.from_iterable(_METHODS.values())))


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
    """Whether it writes values that the host knows to a file that the function may read: then it is part of the call."""
    rows = files_of_rows(getattr(fn, "__self__", None))
    if not (fn is print or rows) or is_unknown(*args) or holds_copies(*args) or any(text_method(arg) is not None for arg in args):
        return False
    streams = rows or [arg for arg in args if isinstance(arg, io.IOBase)] or [sys.stdout]
    return any(_may_be_read(recording, stream) for stream in streams)


def only_writes_to(fn: Any, arg: Any) -> bool:
    """Whether a function of C only writes to a file among its arguments, or makes a writer to it."""
    return (fn is print or fn is csv.writer) and (is_output(arg, "write") or has_own_write(arg))


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
    if is_off(fn, args):
        return record(recording, fn, args)
    recording.ask_all([question_of_own_code(fn)])
    journal, own = recording.journal, own_code(fn, args)
    is_late = any(output.is_late for output in journal.outputs)
    if not is_late and own is not None and journal.puts_off is None and not journal.is_in_part:
        raise OutputsPutOff(len(journal.outputs))
    is_late |= (journal.repeats_outputs or bool(journal.puts_off)) and not journal.is_in_part
    if is_late or any(True for arg in args for _ in parts_in(arg)) or holds_copies(*args):
        return partial(_later, recording, fn, frame, own)
    if len(journal.outputs) < journal.num_written:  # an earlier trace for this call has done it
        return partial(_noted, recording, fn, frame, own, False)
    if fn is warnings.warn:
        keep_shown_warnings()
    return called_at_line(line_at(frame), partial(_note_early, recording, fn, frame, own), record(recording, fn, args))


def _require_known(recording: Recording, fn: Any, args: tuple[Any, ...]) -> None:
    """Check a warning that the function itself catches: it has no number that varies.

    Raises:
        TextsNeeded, NumbersNeeded: it has one.
        TraceError: only the device knows a number in it.
    """
    parts = [part for arg in args for part in parts_in(arg)]
    if parts or holds_copies(*args):
        raise _made_now(recording, None if holds_copies(*args) else parts, _settings_changed(fn, ""))


def _require_same_settings(recording: Recording) -> None:
    """Check that outputs go where they went when the function made them, if calls repeat them at their end.

    Raises:
        OutputsAtOnce, TextsNeeded, NumbersNeeded: they go elsewhere, so those that wait must not.
        TraceError: they do, and only the device knows the number in one that waits.
    """
    outputs = recording.journal.outputs
    other = next((output for output in outputs if output.settings != settings_of(output.fn)), None)
    if other is not None:
        raise _needed_now(recording, [output for output in outputs if output.is_late], _settings_changed(other.fn, _line_of(other)))


def _needed_now(recording: Recording, late: Sequence[Output], error: TraceError) -> Exception:
    """What to raise if outputs that wait for the end of a call must not."""
    if recording.journal.puts_off:
        return OutputsAtOnce()
    return _made_now(recording, [part for output in late for part in output.given.parts], error)


def _made_now(recording: Recording, parts: list[Any] | None, error: TraceError) -> Exception:
    """What to raise if an output with these numbers must be made at once. `parts`: None for copies to the host."""
    if parts is not None and all(part.is_of_host() if type(part) is Pending else is_known_before(part) for part in parts):
        if any(type(part) is Varying for part in parts):
            return NumbersNeeded()
        if not recording.has_constant_texts:
            return TextsNeeded()
    return error


def _line_of(output: Output) -> str:
    line = output.frames[0]
    return f"called at {os.path.basename(line.code.co_filename)}:{line.number}"


def _settings_changed(fn: Any, at: str) -> TraceError:
    return TraceError(
        message(
            f"{_name(fn)} where the function has changed what is shown of it, beside output of a number of the device",
            *([at] if at else called_at()),
            "Python writes such output when the call ends; filters, handlers and streams that the function sets and resets are gone then",
            fix="set them outside of the compiled function, or return the number and show it after the call: return loss.item()",
        )
    )


def _own_code_used(output: Output) -> TraceError:
    names = sorted({getattr(value, "__qualname__", type(value).__qualname__) for value in (output.own or OwnCode([], [])).objects})
    return TraceError(
        message(
            f"{_name(output.fn)} runs {', '.join(names)}, beside output of a number of the device",
            _line_of(output),
            "Python runs it when the call ends; the function reads what it may change, changes what it may read, or has made it",
            fix="read and change that outside of the compiled function, or return the number and show it after the call",
        )
    )


def _position_used(output: Output, line: str) -> TraceError:
    return TraceError(
        message(
            f"the position in a file is asked for or set, and {_name(output.fn)} of a number of the device writes to it",
            f"at {line}; {_line_of(output)}",
            "Python writes it when the call ends",
            fix="ask for the position, or set it, outside of the compiled function",
        )
    )


def _print(recording: Recording, frame: types.FrameType, record: Callable[..., Any], /, *given: Any, **options: Any) -> None:
    """`print` of objects whose texts the user's classes make, and may be pending."""
    texts = [value if (method := text_method(value)) is None else method(value) for value in given]
    without_hooks(recording, noted_output, recording, print, (*texts, *options.values()), record, frame)(*texts, **options)


def _later(recording: Recording, fn: Any, frame: types.FrameType, own: OwnCode | None, /, *given: Any, **options: Any) -> Any:
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
    return _noted(recording, fn, frame, own, True, *given, **options)


def _noted(
    recording: Recording, fn: Any, frame: types.FrameType, own: OwnCode | None, is_late: bool, /, *given: Any, **options: Any
) -> Any:
    """Note one call. Returns what stands for its result."""
    _note(recording, fn, frame, own, is_late, given, options)
    name = getattr(fn, "__name__", "")
    if name in _RETURN_LENGTHS and given and not has_own_write(getattr(fn, "__self__", None)):
        return pending(len, given[:1], is_safe=True) if is_unknown(given[0]) else len(given[0])
    return pending(partial(_not_kept, name), (), None, lambda: ABSENT, is_safe=True) if name in _RETURN_UNKNOWN else None


def _not_kept(name: str) -> Any:
    what = f"a compiled function uses the result of {name}(), which a call does when it ends"
    raise TraceError(message(what, fix="do not use its result, or call it outside of the function"))


def _note_early(
    recording: Recording, fn: Any, frame: types.FrameType, own: OwnCode | None, given: Sequence[Any], options: dict[str, Any]
) -> dict[str, Any]:
    """Note a call that is done now. Returns its options, for a call with one more frame."""
    _note(recording, fn, frame, own, False, given, options)
    return {**options, "stacklevel": options["stacklevel"] + 1} if options.get("stacklevel", 1) > 1 else options


def _note(
    recording: Recording,
    fn: Any,
    frame: types.FrameType,
    own: OwnCode | None,
    is_late: bool,
    given: Sequence[Any],
    options: dict[str, Any],
) -> None:
    """Note one call. `is_late`: it is done when a call ends; otherwise now."""
    owner = getattr(fn, "__self__", None)
    streams: list[Any] = [owner] if isinstance(owner, io.IOBase) or has_own_write(owner) else files_of_rows(owner)
    shown: list[Shown] = []
    shows = str(getattr(fn, "__module__", "")) in _SHOWS

    def other(value: Any) -> Any:
        is_file = value is options.get("file") or (not shows and has_own_write(value))
        if is_file or isinstance(value, io.IOBase) or value is sys.stdout or value is sys.stderr:
            streams.append(value)
            return value
        if not shows:
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
        raise _made_now(recording, made.parts, _in_memory(fn))
    for each in shown if is_late else ():
        recording.read_text(each.value)
        each.settle()
    frames = [frame]
    while len(frames) < options.get("stacklevel", 1) and frame.f_back is not None and not starts_trace(frame := user_frame(frame.f_back)):
        frames.append(frame)
    recording.journal.outputs.append(Output(fn, list(map(line_at, frames)), made, streams, shown, is_late, settings_of(fn), own))


def _arguments(*given: Any, **options: Any) -> tuple[Any, dict[str, Any]]:
    return given, options


def with_outputs(effects: list[Effect], recording: Recording) -> list[Effect]:
    """The writes of a trace, followed by its output if every call repeats that."""
    journal = recording.journal
    if not any(output.is_late for output in journal.outputs):
        return effects
    _require_same_settings(recording)
    _require_apart(recording)
    return [*effects, *repeated(journal.outputs, journal.num_written, recording.is_before)]


def _require_apart(recording: Recording) -> None:
    """Check that the function has not read what outputs that wait change, nor changed what they read.

    Raises:
        OutputsAtOnce, TextsNeeded, NumbersNeeded: it has, so they must not wait.
        TraceError: it has, and only the device knows the number in one that waits.
    """
    journal = recording.journal
    late = [output for output in journal.outputs if output.is_late]
    for output in journal.outputs:
        if output.own is not None and (not output.is_late or output.own.is_used(recording)):
            raise _needed_now(recording, late, _own_code_used(output))
    for (stream, line), output in itertools.product(journal.positions, late):
        if any(file is stream or _is_at(file, getattr(stream, "name", None)) for file in _files_of(output)):
            raise _needed_now(recording, late, _position_used(output, line))


def require_no_output(recording: Recording, fn: Any, args: tuple[Any, ...]) -> None:
    """Check a call of a method of a file in memory: it writes no number of the device, and follows no output that may be in that file.

    Raises:
        TraceError: the file would have to be written now.
    """
    if is_unknown(*args) or holds_copies(*args):
        raise _in_memory(fn)
    for output in recording.journal.outputs:
        if output.is_late and any(stream is fn.__self__ for stream in _files_of(output)):
            raise _in_memory(output.fn)


def note_position(recording: Recording, fn: Any) -> None:
    """Before a call of a method of a file: note whether it asks for the position, or sets it."""
    if fn.__name__ in _OF_POSITIONS:
        recording.journal.positions.append((fn.__self__, user_line()))


def require_no_late_output(recording: Recording, fn: Any, args: tuple[Any, ...], files: Sequence[Question]) -> None:
    """Check a call that may read files: no output that is written when the call ends is in one of them. `files`: of `questions_of_files`.

    Raises:
        TextsNeeded, NumbersNeeded: the file has to be written now, with numbers that the host knows.
        TraceError: it would have to be written now, and only the device knows the number.
    """
    late = [output for output in recording.journal.outputs if output.is_late]
    if not late:
        return
    of_fn = question_of(fn.__func__, (fn.__self__, *args)) if type(fn) is types.MethodType else question_of(fn, args)
    asked = [question[0] for question in (of_fn, *files) if question is not None]
    paths = args[:1] if id(fn) in _OF_FILES else [key[1] for key in asked if key[0] == "file"]
    for output, path in itertools.product(late, paths):
        if any(_is_at(file, path) for file in _files_of(output)):
            error = TraceError(
                message(
                    f"the file {os.fspath(path)!r} is read after {_name(output.fn)} of a number of the device to it",
                    *called_at(),
                    "Python writes it when the call ends",
                    fix="read the file outside of the compiled function",
                )
            )
            raise _needed_now(recording, late, error)


def _files_of(output: Output) -> Iterator[Any]:
    """The files, or their paths, that an output may write to: also those of a logger, a writer of CSV or a progress bar."""
    owner: Any = getattr(output.fn, "__self__", None)
    yield from (*output.streams, owner)
    if output.fn.__module__ == "logging":
        logger = owner if isinstance(owner, logging.Logger) else getattr(owner, "logger", logging.root)
        while logger is not None:
            yield from (getattr(handler, "stream", None) for handler in logger.handlers)
            logger = logger.parent if logger.propagate else None
    elif rows := files_of_rows(owner):
        yield from rows
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


__all__ = [
    "is_captured",
    "is_output_call",
    "note_position",
    "noted_output",
    "only_writes_to",
    "require_no_output",
    "require_no_late_output",
    "with_outputs",
]
