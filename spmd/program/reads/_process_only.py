"""What is true in this process alone: the addresses of objects, hashes, and that a trace has written to a file or another process.

    for p in {weight, bias}: ...        # the order depends on addresses
    print(loss.shape)                   # shown when the function is traced

Each is a question whose answer no other process gives. So a trace that depends on one is not used by another process.
"""

from __future__ import annotations

import builtins
import os
import secrets
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

from spmd.program.reads._hidden_state import is_output
from spmd.program.reads._outside import opens_to_write
from spmd.program.reads._parts import with_tuple_items
from spmd.program.reads._pending_outputs import is_output_call
from spmd.program.reads._questions import Question

ONLY_HERE = secrets.token_hex()  # a process that is forked shares it, with the addresses
ADDRESSES: Question = ("addresses",), "the addresses of objects", lambda: ONLY_HERE
_HASHES: Question = ("hashes",), "the hashes of strings", lambda: ONLY_HERE if sys.flags.hash_randomization else 0
_OUTPUT: Question = ("output",), "what the trace printed or wrote", lambda: ONLY_HERE
_OF_NUMBERS = {int, bool, float, complex, tuple}
_REPEATED = ("logging", "warnings", "_warnings")  # log records and warnings are stored with the trace
_WRITERS: dict[str, frozenset[str]] = {  # by module: functions that change files, or what other processes see
    os.name: frozenset(
        (
            *("mkdir", "remove", "unlink", "rename", "replace", "rmdir", "link", "symlink", "truncate", "ftruncate", "chmod", "chown"),
            *("utime", "write", "pwrite", "system", "mkfifo", "sendfile", "fork", "posix_spawn", "kill"),
        )
    ),
    "os": frozenset(("makedirs", "removedirs", "renames", "popen")),
    "shutil": frozenset(("copy", "copy2", "copyfile", "copytree", "move", "rmtree", "make_archive", "unpack_archive", "chown")),
    "subprocess": frozenset(("run", "call", "check_call", "check_output", "getoutput", "getstatusoutput", "Popen")),
    "pathlib": frozenset(("mkdir", "touch", "unlink", "rename", "replace", "rmdir", "symlink_to", "hardlink_to", "chmod")),
    "tempfile": frozenset(("mkstemp", "mkdtemp", "NamedTemporaryFile", "TemporaryDirectory", "TemporaryFile", "SpooledTemporaryFile")),
    "torch": frozenset(("save",)),
    "numpy": frozenset(("save", "savez", "savez_compressed", "savetxt", "tofile", "dump")),
    "safetensors": frozenset(("save_file",)),
    "socket": frozenset(("create_connection", "send", "sendall", "sendto", "connect")),
}


def question_of_hashes(values: Iterable[Any]) -> Question | None:
    """What the hashes of values depend on besides the values: the seed for strings, and the addresses of other objects than numbers."""
    kinds = {type(value) for value in with_tuple_items(values)} - _OF_NUMBERS
    return None if not kinds else _HASHES if kinds <= {str, bytes} else ADDRESSES


def questions_of_output(fn: Any, args: tuple[Any, ...]) -> Iterator[Question]:
    """The question for a call that prints, writes to a file or changes one."""
    if type(fn) not in _NAMED:
        return
    name, owner = fn.__name__, getattr(fn, "__self__", None)
    module = str(getattr(fn, "__module__", None) or type(owner).__module__)
    roots = module, module.partition(".")[0]
    if roots[1] in _REPEATED:
        return
    is_writer = any(name in _WRITERS.get(root, ()) for root in roots) or is_output_call(fn) or opens_to_write(name, args)
    if is_writer or (type(fn) in _FUNCTIONS and any(is_output(arg, "write") for arg in args) and fn not in _ASKS):
        yield _OUTPUT


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType)
_NAMED = frozenset((*_FUNCTIONS, types.MethodDescriptorType, types.MethodWrapperType, type))
_ASKS = (builtins.isinstance, builtins.hasattr, builtins.getattr, builtins.id)


__all__ = ["ADDRESSES", "ONLY_HERE", "question_of_hashes", "questions_of_output"]
