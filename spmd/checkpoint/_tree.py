"""Converts nested containers and Python values to JSON and back. Arrays are replaced by numbers.

Nothing is pickled: a value of an unsupported type is refused with its path in the state. Floats are stored in hexadecimal, so they
are restored bit for bit. Arrays are passed to `add`, which returns a node: their number in the manifest, or for a small array
its bytes.

    node = encode({"lr": 1e-3, "weight": array}, add)      # {"dict": [["lr", {"float": "0x1.06..."}], ["weight", {"array": 0}]]}
    decode(node, lambda number, kind: arrays[number])
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import torch

from spmd.base._convert import host_array, host_tensor, to_numpy_dtype, to_torch_dtype
from spmd.base._errors import CheckpointError, SpmdError, message

Node = Any  # a JSON value
_MAX_DEPTH = 200
_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in vars(torch).values() if isinstance(dtype, torch.dtype)}
_KEYS = (str, int, float, bool, type(None), tuple)
_CONTAINERS: dict[type, str] = {list: "list", tuple: "tuple", set: "set", frozenset: "frozenset", torch.Size: "tuple"}
_MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "odict", Counter: "counter"}
_MAKE: dict[str, Callable[[Any], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "dict": dict,
    "odict": OrderedDict,
    "counter": lambda pairs: Counter(dict(pairs)),
}


def is_array(value: object) -> bool:
    """Whether a value is stored as an array: one of torch, jax or numpy."""
    return isinstance(value, torch.Tensor | jax.Array | np.ndarray | np.generic)


def encode(value: Any, add: Callable[[str, Any], Node], path: str = "", depth: int = 0) -> Node:
    """Convert `value` to a node.

    Args:
        add: called with the path and value of an array; returns its node.
        path: path of `value` in the state, for errors.
        depth: nesting depth of `value`.

    Raises:
        CheckpointError: `value` contains something other than containers, numbers, text, bytes, dtypes, devices and arrays, or is nested
            too deeply, as a container that contains itself is.
    """
    require_depth(depth, path)
    if is_array(value):
        return add(path, value)
    if value is None or isinstance(value, bool | str) or type(value) is int:
        return {"value": value}
    if isinstance(value, float):
        return {"float": float(value).hex()}
    if type(value) is complex:
        return {"complex": [value.real.hex(), value.imag.hex()]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": base64.b64encode(value).decode("ascii")}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    kind = _CONTAINERS.get(type(value)) or ("tuple" if isinstance(value, tuple) else None)
    if kind is not None:
        items: list[Any] = sorted(value, key=repr) if kind in ("set", "frozenset") else list(value)
        return {kind: [encode(item, add, f"{path}/{number}", depth + 1) for number, item in enumerate(items)]}
    if isinstance(value, dict):
        return {_MAPPINGS.get(type(value), "dict"): [_encode_item(key, item, add, path, depth + 1) for key, item in value.items()]}
    raise CheckpointError(
        message(
            f"{path or 'the state'} cannot be saved: it is of type {type(value).__module__}.{type(value).__qualname__}",
            "a checkpoint contains arrays, containers, numbers, text and bytes; nothing is pickled, because a pickle executes code",
            fix="save plain values, or give the object state_dict() and load_state_dict()",
        )
    )


def require_depth(depth: int, path: str) -> None:
    """Refuse a part of a state, at `path`, that is nested too deeply to be restored."""
    if depth > _MAX_DEPTH:
        what = f"the state is nested more than {_MAX_DEPTH} levels deep at {path[:80]}..."
        raise CheckpointError(message(what, fix="save a flatter state; a container must not contain itself"))


def _encode_item(key: Any, item: Any, add: Callable[[str, Any], Node], path: str, depth: int) -> Node:
    if not isinstance(key, _KEYS):
        raise CheckpointError(
            message(f"{path or 'the state'} has a key of type {type(key).__name__}", fix="use text, numbers or tuples of them as keys")
        )
    named = key if type(key) is str else encode(key, _refuse_array, path, depth)
    return [named, encode(item, add, f"{path}/{key}" if path else str(key), depth)]


def _refuse_array(path: str, value: Any) -> Node:
    raise CheckpointError(message(f"{path or 'the state'} has an array as a key", fix="use text or numbers as keys"))


def inline(path: str, value: Any) -> Node:
    """An `add` for `encode` that puts the array's bytes into the node: for small per-process state."""
    array = host_array(value.cpu()) if isinstance(value, torch.Tensor) else np.asarray(value)
    kind = kind_of(value)
    return {"inline": [array.dtype.name, list(array.shape), base64.b64encode(np.ascontiguousarray(array).tobytes()).decode("ascii"), kind]}


def kind_of(value: Any) -> str:
    """The kind of an array: "device", "torch", "jax", "numpy" or "scalar". It determines the type that it is restored as."""
    if isinstance(value, torch.Tensor):
        return "device" if value.device.type == "jax" else "torch"
    return "jax" if isinstance(value, jax.Array) else "scalar" if isinstance(value, np.generic) else "numpy"


def decode(node: Node, array: Callable[[int, str], Any], depth: int = 0) -> Any:
    """Convert a node to its value.

    Args:
        array: called with the number and kind of an array; returns its value.
        depth: nesting depth of the node.

    Raises:
        CheckpointError: the node is malformed.
    """
    if depth > _MAX_DEPTH or not isinstance(node, dict) or not node:
        raise malformed(f"a node of its state is not an object, is empty, or is nested more than {_MAX_DEPTH} levels deep")
    kind, content = next(iter(node.items()))
    try:
        if kind in _MAPPINGS.values():
            return _MAKE[kind]([(_decode_key(key, depth), decode(item, array, depth + 1)) for key, item in content])
        if kind in _MAKE:
            return _MAKE[kind]([decode(item, array, depth + 1) for item in content])
        return _decode_leaf(kind, content, node, array)
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RuntimeError, SpmdError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise malformed(f"a node of kind {kind!r} has invalid content") from error


def _decode_key(key: Node, depth: int) -> Any:
    return key if isinstance(key, str) else decode(key, _no_array, depth + 1)


def _no_array(number: int, kind: str) -> Any:
    raise malformed("a dict of its state has an array as a key")


def _decode_leaf(kind: str, content: Any, node: dict[str, Any], array: Callable[[int, str], Any]) -> Any:
    if kind == "array":
        return array(integer(content), str(node.get("kind", "torch")))
    if kind == "value" and (content is None or type(content) in (bool, int, str)):
        return content
    if kind == "float":
        return float.fromhex(content)
    if kind == "complex":
        return complex(*map(float.fromhex, content))
    if kind == "bytes":
        return base64.b64decode(content, validate=True)
    if kind == "dtype":
        return _DTYPES[content]
    if kind == "device":
        return torch.device(content)
    if kind == "inline":
        return _decode_inline(*content)
    raise malformed(f"a node of its state is of unknown kind {str(kind)[:40]!r}")


def _decode_inline(name: str, shape: list[int], text: str, kind: str) -> Any:
    flat = np.frombuffer(base64.b64decode(text, validate=True), numpy_dtype(name))
    value = flat.reshape([integer(extent) for extent in shape])
    return host_tensor(value) if kind in ("torch", "device") else value[()] if kind == "scalar" else value.copy()


def numpy_dtype(name: str) -> np.dtype[Any]:
    """The numpy dtype for torch's name in a manifest, e.g. 'bfloat16'.

    Raises:
        CheckpointError: torch has no dtype of this name, or the device does not support it.
    """
    if not isinstance(name, str) or name not in _DTYPES:  # pyright: ignore[reportUnnecessaryIsInstance]
        raise malformed(f"dtype {str(name)[:40]!r} is unknown")
    try:
        return to_numpy_dtype(_DTYPES[name])
    except SpmdError as error:
        raise malformed(f"the device does not support dtype {name!r}") from error


def dtype_name(dtype: Any) -> str:
    """Torch's name, as used in a manifest, for a numpy dtype."""
    return str(to_torch_dtype(dtype)).removeprefix("torch.")


def integer(value: Any) -> int:
    """Return `value` if it is a non-negative integer of 63 bits; else raise a CheckpointError."""
    if type(value) is not int or not 0 <= value < 2**63:
        raise malformed(f"{str(value)[:40]!r} is not a non-negative integer of 63 bits")
    return value


def malformed(what: str) -> CheckpointError:
    """The error for a manifest with invalid contents."""
    return CheckpointError(message("the manifest is malformed", what, fix="restore another step: `spmd ckpt ls PATH` shows them"))


__all__ = [
    "Node",
    "decode",
    "dtype_name",
    "encode",
    "inline",
    "integer",
    "is_array",
    "kind_of",
    "malformed",
    "numpy_dtype",
    "require_depth",
]
