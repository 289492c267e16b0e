"""Checks of arguments that users pass, before any work is done with them. All raise an `ArgumentTypeError` with a fix.

require_module(module, "fully_shard", "spmd.fully_shard(model.layers[0], mesh)")
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from spmd.base._errors import ArgumentTypeError, called_at, message, shown


def wrong_argument(what: str, fix: str) -> ArgumentTypeError:
    """The error for an argument of a wrong type, with the user's line.

    Args:
        what: what is wrong, with the value that was passed.
        fix: a call of the function as code.
    """
    return ArgumentTypeError(message(what, *called_at(), fix=fix))


def require_module(value: object, taker: str, fix: str) -> None:
    """Refuse anything but a module. `taker` is the name of the function."""
    if not isinstance(value, nn.Module):
        raise wrong_argument(f"{taker} takes a module, got {shown(value)}", fix)


def require_function(value: object, taker: str, fix: str) -> None:
    """Refuse what cannot be called."""
    if not callable(value):
        raise wrong_argument(f"{taker} takes a function, got {shown(value)}", fix)


def require_iterable(value: object, taker: str, fix: str) -> None:
    """Refuse anything but an iterable of batches."""
    if not (hasattr(value, "__iter__") or hasattr(value, "__getitem__")) or isinstance(value, type):
        raise wrong_argument(f"{taker} takes an iterable of batches, got {shown(value)}", fix)


def require_arguments(args: object, taker: str, fix: str) -> None:
    """Refuse anything but a tuple or list of arguments: a tensor would be taken apart, and of a dict only the keys be passed."""
    if not isinstance(args, tuple | list):
        got = f"a tensor of shape {tuple(args.shape)}" if isinstance(args, Tensor) else shown(args)
        raise wrong_argument(f"{taker} takes a tuple of arguments, got {got}", fix)


def require_options(options: Sequence[tuple[str, object]], taker: str) -> None:
    """Refuse options that are neither None nor can be called. Each is a pair of name and value."""
    for name, value in options:
        if value is not None and not callable(value):
            raise wrong_argument(f"{name} of {taker} must be a function or None, got {shown(value)}", f"{taker}(..., {name}=fn)")


def require_parameters(fn: Callable[..., Any], names: Sequence[str], title: str) -> None:
    """Refuse a function that does not take positional arguments of these names. `title`: what the function is."""
    try:
        inspect.signature(fn).bind(*names)
    except TypeError as error:
        listed = ", ".join(names)
        fix = f"{'lambda ' + listed + ': ...'}"
        raise wrong_argument(f"{title} is called with ({listed}), and takes {inspect.signature(fn)}", fix) from error
    except ValueError:  # a built-in function without a signature
        return


__all__ = [
    "require_arguments",
    "require_function",
    "require_iterable",
    "require_module",
    "require_options",
    "require_parameters",
    "wrong_argument",
]
