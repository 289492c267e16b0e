"""Powers of an optimizer's step counter, as a loop of multiplications where XLA's power is half of a program."""

import jax
import jax.numpy as jnp
import pytest
import torch

import mesh
import spmd
from spmd.device import _powers
from spmd.program.trace import _capture


@pytest.mark.parametrize("base", [0.9, 0.999, 1 - 1e-7, 0.5, 1.0, 0.0, -0.5, 1.0625])
def test_the_power_of_a_count_is_pythons(base: float) -> None:
    with jax.enable_x64(True):
        power = jax.jit(_powers.power_of_count)
        for count in (0, 1, 2, 3, 7, 10, 31, 64, 1000, 4095):
            found = float(power(jnp.float64(base), jnp.float32(count)))
            # a squaring doubles the error of what is squared, and rounds once more
            assert found == pytest.approx(base**count, rel=(count + 1) * 2.0**-52, abs=1e-300), count


@pytest.mark.parametrize("count", [2.5, 0.25, -1.0, -2.5])
def test_a_counter_that_is_no_count_has_the_power_of_32_bit_floats(count: float) -> None:
    with jax.enable_x64(True):
        assert float(_powers.power_of_count(jnp.float64(0.999), jnp.float32(count))) == pytest.approx(0.999**count, rel=2.0**-22)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.NAdam, torch.optim.Adamax])
def test_steps_with_it_are_torchs(monkeypatch: pytest.MonkeyPatch, optimizer: type[torch.optim.Optimizer]) -> None:
    monkeypatch.setattr(_capture, "likely_platform", lambda _: "tpu")
    counted: list[object] = []
    power_of_count = _powers.power_of_count
    monkeypatch.setattr(_powers, "power_of_count", lambda base, count: counted.append(count) or power_of_count(base, count))
    parameters: list[torch.Tensor] = []
    for device in ("cpu", "jax"):
        weight = torch.nn.Parameter(torch.linspace(-1.0, 1.0, 8, dtype=torch.float64).to(device))
        opt = optimizer([weight], lr=1e-2)  # type: ignore[call-arg]

        def step(weight: torch.Tensor = weight, opt: torch.optim.Optimizer = opt) -> None:
            opt.zero_grad()
            (weight.sin() * weight).sum().backward()
            opt.step()

        run = spmd.compile(step) if device == "jax" else step
        for _ in range(6):
            run()
        parameters.append(weight.detach().cpu())
    assert counted, "the exponent was not seen to be a counter"
    torch.testing.assert_close(*parameters, rtol=1e-13, atol=0)  # float64: last bits of six steps


def test_a_program_for_tpus_has_no_power_of_64_bit_floats() -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'spmd-mesh[tpu]'")
    grid = mesh.Mesh(range(4), (4,), ("data",), topology="v5e:2x2")
    weight = torch.nn.Parameter(spmd.mark_sharding(torch.empty(8, device="jax"), grid, (None,)))
    opt = torch.optim.Adam([weight])

    @spmd.compile
    def step() -> None:
        opt.zero_grad()
        weight.sum().backward()
        opt.step()

    lines = step.program().compiled.as_text().splitlines()
    assert sum("/pow" in line for line in lines) == 2, "one of 32-bit floats for each beta"
    assert len(lines) < 800, "a power of 64-bit floats is 1,300 instructions"
