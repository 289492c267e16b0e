"""`torch_xla.experimental.assume_pure`: `spmd.assume_pure` with torch_xla's options, and as a module."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from spmd.base._errors import SpmdError, message
from spmd.device._random_stream import default_stream
from spmd.program.flow._pure import assume_pure as pure_function

# function -> result of `assume_pure_torch(use_cache=True)`
_XLA_COMPUTATION_CACHE: dict[Callable[..., Any], Callable[..., Any]] = {}


class NoSeedError(SpmdError, AssertionError):
    """A function that needs a seed was called without one."""


def assume_pure(fn: Callable[..., Any], *, add_rng_seed_argument: bool = False) -> Callable[..., Any]:
    """`spmd.assume_pure`.

    Args:
        fn: reads only its arguments and tensors that stay the same objects, and changes nothing.
        add_rng_seed_argument: the returned function takes `rng_seed=`, an int, which alone determines its random draws. The program's
            own random stream does not advance.
    """
    pure = pure_function(fn)
    if not add_rng_seed_argument:
        return pure

    @functools.wraps(fn)
    def seeded(*args: Any, rng_seed: Any = None, **kwargs: Any) -> Any:
        if rng_seed is None:
            raise NoSeedError(message(f"{getattr(fn, '__name__', 'the function')} needs a seed", fix="pass rng_seed=0"))
        before = default_stream.seed, default_stream.draws
        default_stream.seed, default_stream.draws = int(rng_seed), 0
        try:
            return pure(*args, **kwargs)
        finally:
            default_stream.seed, default_stream.draws = before

    return seeded


def assume_pure_torch(func: Callable[..., Any], use_cache: bool = False) -> Callable[..., Any]:
    """`assume_pure` without gradients. Call it only under `torch.no_grad()`.

    Args:
        func: as for `assume_pure`.
        use_cache: create the pure function only once per `func`.
    """
    assert not torch.is_grad_enabled(), "assume_pure_torch has no gradients\n  fix: with torch.no_grad(), or use assume_pure"
    if use_cache and func in _XLA_COMPUTATION_CACHE:
        return _XLA_COMPUTATION_CACHE[func]
    pure = pure_function(func)

    @functools.wraps(func)
    def without_gradients(*args: Any, **kwargs: Any) -> Any:
        with torch.no_grad():
            return pure(*args, **kwargs)

    if use_cache:
        _XLA_COMPUTATION_CACHE[func] = without_gradients
    return without_gradients


class PureModule(nn.Module):
    """A module whose forward pass is traced once per structure and shapes of its inputs; see `assume_pure`."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._module = module
        self._pure_forward = pure_function(functools.partial(_forward, module))

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        state = {**dict(self._module.named_parameters()), **dict(self._module.named_buffers())}
        return self._pure_forward(state, args, kwargs)


def _forward(module: nn.Module, state: dict[str, torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return torch.func.functional_call(module, state, args, kwargs)
