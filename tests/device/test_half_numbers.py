"""Numbers beside tensors of 16-bit floats. torch's CPU rounds them to 16 bits, except where it multiplies or divides by them."""

import math
from collections.abc import Callable

import pytest
import torch

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
    "float_power": torch.float_power,
    "_foreach_sub": lambda x, n: torch._foreach_sub([x], n)[0],
    "0-dim": lambda x, n: x - torch.tensor(n, device=x.device),
    "* 0-dim": lambda x, n: x * torch.tensor(n, device=x.device),
    "% 0-dim": lambda x, n: x % torch.tensor(n, device=x.device),
}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_a_number_is_rounded_where_the_cpu_rounds_it(name: str, dtype: torch.dtype) -> None:
    fn = OPERATIONS[name]
    step = spmd.compile(fn)
    x = torch.tensor([3, 1, 2, 5, 4], dtype=dtype)
    for number in (300.7, 0.3, 7.77, 257):
        expected, found = fn(x, number), [run(x.to("jax"), number).cpu() for run in (fn, spmd.compile(lambda x, n=number: fn(x, n)), step)]
        assert all(torch.equal(other, expected) for other in found), (number, expected, found)


def test_a_number_too_large_for_16_bits_is_infinite() -> None:
    x = torch.tensor([math.inf, 1.0], dtype=torch.float16)
    assert (x.to("jax") - 70000).tolist()[1] == (x - 70000).tolist()[1] == -math.inf
    assert (x.to("jax") - 70000).isnan().tolist() == (x - 70000).isnan().tolist() == [True, False]
