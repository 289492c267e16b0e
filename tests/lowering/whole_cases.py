"""One or more calls of every operator that is kept whole, for the tests that go through all of them.

case = CASES["linear"]
case.op(*case.args())            # fresh CPU tensors: floating ones are leaves that require grad
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from spmd.lowering._registry import lowerings, resolve

Make = Callable[[Callable[..., torch.Tensor]], tuple[Any, ...]]


@dataclass(frozen=True)
class Case:
    """One call of `op`.

    Attributes:
        make: positional arguments, from a function that makes normal numbers of a shape; the same ones each time.
        by_name: keyword arguments.
        is_random: its values are drawn.
    """

    op: torch._ops.OpOverload
    make: Make
    by_name: dict[str, Any]
    is_random: bool

    def args(self, dtype: torch.dtype = torch.float32) -> tuple[Any, ...]:
        """The arguments, floating tensors in `dtype`."""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_(dtype.is_floating_point)

        return self.make(normal)

    def __call__(self, *args: Any) -> Any:
        """Call it."""
        return self.op(*args, **self.by_name)


_RNN_FLAGS = (True, 1, 0.0, False, False)  # biases, layers, dropout, train, both ways
BATCH_SIZES = torch.tensor([2, 2, 1])  # of a packed sequence: on the host, whatever the device
_CLASSES, _MANY = torch.tensor([2, 0, 3]), torch.tensor([[1, 0], [3, 2], [0, 0]])


def _weights(n: Any, gates: int) -> list[torch.Tensor]:
    return [n(gates * 3, 4), n(gates * 3, 3), n(gates * 3), n(gates * 3)]


def _log_probs(n: Any) -> torch.Tensor:
    return n(6, 2, 4).detach().log_softmax(-1).requires_grad_()


def _tables() -> dict[str, Make | tuple[Make, dict[str, Any]]]:
    made: dict[str, Make | tuple[Make, dict[str, Any]]] = {
        "linear": lambda n: (n(3, 4), n(5, 4), n(5)),
        "linear without bias": lambda n: (n(2, 3, 4), n(5, 4)),
        "matmul": lambda n: (n(2, 3, 4), n(4, 5)),
        "matmul of vectors": lambda n: (n(4), n(4)),
        "matmul batched": lambda n: (n(2, 1, 3, 4), n(2, 4, 5)),
        "einsum": lambda n: ("bij,bjk->bik", [n(2, 3, 4), n(2, 4, 5)]),
        "einsum outer": lambda n: ("i,j->ij", [n(3), n(4)]),
        "silu_backward": lambda n: (n(3, 4), n(3, 4)),
        "mish_backward": lambda n: (n(3, 4), n(3, 4)),
        "instance_norm": lambda n: (n(2, 3, 5), n(3), n(3), None, None, True, 0.1, 1e-5, False),
        "instance_norm plain": lambda n: (n(2, 3, 5), None, None, None, None, True, 0.1, 1e-5, False),
        "layer_norm": lambda n: (n(3, 4), [4], n(4), n(4)),
        "layer_norm plain": lambda n: (n(3, 4), [4]),
        "rms_norm": lambda n: (n(3, 4), [4], n(4)),
        "rms_norm plain": lambda n: (n(3, 4), [4]),
        "_fused_rms_norm": lambda n: (n(3, 4), [4], n(4), 1e-5),
        "_weight_norm": lambda n: (n(3, 4), n(3, 1)),
        "softmax.int": lambda n: (n(3, 4), -1),
        "special_softmax": lambda n: (n(3, 4), -1),
        "log_softmax.int": lambda n: (n(3, 4), 0),
        "log_softmax.int to float64": lambda n: (n(3, 4), 0, torch.float64),
        "special_log_softmax": (lambda n: (n(3, 4), 0), {"dtype": None}),
        "scaled_dot_product_attention": lambda n: (n(2, 2, 3, 4), n(2, 2, 5, 4), n(2, 2, 5, 4)),
        "scaled_dot_product_attention causal": lambda n: (n(2, 3, 4), n(2, 3, 4), n(2, 3, 4), None, 0.0, True),
        "scaled_dot_product_attention with a bias": lambda n: (n(2, 2, 3, 4), n(2, 2, 5, 4), n(2, 2, 5, 4), n(3, 5)),
        "_scaled_dot_product_attention_math": lambda n: (n(2, 2, 3, 4), n(2, 2, 5, 4), n(2, 2, 5, 4)),
        "conj_physical": lambda n: (n(3, 4),),
        "ctc_loss.IntList": lambda n: (_log_probs(n), torch.tensor([[1, 2], [3, 1]]), [6, 5], [2, 1]),
        "ctc_loss.Tensor": lambda n: (_log_probs(n), torch.tensor([[1, 2], [3, 1]]), torch.tensor([6, 5]), torch.tensor([2, 1])),
        "cross_entropy_loss": lambda n: (n(3, 4), _CLASSES),
        "cross_entropy_loss weighted": lambda n: (n(3, 4), _CLASSES, n(4).detach().abs(), 2, 0, 0.1),
        "cross_entropy_loss of probabilities": lambda n: (n(3, 4), n(3, 4), None, 1),
        "nll_loss_nd": lambda n: (n(3, 4), _CLASSES),
        "nll_loss": lambda n: (n(3, 4), _CLASSES, n(4).detach().abs(), 0),
        "nll_loss2d": lambda n: (n(3, 4, 2, 1), _MANY[:, :, None]),
        "argsort.stable": (lambda n: (n(3, 4),), {"stable": True}),
    }
    for name, gates, num_states in (("lstm", 4, 2), ("gru", 3, 1), ("rnn_tanh", 1, 1), ("rnn_relu", 1, 1)):

        def states(n: Any, *lead: int, count: int = num_states) -> Any:
            return [n(*lead, 3) for _ in range(count)] if count > 1 else n(*lead, 3)

        made[f"{name}.input"] = lambda n, g=gates, s=states: (n(3, 2, 4), s(n, 1, 2), _weights(n, g), *_RNN_FLAGS, False)
        made[f"{name}.data"] = lambda n, g=gates, s=states: (n(5, 4), BATCH_SIZES, s(n, 1, 2), _weights(n, g), *_RNN_FLAGS)
        made[f"{name}_cell"] = lambda n, g=gates, s=states: (n(2, 4), s(n, 2), *_weights(n, g))
    for name in ("dropout", "feature_dropout", "alpha_dropout", "feature_alpha_dropout"):
        made[f"{name} drawn"] = lambda n: (n(3, 4, 2), 0.5, True)
        made[f"{name} switched off"] = lambda n: (n(3, 4, 2), 0.5, False)
    return made


def _cases() -> dict[str, Case]:
    found: dict[str, Case] = {}
    for name, entry in _tables().items():
        make, by_name = entry if isinstance(entry, tuple) else (entry, {})
        found[name] = Case(resolve(name.split()[0]), make, by_name, name.endswith(" drawn"))
    return found


CASES = _cases()


@functools.cache
def whole_ops() -> frozenset[torch._ops.OpOverload]:
    """The operators of torch's that the registry keeps whole (other tests register more)."""
    return frozenset(op for op, lowering in lowerings().items() if lowering.whole and op.namespace == "aten")
