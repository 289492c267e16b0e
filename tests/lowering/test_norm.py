"""Normalisations equal the CPU's in value, dtype, gradient and running statistics."""

import copy

import pytest
import torch
import torch.nn.functional as F

from tests.lowering.against_cpu import assert_equal, assert_same_gradients, check, normal, on_jax

DTYPES = (torch.float32, torch.float64, torch.bfloat16)
NORMS = {
    "layer_norm": lambda x: F.layer_norm(x, x.shape[-2:]),
    "group_norm": lambda x: F.group_norm(x, 2),
    "instance_norm": F.instance_norm,
    "rms_norm": lambda x: F.rms_norm(x, x.shape[-1:]),
    "batch_norm": lambda x: F.batch_norm(x, None, None, training=True),
    "local_response_norm": lambda x: F.local_response_norm(x, 2),
    "normalize": lambda x: F.normalize(x, dim=1),
    "softmax": lambda x: F.softmax(x, 1),
    "log_softmax": lambda x: F.log_softmax(x, -1),
    "softmax of another dtype": lambda x: F.softmax(x, 1, dtype=torch.float64),
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", NORMS)
def test_norm_equals_cpu(name: str, dtype: torch.dtype) -> None:
    check(NORMS[name], normal(3, 4, 5, dtype=dtype))


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, w, b: F.layer_norm(x, (5,), w[:5], b[:5]),
        lambda x, w, b: F.group_norm(x, 2, w[:4], b[:4]),
        lambda x, w, b: F.instance_norm(x, weight=w[:4], bias=b[:4]),
        lambda x, w, b: F.rms_norm(x, (5,), w[:5]),
        lambda x, w, b: torch.native_layer_norm(x, (5,), w[:5], b[:5], 1e-3),
        lambda x, w, b: torch._weight_norm(x, w[:4].reshape(1, 4, 1), 1),
    ],
    ids=["layer_norm", "group_norm", "instance_norm", "rms_norm", "native_layer_norm", "weight_norm"],
)
def test_weight_and_bias_get_their_gradients(norm: object) -> None:
    check(norm, normal(3, 4, 5), normal(6, seed=1), normal(6, seed=2))  # pyright: ignore[reportArgumentType]


MODULES = {
    "BatchNorm1d": (torch.nn.BatchNorm1d(4), (6, 4)),
    "BatchNorm2d": (torch.nn.BatchNorm2d(4, momentum=0.3), (2, 4, 3, 3)),
    "BatchNorm3d without affine": (torch.nn.BatchNorm3d(4, affine=False), (2, 4, 2, 2, 2)),
    "BatchNorm2d without statistics": (torch.nn.BatchNorm2d(4, track_running_stats=False), (2, 4, 3, 3)),
    "InstanceNorm1d with statistics": (torch.nn.InstanceNorm1d(4, track_running_stats=True, affine=True), (3, 4, 5)),
}


@pytest.mark.parametrize("name", MODULES)
def test_running_statistics_follow_training_and_serve_evaluation(name: str) -> None:
    prototype, shape = MODULES[name]
    cpu = copy.deepcopy(prototype)
    device = copy.deepcopy(prototype).to("jax")
    for step in range(3):
        cpu.train(step < 2), device.train(step < 2)
        x = normal(*shape, seed=step)
        x_jax = on_jax(x)
        expected, actual = cpu(x * 2 + 1), device(x_jax * 2 + 1)
        assert_equal(actual, expected)
        assert_same_gradients((actual, x_jax, list(device.parameters())), (expected, x, list(cpu.parameters())))
        assert_equal(list(device.buffers()), list(cpu.buffers()))


def test_16_bit_batch_norm_keeps_float32_statistics() -> None:
    device = torch.nn.BatchNorm1d(4).to("jax")
    out = device(normal(64, 4).to("jax", torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert device.running_mean is not None and device.running_mean.dtype == torch.float32
    reference = torch.nn.BatchNorm1d(4)
    reference(normal(64, 4).bfloat16().float())
    assert torch.equal(device.running_mean.cpu(), reference.running_mean)


@pytest.mark.parametrize("kind", [torch.nn.BatchNorm1d, torch.nn.InstanceNorm1d])
def test_a_norm_in_16_bits_trains(kind: type[torch.nn.BatchNorm1d]) -> None:
    grads = []
    for device, dtype in (("jax", torch.bfloat16), ("cpu", torch.float32)):
        layer = kind(4, affine=True).to(device, dtype)
        x = normal(3, 4, 8).detach().bfloat16().to(device, dtype).requires_grad_()
        layer(x).backward(normal(3, 4, 8, seed=1).detach().bfloat16().to(device, dtype))
        assert x.grad is not None and x.grad.dtype == dtype and layer.weight.grad is not None
        grads.append((x.grad.cpu().float(), layer.weight.grad.cpu().float()))
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=2**-8, atol=0)  # computed in float32 and rounded once, to 8 bits


@pytest.mark.parametrize("norm", ["layer_norm", "instance_norm", "rms_norm", "softmax", "batch_norm", "group_norm"])
def test_second_derivatives_equal_cpu(norm: str) -> None:
    def penalty(x: torch.Tensor) -> torch.Tensor:
        (g,) = torch.autograd.grad(NORMS[norm](x).pow(3).sum(), x, create_graph=True)
        return g.pow(2).sum()

    check(penalty, normal(3, 4, 5, dtype=torch.float64))
