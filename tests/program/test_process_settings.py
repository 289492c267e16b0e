"""Settings of the whole process: what a compiled function does depends on them as in Python, and what it sets, every call sets."""

import decimal
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

import spmd

TENSOR, ARRAY = torch.tensor([1.23456789]), np.array([1.23456789])


def warned() -> float:
    try:
        warnings.warn("of a test", FutureWarning, stacklevel=1)
    except FutureWarning:
        return 2.0
    return 1.0


def divided() -> float:
    try:
        return float(np.float64(1) / np.float64(0) > 0)
    except FloatingPointError:
        return 2.0


# what depends on a setting, and what changes that
READS: dict[str, tuple[Callable[[], float], Callable[[], Any]]] = {
    "decimals": (lambda: float(decimal.Decimal(1) / 3), lambda: setattr(decimal.getcontext(), "prec", 3)),
    "their context": (lambda: float(decimal.getcontext().prec), lambda: setattr(decimal.getcontext(), "prec", 4)),
    "a tensor's text": (lambda: float(len(f"{TENSOR}")), lambda: torch.set_printoptions(precision=6)),
    "in a list": (lambda: float(len(str([TENSOR]))), lambda: torch.set_printoptions(precision=7)),
    "with %": (lambda: float(len("%s" % TENSOR)), lambda: torch.set_printoptions(precision=8)),  # noqa: UP031
    "an array's text": (lambda: float(len(repr(ARRAY))), lambda: np.set_printoptions(precision=3)),
    "by numpy": (lambda: float(len(np.array2string(ARRAY))), lambda: np.set_printoptions(precision=4)),
    "a warning": (warned, lambda: warnings.simplefilter("error", FutureWarning)),
    "a division": (divided, lambda: np.seterr(divide="raise")),
    "digits": (lambda: float(sys.get_int_max_str_digits()), lambda: sys.set_int_max_str_digits(5000)),
    "a library's own": (
        lambda: float(torch.backends.cuda.matmul.allow_tf32),
        lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
    ),
}


@pytest.fixture
def settings() -> Iterator[None]:
    tf32, digits, limit = torch.backends.cuda.matmul.allow_tf32, sys.get_int_max_str_digits(), sys.getrecursionlimit()
    with decimal.localcontext(), np.errstate(divide="ignore"), np.printoptions(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            yield
        finally:
            torch.set_printoptions(profile="default")
            sys.set_int_max_str_digits(digits)
            sys.setrecursionlimit(limit)
            torch.backends.cuda.matmul.allow_tf32 = tf32


def test_what_depends_on_a_setting_sees_its_change(settings: None) -> None:
    def read(x: torch.Tensor) -> torch.Tensor:
        return torch.stack([x * read() for read, _ in READS.values()])

    step, x = spmd.compile(read, max_retraces=30), torch.ones(())
    for _, change in [*READS.values()]:
        torch.testing.assert_close(step(x.to("jax")).cpu(), read(x))
        change()
        torch.testing.assert_close(step(x.to("jax")).cpu(), read(x))
    num_traces = step.num_traces
    step(x.to("jax"))
    assert step.num_traces == num_traces <= len(READS) + 1


def set_all() -> None:
    decimal.getcontext().prec = 5
    torch.set_printoptions(precision=5)
    np.set_printoptions(precision=5)
    np.seterr(divide="raise")
    warnings.simplefilter("error", FutureWarning)
    sys.setrecursionlimit(4321)
    torch.backends.cuda.matmul.allow_tf32 = True


def seen() -> list[Any]:
    found = decimal.getcontext().prec, len(str(TENSOR)), np.get_printoptions()["precision"], np.geterr()["divide"]
    return [*found, warnings.filters[0][0], sys.getrecursionlimit(), torch.backends.cuda.matmul.allow_tf32]


def test_what_the_function_sets_every_call_sets(settings: None) -> None:
    limit, before = sys.getrecursionlimit(), seen()

    def set_and_double(x: torch.Tensor) -> torch.Tensor:
        set_all()
        return x * 2

    step = spmd.compile(set_and_double)
    step.prepare(torch.ones(2, device="jax"))
    assert seen() == before
    for _ in range(3):
        with decimal.localcontext(), np.errstate(), np.printoptions(), warnings.catch_warnings():
            step(torch.ones(2, device="jax"))
            assert seen() == [5, 17, 5, "raise", "error", 4321, True]
        torch.set_printoptions(profile="default")
        sys.setrecursionlimit(limit)
        torch.backends.cuda.matmul.allow_tf32 = False
