"""Random ops draw from the right distributions, repeat under a seed, and do not depend on how arrays are sharded."""

import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import spmd  # noqa: F401  (registers the device)
from spmd.device._storage import wrap

NUM = 20_000
Cdf = Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]


def _normal_cdf(mean: float, std: float) -> Cdf:
    return lambda x: 0.5 * (1 + np.vectorize(math.erf)((x - mean) / std / math.sqrt(2)))


CONTINUOUS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], Cdf]] = {
    "normal_": (lambda x: x.normal_(1.0, 2.0), _normal_cdf(1, 2)),
    "randn_like": (torch.randn_like, _normal_cdf(0, 1)),
    "randn": (lambda x: torch.randn(x.shape, device=x.device), _normal_cdf(0, 1)),
    "normal of tensors": (lambda x: torch.normal(x + 3, torch.full_like(x, 0.5)), _normal_cdf(3, 0.5)),
    "uniform_": (lambda x: x.uniform_(-1, 3), lambda x: (x + 1) / 4),
    "rand": (lambda x: torch.rand(x.shape, device=x.device), lambda x: x),
    "exponential_": (lambda x: x.exponential_(2.0), lambda x: 1 - np.exp(-2 * x)),
    "cauchy_": (lambda x: x.cauchy_(1.0, 2.0), lambda x: 0.5 + np.arctan((x - 1) / 2) / np.pi),
    "log_normal_": (lambda x: x.log_normal_(0.5, 0.7), lambda x: _normal_cdf(0.5, 0.7)(np.log(x))),
    "trunc_normal_": (lambda x: torch.nn.init.trunc_normal_(x, a=-50, b=50), _normal_cdf(0, 1)),
    "kaiming_uniform_": (
        lambda x: torch.nn.init.kaiming_uniform_(x.view(100, -1), nonlinearity="linear"),
        lambda x: 0.5 + x / 2 / math.sqrt(3 / (NUM / 100)),
    ),
}


@pytest.mark.parametrize("name", CONTINUOUS)
def test_continuous_draws_pass_kolmogorov_smirnov(name: str) -> None:
    draw, cdf = CONTINUOUS[name]
    torch.manual_seed(1)
    drawn = np.sort(draw(torch.zeros(NUM, device="jax")).cpu().numpy().reshape(-1).astype(np.float64))
    steps = np.arange(NUM) / NUM
    distance = max(np.abs(cdf(drawn) - steps).max(), np.abs(cdf(drawn) - steps - 1 / NUM).max())
    assert distance < 1.63 / math.sqrt(NUM)  # the 1 % level


DISCRETE: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], float, float]] = {
    "bernoulli_": (lambda x: x.bernoulli_(0.3), 0.3, 0.21),
    "bernoulli of probabilities": (lambda x: torch.bernoulli(x + 0.3), 0.3, 0.21),
    "bernoulli_ of a tensor": (lambda x: x.bernoulli_(torch.full_like(x, 0.8)), 0.8, 0.16),
    "random_": (lambda x: x.random_(2, 8), 4.5, 35 / 12),
    "randint": (lambda x: torch.randint(-3, 3, x.shape, device=x.device).double(), -0.5, 35 / 12),
    "randint_like": (lambda x: torch.randint_like(x, 6), 2.5, 35 / 12),
    "geometric_": (lambda x: x.geometric_(0.25), 4.0, 12.0),
    "poisson": (lambda x: torch.poisson(x + 2.5), 2.5, 2.5),
    "binomial": (lambda x: torch.binomial(x + 10, torch.full_like(x, 0.3)), 3.0, 2.1),
    "standard gamma": (lambda x: torch._standard_gamma(x + 3), 3.0, 3.0),
    "dropout": (lambda x: F.dropout(x + 1, 0.25), 1.0, 1 / 3),
    "alpha_dropout": (lambda x: F.alpha_dropout(torch.randn_like(x), 0.2, True), 0.0, 1.0),
    "rrelu": (lambda x: F.rrelu(x - 1, 0.2, 0.6, True), -0.4, 0.16 / 12),
    "multinomial": (lambda x: torch.multinomial(WEIGHTS.to(x.device), NUM, True).double(), 1.7, 0.61),
}
WEIGHTS = torch.tensor([0.1, 0.2, 0.6, 0.1])


@pytest.mark.parametrize("name", DISCRETE)
def test_draws_have_the_right_mean_and_variance(name: str) -> None:
    draw, mean, variance = DISCRETE[name]
    torch.manual_seed(1)
    drawn = draw(torch.zeros(NUM, device="jax")).cpu().double()
    assert abs(drawn.mean().item() - mean) < 4 * math.sqrt(variance / NUM)
    assert abs(drawn.var().item() - variance) < 0.06 * variance


def test_integers_reach_both_ends_of_their_range() -> None:
    assert set(torch.randint(0, 4, (200,), device="jax").tolist()) == {0, 1, 2, 3}
    assert set(torch.empty(300, dtype=torch.int8, device="jax").random_().tolist()) <= set(range(128))
    wide = torch.empty(100, dtype=torch.int64, device="jax").random_()
    assert wide.min() >= 0 and wide.max() > 2**60
    full = torch.randint(-(2**63), 2**63 - 1, (100,), device="jax")
    assert full.min() < -(2**60) and full.max() > 2**60


def test_permutation_holds_every_index_once() -> None:
    drawn = torch.randperm(50, device="jax").cpu()
    assert drawn.dtype == torch.int64
    assert torch.equal(drawn.sort().values, torch.arange(50)) and not torch.equal(drawn, torch.arange(50))


def test_multinomial_without_replacement_never_repeats_nor_takes_weight_zero() -> None:
    weights = torch.tensor([[0.1, 0.0, 3.0, 0.5, 1.0]] * 200).to("jax")
    drawn = torch.multinomial(weights, 4).cpu()
    assert torch.equal(drawn.sort(1).values, torch.tensor([[0, 2, 3, 4]] * 200))
    assert (drawn[:, 0] == 2).double().mean() > 0.5  # the heaviest comes first more often than not


def test_feature_dropout_takes_whole_channels() -> None:
    x = torch.ones(8, 16, 5, 5, device="jax")
    out = F.dropout2d(x, 0.5).cpu()
    per_channel = out.flatten(2)
    assert (per_channel == per_channel[:, :, :1]).all()
    assert set(out.unique().tolist()) == {0.0, 2.0}


def test_rrelu_keeps_its_slopes_for_the_backward() -> None:
    x = torch.linspace(-2, 2, 64).to("jax").requires_grad_()
    out = F.rrelu(x, 0.1, 0.9, True)
    (grad,) = torch.autograd.grad(out.sum(), x)
    torch.testing.assert_close((x * grad).detach().cpu(), out.detach().cpu())


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "normal_": lambda x: x.normal_(),
    "uniform_": lambda x: x.uniform_(),
    "bernoulli_": lambda x: x.bernoulli_(0.5),
    "randint_like": lambda x: torch.randint_like(x, 1000),
    "dropout": lambda x: F.dropout(x + 1, 0.5),
    "exponential_": lambda x: x.exponential_(),
    "rrelu": lambda x: F.rrelu(x - 1, 0.1, 0.9, True),
    "multinomial": lambda x: torch.multinomial(x + 1, 3),
}


@pytest.mark.parametrize("name", DRAWS)
def test_a_seed_repeats_and_the_next_draw_differs(name: str) -> None:
    torch.manual_seed(7)
    first, second = (DRAWS[name](torch.zeros(16, 16, device="jax")).cpu() for _ in range(2))
    torch.manual_seed(7)
    again = DRAWS[name](torch.zeros(16, 16, device="jax")).cpu()
    assert torch.equal(first, again) and not torch.equal(first, second)


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("name", DRAWS)
def test_draws_do_not_depend_on_the_sharding(name: str) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    drawn = []
    for spec in ((), ("a", "b"), (("a", "b"), None)):
        torch.manual_seed(7)
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec))
        drawn.append(DRAWS[name](wrap(jax.device_put(np.zeros((16, 16), np.float32), sharding))).cpu())
    assert torch.equal(drawn[0], drawn[1]) and torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_draws_keep_the_dtype(dtype: torch.dtype) -> None:
    x = torch.zeros(1000, device="jax", dtype=dtype)
    for drawn in (x.normal_(), x.uniform_(), x.exponential_(), x.bernoulli_(0.5), torch.randn_like(x), F.dropout(x, 0.5)):
        assert drawn.dtype == dtype
        assert torch.isfinite(drawn).all()


@pytest.mark.parametrize(
    "evaluate",
    [
        lambda x: F.dropout(x, 0.5, training=False),
        lambda x: F.dropout(x, 0.0),
        lambda x: F.alpha_dropout(x, 0.5, training=False),
        lambda x: F.rrelu(x),
        lambda x: F.scaled_dot_product_attention(x, x, x),
        lambda x: torch.nn.LSTM(8, 8, 2, dropout=0.5).to("jax").eval()(x)[0],
    ],
)
def test_what_draws_nothing_leaves_the_stream_where_it_was(evaluate: Any) -> None:
    x = torch.ones(4, 8, 8).to("jax").requires_grad_()
    before = torch.jax.get_rng_state()
    evaluate(x).sum().backward()
    assert torch.equal(torch.jax.get_rng_state(), before)
    F.dropout(x, 0.5)
    assert not torch.equal(torch.jax.get_rng_state(), before)
