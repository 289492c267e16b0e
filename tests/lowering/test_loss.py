"""Losses equal the CPU's in value and gradient, for every reduction, weight and option."""

from typing import Any

import jax
import pytest
import torch
import torch.nn.functional as F

import spmd
from spmd.device._storage import load, wrap
from tests.lowering.against_cpu import check, normal
from tests.oracle import assert_same

N, C = 6, 5
CLASSES = torch.tensor([0, 4, 2, 2, 1, 3])
SOME_IGNORED = torch.tensor([0, -100, 2, 2, -100, 3])
WEIGHT = torch.tensor([0.5, 1.0, 2.0, 0.1, 1.5])
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weighted": {"weight": WEIGHT},
    "smoothed": {"label_smoothing": 0.2},
    "weighted and smoothed": {"weight": WEIGHT, "label_smoothing": 0.2},
}


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("target", ["classes", "ignored", "probabilities"])
def test_cross_entropy_equals_cpu(target: str, options: str, reduction: str) -> None:
    targets = {"classes": CLASSES, "ignored": SOME_IGNORED, "probabilities": normal(N, C, seed=1, grad=False).softmax(1)}
    check(F.cross_entropy, normal(N, C), targets[target], reduction=reduction, **OPTIONS[options])


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("shape", [(C,), (N, C), (2, C, 3), (2, C, 3, 1)], ids=str)
def test_nll_loss_of_any_rank_equals_cpu(shape: tuple[int, ...], reduction: str) -> None:
    target = CLASSES[:1].reshape(()) if len(shape) == 1 else CLASSES.reshape(shape[0], *shape[2:])
    check(F.nll_loss, normal(*shape), target, WEIGHT, reduction=reduction, ignore_index=2)


def test_mean_over_no_sample_is_nan_as_on_cpu() -> None:
    check(F.cross_entropy, normal(2, C), torch.tensor([-100, -100]))


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.2}], ids=["plain", "smoothed"])
@pytest.mark.parametrize("shape", [(0, 0), (0, C), (N, 0)], ids=str)
def test_losses_without_samples_or_classes_equal_cpu(shape: tuple[int, int], options: dict[str, Any], reduction: str) -> None:
    check(F.cross_entropy, normal(*shape), normal(*shape, seed=1, grad=False), reduction=reduction, **options)  # probabilities
    if shape[0] == 0 and (shape[1] or not options):
        check(F.cross_entropy, normal(*shape), CLASSES[:0], reduction=reduction, **options)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
def test_cross_entropy_keeps_its_dtype(dtype: torch.dtype) -> None:
    check(F.cross_entropy, normal(N, C, dtype=dtype), CLASSES)


@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
def test_cross_entropy_gathers_nothing(backward: bool) -> None:
    """A gather along a sharded vocabulary would collect it on every device."""

    def loss(logits: Any, target: Any) -> Any:
        x = wrap(logits)
        if not backward:
            return load(F.cross_entropy(x, wrap(target)))
        x.requires_grad_()
        with torch.autograd.set_multithreading_enabled(False):
            return load(torch.autograd.grad(F.cross_entropy(x, wrap(target)), x)[0])

    with jax.enable_x64(True):
        program = str(jax.make_jaxpr(loss)(load(normal(N, C, grad=False).to("jax")), load(CLASSES.to("jax"))))
    assert "gather" not in program and "scatter" not in program


SIGN = torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, -1.0])
POSITIVE = normal(N, C, seed=1, grad=False).abs() + 0.1
UNIT = normal(N, C, seed=1, grad=False).sigmoid()
LOSSES: dict[str, Any] = {
    "mse_loss": lambda x, r: F.mse_loss(x, POSITIVE.to(x.device), reduction=r),
    "l1_loss": lambda x, r: F.l1_loss(x, POSITIVE.to(x.device), reduction=r),
    "smooth_l1_loss": lambda x, r: F.smooth_l1_loss(x, POSITIVE.to(x.device), reduction=r, beta=0.5),
    "huber_loss": lambda x, r: F.huber_loss(x, POSITIVE.to(x.device), reduction=r, delta=0.5),
    "soft_margin_loss": lambda x, r: F.soft_margin_loss(x, SIGN[:, None].expand(N, C).to(x.device), reduction=r),
    "binary_cross_entropy": lambda x, r: F.binary_cross_entropy(x.sigmoid(), UNIT.to(x.device), reduction=r),
    "with_logits": lambda x, r: F.binary_cross_entropy_with_logits(
        x, UNIT.to(x.device), WEIGHT.to(x.device), reduction=r, pos_weight=POSITIVE[0].to(x.device)
    ),
    "kl_div": lambda x, r: F.kl_div(x.log_softmax(1), UNIT.to(x.device), reduction=r),
    "poisson_nll_loss": lambda x, r: F.poisson_nll_loss(x, POSITIVE.to(x.device), reduction=r, full=True),
    "gaussian_nll_loss": lambda x, r: F.gaussian_nll_loss(x, UNIT.to(x.device), POSITIVE.to(x.device), reduction=r),
    "hinge_embedding_loss": lambda x, r: F.hinge_embedding_loss(x[:, 0], SIGN.to(x.device), reduction=r),
    "margin_ranking_loss": lambda x, r: F.margin_ranking_loss(x[:, 0], x[:, 1], SIGN.to(x.device), 0.3, reduction=r),
    "cosine_embedding_loss": lambda x, r: F.cosine_embedding_loss(x, UNIT.to(x.device), SIGN.to(x.device), 0.1, reduction=r),
    "triplet_margin_loss": lambda x, r: F.triplet_margin_loss(x, UNIT.to(x.device), POSITIVE.to(x.device), reduction=r),
    "multi_margin_loss": lambda x, r: F.multi_margin_loss(x, CLASSES.to(x.device), 2, weight=WEIGHT.to(x.device), reduction=r),
    "multilabel_margin_loss": lambda x, r: F.multilabel_margin_loss(x, torch.tensor([[1, 3, -1, 0, 0]] * N).to(x.device), reduction=r),
    "multilabel_soft_margin_loss": lambda x, r: F.multilabel_soft_margin_loss(x, UNIT.to(x.device), reduction=r),
}


@pytest.mark.filterwarnings("ignore:reduction. 'mean' divides:UserWarning")  # torch's remark on kl_div
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("name", LOSSES)
def test_loss_equals_cpu(name: str, reduction: str) -> None:
    check(LOSSES[name], normal(N, C), reduction)


@pytest.mark.parametrize("concatenated", [False, True], ids=["padded targets", "concatenated targets"])
@pytest.mark.parametrize("on_device", [False, True], ids=["lengths known", "lengths on the device"])
@pytest.mark.parametrize("reduction", ["none", "mean"])
def test_ctc_loss_and_torchs_own_gradient_equal_cpu(reduction: str, on_device: bool, concatenated: bool) -> None:
    targets, lengths, inputs = torch.tensor([[1, 2, 2], [3, 1, 0]]), (3, 2), (8, 6)
    flat = torch.cat([t[:n] for t, n in zip(targets, lengths, strict=True)]) if concatenated else targets
    given = (torch.tensor(inputs), torch.tensor(lengths)) if on_device else (inputs, lengths)
    check(F.ctc_loss, normal(8, 2, 4).log_softmax(2).detach().requires_grad_(), flat, *given, reduction=reduction)


@pytest.mark.parametrize("zero_infinity", [False, True])
@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_one_impossible_target_of_a_batch_has_the_cpus_gradient(dtype: torch.dtype, reduction: str, zero_infinity: bool) -> None:
    targets = torch.tensor([[1, 1, 1], [1, 2, 3], [2, 0, 0]])
    log_probs = normal(4, 3, 4, dtype=dtype).log_softmax(2).detach().requires_grad_()
    for inputs, lengths in (((3, 4, 4), (3, 3, 1)), ((4, 2, 0), (3, 3, 0))):
        check(F.ctc_loss, log_probs, targets, inputs, lengths, reduction=reduction, zero_infinity=zero_infinity)


def test_impossible_ctc_loss_counts_zero_where_asked() -> None:
    log_probs = normal(2, 1, 4).log_softmax(2).detach().requires_grad_()
    check(F.ctc_loss, log_probs, torch.tensor([[1, 2, 3]]), (2,), (3,), zero_infinity=True)


def test_numbers_that_torch_ignores_or_refuses() -> None:
    x = torch.linspace(-1, 1, 12).view(3, 4)
    labels, shares = torch.tensor([0, 3, 1]), torch.linspace(1, 2, 12).view(3, 4).softmax(1)
    for target in (labels, shares):
        for smoothing in (-0.1, float("nan")):
            expected = F.cross_entropy(x, target, label_smoothing=smoothing)
            assert_same(F.cross_entropy(x.to("jax"), target.to("jax"), label_smoothing=smoothing), expected)
    with pytest.raises(RuntimeError, match="does not support negative values for beta"):
        F.smooth_l1_loss(x.to("jax"), x.to("jax"), beta=-1.0)
    with pytest.raises(ValueError, match="must either both be None or neither be None"):
        F.batch_norm(x.to("jax"), torch.zeros(4, device="jax"), None, training=True)


_INDICES, _SHARES = torch.tensor([0, 1, 3]), torch.rand(3, 4, generator=torch.Generator().manual_seed(1))
WEIGHTED: dict[str, Any] = {
    "indices": lambda x, w: F.cross_entropy(x, _INDICES.to(x.device), w),
    "smoothed": lambda x, w: F.cross_entropy(x, _INDICES.to(x.device), w, label_smoothing=0.1),
    "probabilities": lambda x, w: F.cross_entropy(x, _SHARES.to(x.device), w),
    "smoothed probabilities": lambda x, w: F.cross_entropy(x, _SHARES.to(x.device), w, label_smoothing=0.2),
    "nll_loss": lambda x, w: F.nll_loss(x.log_softmax(1), _INDICES.to(x.device), w),
    "nll_loss2d": lambda x, w: F.nll_loss(x.log_softmax(1)[..., None, None], _INDICES.to(x.device)[:, None, None], w),
}


@pytest.mark.parametrize("name", list(WEIGHTED))
@pytest.mark.parametrize("compiled", [False, True])
def test_class_weights_have_the_gradient_or_the_error_of_the_cpu(name: str, compiled: bool) -> None:
    def step(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
        with torch.no_grad():
            WEIGHTED[name](x, weight)
        loss = WEIGHTED[name](x, weight)
        return (loss.detach(), *torch.autograd.grad(loss, [x, weight]))

    x, weight = torch.linspace(-1, 1, 12).reshape(3, 4), torch.arange(1.0, 5.0)
    run = spmd.compile(step) if compiled else step
    if "probabilities" not in name:
        for call, device in ((step, "cpu"), (run, "jax")):
            with pytest.raises(RuntimeError, match="not differentiable with respect to argument 'weight'"):
                call(x.to(device), weight.to(device))
        return
    for ours, theirs in zip(run(x.to("jax"), weight.to("jax")), step(x, weight), strict=True):
        torch.testing.assert_close(ours.cpu(), theirs)
