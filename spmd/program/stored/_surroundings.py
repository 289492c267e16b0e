"""What a trace depends on besides the Python values that it read: versions, the source files of this package, flags, devices.

A stored trace is looked up by the digest of all this, of the function's code, of the options and of the kinds of arguments.
"""

from __future__ import annotations

import functools
import hashlib
import platform
import sys
import types
from enum import Enum
from pathlib import Path
from typing import Any

import jax
import numpy as np
import torch

from mesh import ShardingSpec
from mesh.job._join import program_environment
from spmd.base._settings import in_force
from spmd.base._torch import TreeSpec
from spmd.program.find._static import is_a
from spmd.program.reads import PLAIN, code_of
from spmd.program.reuse._signature import VARIES, ByIdentity
from spmd.program.stored._description import NotStorable, code_digest, description
from spmd.program.stored._library_state import library_state

_FLAGS = ("TORCH", "PYTORCH", "JAX", "XLA", "LIBTPU", "TPU", "SPMD", "HF_", "TRANSFORMERS", "CUDA", "NVIDIA", "OMP", "MKL", "PYTHON")


def digest_of(fn: Any, name: str, options: Any, key: Any, client: Any) -> tuple[str, list[Any]]:
    """The digest under which a trace is stored, and the objects among the arguments that are compared by identity, each once.

    Args:
        fn, name, options: of the step.
        key: the signature of the call.
        client: jax's client of the devices.

    Raises:
        NotStorable: an argument has no text.
    """
    code: Any = fn.__func__ if type(fn) is types.MethodType else fn
    if is_a(code, types.FunctionType):
        about: Any = code.__code__.co_filename, code.__qualname__, code_digest(code_of(code))
    else:
        about = description(type(fn))
    devices = [(d.id, d.platform, d.device_kind) for d in client.devices()]
    settings = {k: v for k, v in jax.config.values.items() if "cache" not in k and "dir" not in k}
    objects: list[Any] = []
    parts = (
        *("trace 1", name, about, repr(options), _text(key, objects), devices, client.platform_version),
        *(sys.version, platform.machine(), jax.__version__, torch.__version__, in_force.check_indices, sorted(settings.items(), key=repr)),
        *(*library_state(), sorted(program_environment(_FLAGS).items()), _own_files()),
    )
    return hashlib.sha256("\n".join(map(repr, parts)).encode()).hexdigest(), objects


@functools.lru_cache(maxsize=1)
def _own_files() -> tuple[Any, ...]:
    root = Path(__file__).parents[2]
    files = sorted(path for folder in (root, root.parent / "mesh") for path in folder.rglob("*.py"))
    seen = ((path, path.stat()) for path in files)
    return tuple((str(path.relative_to(root.parent)), about.st_size, about.st_mtime_ns) for path, about in seen)


def _text(value: Any, objects: list[Any]) -> str:
    """A part of a signature as text. An object that is equal to itself alone becomes its number in `objects`.

    What the trace reads of such an object (a model, an optimizer, a function) is compared like what it reads of a variable.
    """
    kind = type(value)
    if issubclass(kind, type):
        return repr(description(value))
    if issubclass(kind, (tuple, list)):
        base: Any = tuple if issubclass(kind, tuple) else list
        return f"{kind.__module__}.{kind.__qualname__}({','.join(_text(part, objects) for part in base.__iter__(value))})"
    if kind is ShardingSpec:
        return f"{value!r} {value.minibatch} {value.mesh.device_ids.tolist()}"
    if issubclass(kind, TreeSpec):
        context = value.context if type(value.context) in (tuple, list, type(None)) else [value.context]
        return f"tree({_text(value.type, objects)},{_text(context, objects)},{','.join(_text(c, objects) for c in value.children())})"
    if value is VARIES:
        return "any"
    if kind in PLAIN or issubclass(kind, (Enum, np.generic, types.CodeType, types.ModuleType)):
        return repr(description(value))
    if kind is ByIdentity and len(value.parts) > 1:
        return f"method({','.join(_text(ByIdentity(part), objects) for part in value.parts)})"
    if kind is ByIdentity or (kind.__hash__ is object.__hash__ and kind.__eq__ is object.__eq__):
        value = value.value if kind is ByIdentity else value
        kind = type(value)
        number = next((i for i, other in enumerate(objects) if other is value), len(objects))
        objects.extend([value] if number == len(objects) else [])
        return f"object {number}, {description(kind)!r}"
    raise NotStorable(f"an argument with a {kind.__qualname__}")


__all__ = ["digest_of"]
