"""Reads of state outside Python objects: files, and settings of torch and the process. Each is a question, asked again before each call."""

from __future__ import annotations

import builtins
import logging
import os
import pathlib
import re
import stat
import tempfile
import types
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch

from spmd.program.find._static import attributes_of, name_of, static_attribute
from spmd.program.reads._library import is_library, is_of_python, is_recorded
from spmd.program.reads._number_place import ABSENT
from spmd.program.reads._places import PLAIN, ContentPlace, Expected, is_same
from spmd.program.reads._questions import Question

_ASKS_OF_FILES = (
    "exists",
    "lexists",
    "isfile",
    "isdir",
    "islink",
    "ismount",
    "samefile",
    "getmtime",
    "getctime",
    "getsize",
    "is_file",
    "is_dir",
)
_READS_FILES = {
    id(fn)
    for fn in (
        *(os.stat, os.lstat, os.listdir, os.scandir, os.walk, torch.load),
        *(np.load, np.loadtxt, np.genfromtxt, np.fromfile, np.memmap),
    )
}
_ASKS_OF_PATHS = frozenset(("abspath", "realpath", "relpath", "expanduser", "expandvars", "absolute", "resolve", "readlink"))
_ASKS = {
    id(fn)
    for fn in (
        *(torch.initial_seed, np.geterr, np.geterrcall, np.getbufsize, np.get_printoptions, tempfile.gettempdir),
        *(logging.Logger.getEffectiveLevel, logging.Logger.isEnabledFor, logging.Logger.hasHandlers),
    )
}
_READS_OF_PATHS = frozenset(("open", "read_text", "read_bytes", "stat", "lstat", "iterdir", "glob", "rglob", "walk"))
_MODE = re.compile(r"[rwxabtU+]+")
_CODE = (".py", ".pyc", ".so")  # is found by its functions, unless the trace reads its file:
_READ_CODE = frozenset(("open", "run_path", "read_text", "read_bytes", "spec_from_file_location"))
_PATHS = (str, bytes, os.PathLike)
_WRITE = ("save", "imsave", "write", "dump")  # beginnings of the names of functions that write a file
# packages whose functions do not read files by a path; of builtins, only `open` does
_COMPUTES = frozenset(("builtins", "torch", "jax", "jaxlib", "mesh", "spmd", "functorch", "numpy", "einops", "einx", "opt_einsum"))
_OF_THE_SYSTEM = ("/proc/", "/sys/", "/dev/")
_ASKS_OF_TORCH = re.compile(r"(is|are|get)_\w+|(flash|math|mem_efficient|cudnn)_sdp_enabled|\w+_math_sdp_allowed")
_SMALL = 1 << 16  # bytes
# modules whose functions answer differently in a trace
_OTHERWISE_IN_A_TRACE = ("torch.compiler", "torch._dynamo", "torch.jit", "torch.fx", "torch.onnx", "torch.export", "torch.random")
_IN_THE_SIGNATURE = frozenset(("is_grad_enabled", "get_default_dtype", "is_inference_mode_enabled"))  # part of a call's signature


class FilePlace(ContentPlace):
    """A place whose content is read from a file. What a trace writes to files is not undone: if it changes what it has read, no call can
    repeat that, and each traces again.
    """

    __slots__ = ("is_changed",)

    def __init__(self, holder: Any, title: str, read: Callable[[], Any]) -> None:
        super().__init__(holder, title, read)
        self.is_changed = False

    def settle(self, expected: Expected) -> None:
        self.is_changed = self.is_changed or not is_same(self.read(), self.content)

    def difference(self) -> str | None:
        return f"the function itself changes {self.title}" if self.is_changed else super().difference()


def question_of(fn: Any, args: tuple[Any, ...]) -> Question | None:
    """The question that a call of a library function asks; None if it asks none."""
    name, module = getattr(fn, "__name__", ""), getattr(fn, "__module__", None) or ""
    if (
        not isinstance(fn, type)
        and module.partition(".")[0] == "torch"
        and _ASKS_OF_TORCH.fullmatch(name)
        and all(isinstance(a, PLAIN) for a in args)
    ):
        if name in _IN_THE_SIGNATURE or module.startswith(_OTHERWISE_IN_A_TRACE):
            return None
        return (id(fn), *args), f"torch's {name}()", partial(_answer, fn, args)
    if id(fn) in _ASKS:
        return (id(fn), *(a if isinstance(a, PLAIN) else id(a) for a in args)), f"{name}()", partial(_answer, fn, args)
    if name in ("cwd", "home") and args and isinstance(args[0], type) and issubclass(args[0], pathlib.PurePath):
        return (name,), f"Path.{name}()", partial(_answer, getattr(pathlib.Path, name), ())
    return _of_file(fn, name, module, args) if args and isinstance(args[0], _PATHS) else None


def setting_of(holder: Any, name: str, title: str) -> Question | None:
    """The question for an attribute that is a setting; None for other attributes.

    A setting is computed by a property of a module (`torch.backends.cudnn.benchmark`), or by `__getattr__` of a library class
    (`torch.backends.cuda.matmul`, `torch._dynamo.config`).
    """
    found = static_attribute(type(holder), name)
    if name.startswith("__") or isinstance(holder, torch.Tensor):
        return None
    if found is None:
        getter = static_attribute(type(holder), "__getattr__")
        if not isinstance(getter, types.FunctionType) or is_recorded(getter.__module__) or getter.__module__.startswith("spmd."):
            return None
        if name in (attributes_of(holder) or ()):
            return None
    elif not isinstance(holder, types.ModuleType) or not (hasattr(type(found), "__get__") and hasattr(type(found), "__set__")):
        return None
    return (id(holder), name), f"{title}.{name}", partial(_answer, getattr, (holder, name))


def answer_place(holder: Any, question: Question) -> ContentPlace | None:
    """The place that holds the answer to a question, if that is a plain value, a tuple or ABSENT."""
    key, title, answer = question
    place = (FilePlace if key[0] in ("file", "of a file") else ContentPlace)(holder, title, answer)
    return place if isinstance(place.content, (*PLAIN, tuple, frozenset)) or place.content is place.read() else None


def _of_file(fn: Any, name: str, module: str, args: tuple[Any, ...]) -> Question | None:
    path = args[0]
    is_method = isinstance(path, pathlib.PurePath) and module.partition(".")[0] == "pathlib"
    if name in _ASKS_OF_FILES and (is_method or module in ("posixpath", "ntpath", "genericpath", "os.path")):
        paths = args[:2] if name == "samefile" else args[:1]
        return ("of a file", id(fn), *map(os.fspath, paths)), f"{name}({os.fspath(path)!r})", partial(_answer, fn, paths)
    if name in _ASKS_OF_PATHS and (is_method or module in ("posixpath", "ntpath")) and isinstance(path, (str, pathlib.Path)):
        return (name, *map(str, args)), f"{name}({os.fspath(path)!r})", partial(_answer, fn, args)
    if (is_method and name in _READS_OF_PATHS and not opens_to_write(name, args)) or id(fn) in _READS_FILES:
        return _question_of_file(path)
    return None


def questions_of_files(fn: Any, args: tuple[Any, ...]) -> list[Question]:
    """The questions for the contents of files whose paths a function of a library is given: it may read them.

    open(path, encoding="latin-1"); gzip.open(path); fileinput.input([path]); PIL.Image.open(path); scipy.io.loadmat(path)
    """
    name, module = name_of(fn), getattr(fn, "__module__", None) or type(getattr(fn, "__self__", None)).__module__
    if not (fn is builtins.open or is_of_python(module) or (_reads_files(module) and not name.startswith(_WRITE))):
        return []
    if opens_to_write(name, args):
        return []
    is_code_data = name in _READ_CODE
    given = [part for arg in args for part in (arg if type(arg) in (list, tuple) and arg and isinstance(arg[0], _PATHS) else (arg,))]
    found = [_question_of_file(arg) for arg in given if isinstance(arg, _PATHS) and _is_data(arg, is_code_data)]
    return [] if found and question_of(fn, args) is not None else found  # one that asks less: `os.path.exists`


def opens_to_write(name: str, args: tuple[Any, ...]) -> bool:
    """Whether a call of a function called `name` opens a file to write: the file is written only while the function is traced."""
    if name != "open":
        return False
    modes = (mode for mode in args[1:] if isinstance(mode, str) and _MODE.fullmatch(mode))
    flags = (flag for flag in args[1:2] if type(flag) is int)
    return any(set(mode) & set("wxa+") for mode in modes) or any(flag & (os.O_WRONLY | os.O_RDWR) for flag in flags)


def _reads_files(module: str) -> bool:
    """Whether a function of a module may read a file by its path: one of a library, other than those of `_COMPUTES`."""
    return is_library(module) and not is_recorded(module) and module.partition(".")[0] not in _COMPUTES and not is_of_python(module)


def _is_data(path: Any, is_code_data: bool) -> bool:
    """Whether there is a file at a path, and it is of data. `is_code_data`: code is data too."""
    try:
        name = os.fsdecode(path)
        return os.path.isfile(name) and (is_code_data or not name.endswith(_CODE)) and not name.startswith(_OF_THE_SYSTEM)
    except (TypeError, ValueError):
        return False


def _question_of_file(path: Any) -> Question:
    """The question for the content of a file or folder."""
    return ("file", os.fspath(path)), f"the file {os.fspath(path)!r}", partial(_state_of_file, path)


def _answer(fn: Any, args: tuple[Any, ...]) -> Any:
    try:
        found = fn(*args)
    except (OSError, RuntimeError, ValueError, AttributeError):
        return ABSENT
    if isinstance(found, dict):
        return tuple(found.items())
    return os.fspath(found) if isinstance(found, pathlib.PurePath) else found


def _state_of_file(path: Any) -> Any:
    """The state of a file, to compare: inode, size, time and, up to 64 KiB, its bytes, because the clock of file systems is coarse."""
    try:
        found = os.stat(path)
        small = pathlib.Path(os.fsdecode(path)).read_bytes() if stat.S_ISREG(found.st_mode) and found.st_size <= _SMALL else b""
    except OSError:
        return ABSENT
    return found.st_ino, found.st_size, found.st_mtime_ns, small
