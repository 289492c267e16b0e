"""Numbers beside tensors of 16-bit floats: torch's CPU rounds operands to 16 bits, except factors and divisors, and no other Scalars."""

import math
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

import spmd

OPERATIONS: dict[str, Callable[[torch.Tensor, float], torch.Tensor]] = {
    "+": lambda x, n: x + n,
    "-": lambda x, n: x - n,
    "n -": lambda x, n: n - x,
    "*": lambda x, n: x * n,
    "torch.mul": lambda x, n: torch.mul(n, x),
    "/": lambda x, n: x / n,
    "n /": lambda x, n: n / x,
    "//": lambda x, n: x // n,
    "n //": lambda x, n: n // x,
    "trunc": lambda x, n: torch.div(x, n, rounding_mode="trunc"),
    "%": lambda x, n: x % n,
    "n %": lambda x, n: n % x,
    "fmod": torch.fmod,
    "**": lambda x, n: x**n,
    "n **": lambda x, n: n**x,
    "<": lambda x, n: x / 3 * n < n,
    "clamp": lambda x, n: x.clamp(n),
    "_foreach_sub": lambda x, n: torch._foreach_sub([x], n)[0],
    "0-dim": lambda x, n: x - torch.tensor(n, device=x.device),
    "* 0-dim": lambda x, n: x * torch.tensor(n, device=x.device),
    "% 0-dim": lambda x, n: x % torch.tensor(n, device=x.device),
    "-= and %=": lambda x, n: in_place(x.clone(), n),
    "out=": lambda x, n: torch.sub(x, n, out=torch.empty_like(x)),
    "add(alpha)": lambda x, n: torch.add(x, x / 3, alpha=n),
    "sub_(alpha)": lambda x, n: x.clone().sub_(x / 3, alpha=n),
    "rsub(alpha)": lambda x, n: torch.rsub(x, x / 3, alpha=n),
    "_foreach_add(alpha)": lambda x, n: torch._foreach_add([x], [x / 3], alpha=n)[0],
    "index_add": lambda x, n: x.index_add(0, torch.arange(64, device=x.device), x / 3, alpha=n),
    "addcmul": lambda x, n: torch.addcmul(x, x / 3, x, value=n),
    "addcdiv": lambda x, n: torch.addcdiv(x, x / 3, x, value=n),
    "lerp": lambda x, n: torch.lerp(x, x * 2, n / 301),
    "leaky_relu": lambda x, n: F.leaky_relu(x - 3, n),
    "elu": lambda x, n: F.elu(x - 3, n),
    "softplus": F.softplus,
    "threshold": lambda x, n: F.threshold(x, n, n),
    "addmv": lambda x, n: torch.addmv(x[:2], x[:4].view(2, 2), x[:2], alpha=n, beta=n),
}


def in_place(x: torch.Tensor, n: float) -> torch.Tensor:
    x -= n
    x %= n
    return x


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_number_is_rounded_where_the_cpu_rounds_it(name: str, dtype: torch.dtype) -> None:
    fn = OPERATIONS[name]
    step = spmd.compile(fn)
    x = (torch.arange(64) % 17 + 1).to(dtype)  # few elements would be computed by the CPU's scalar code, which rounds more often
    for number in (300.7, 0.3, 7.77, 257):
        expected, found = fn(x, number), [run(x.to("jax"), number).cpu() for run in (fn, spmd.compile(lambda x, n=number: fn(x, n)), step)]
        assert all(torch.equal(other, expected) for other in found), (number, expected, found)


def test_a_number_too_large_for_16_bits_is_infinite() -> None:
    x = torch.tensor([math.inf, 1.0], dtype=torch.float16)
    assert (x.to("jax") - 70000).tolist()[1] == (x - 70000).tolist()[1] == -math.inf
    assert (x.to("jax") - 70000).isnan().tolist() == (x - 70000).isnan().tolist() == [True, False]
