"""`torch.device("jax")`: factories, copies, dtypes, in-place forms, gradients and random state as on any PyTorch device."""

import copy
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn as nn

import spmd
from tests.oracle import assert_same, batch, twins

ROOT = Path(__file__).resolve().parents[2]
jax_module: Any = torch.jax  # pyright: ignore[reportAttributeAccessIssue]

FACTORIES: dict[str, Callable[[Any], torch.Tensor]] = {
    "zeros": lambda d: torch.zeros(2, 3, device=d),
    "ones": lambda d: torch.ones(2, 3, dtype=torch.bfloat16, device=d),
    "full": lambda d: torch.full((2,), 7, device=d),
    "full_bool": lambda d: torch.full((2,), True, device=d),
    "arange": lambda d: torch.arange(5, device=d),
    "arange_float": lambda d: torch.arange(0.5, 3, 0.5, device=d),
    "linspace": lambda d: torch.linspace(0, 1, 5, device=d),
    "eye": lambda d: torch.eye(3, 4, device=d),
    "tensor": lambda d: torch.tensor([[1, 2], [3, 4]], device=d),
    "tensor_float": lambda d: torch.tensor([1.5, 2.0], device=d, dtype=torch.float64),
    "scalar": lambda d: torch.tensor(3.0, device=d),
    "as_tensor": lambda d: torch.as_tensor(np.array([1.0, 2.0]), device=d),
    "empty_shape": lambda d: torch.zeros(0, 3, device=d),
    "zeros_like": lambda d: torch.zeros_like(torch.ones(2, 3, device=d), dtype=torch.int32),
    "new_full": lambda d: torch.ones(2, device=d).new_full((3,), 2.0),
    "new_tensor": lambda d: torch.ones(2, device=d).new_tensor([1, 2]),
    "tril": lambda d: torch.ones(3, 3, device=d).tril(),
    "complex": lambda d: torch.complex(torch.ones(2, device=d), torch.zeros(2, device=d)),
}


@pytest.mark.parametrize("name", list(FACTORIES))
def test_a_factory_gives_what_it_gives_on_the_cpu(name: str) -> None:
    for device in ("jax", torch.device("jax"), torch.device("jax", 0)):
        got = FACTORIES[name](device)
        assert got.device.type == "jax"
        assert_same(got, FACTORIES[name]("cpu"))


def test_empty_has_shape_and_dtype() -> None:
    got = torch.empty(2, 3, dtype=torch.int16, device="jax")
    assert (got.shape, got.dtype) == ((2, 3), torch.int16)


def test_the_device_as_a_context_is_the_default() -> None:
    with torch.device("jax"):
        made = torch.zeros(2), nn.Linear(2, 2).weight, torch.arange(3)
    assert {t.device.type for t in made} == {"jax"}
    assert torch.zeros(1).device.type == "cpu"


DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_to_the_device_and_back_keeps_every_bit(dtype: torch.dtype) -> None:
    host = (batch(3, 4) * 10).to(dtype)
    device = host.to("jax")
    assert device.dtype == dtype and device.device.type == "jax"
    host_kept = host.clone()
    host.zero_()
    assert torch.equal(device.cpu(), host_kept)
    back = device.cpu()
    back.zero_()
    assert torch.equal(device.cpu(), host_kept)


@pytest.mark.parametrize("source", DTYPES, ids=str)
@pytest.mark.filterwarnings("ignore:Casting complex values to real discards the imaginary part")  # torch warns, on every device
def test_dtype_conversions_follow_torch(source: torch.dtype) -> None:
    host = torch.tensor([-2.7, -1.0, 0.0, 0.4, 1.0, 100.6]).to(source)
    for target in DTYPES:
        if not target.is_signed and source.is_signed:
            value = host.abs()  # a negative number as an unsigned one is undefined
        else:
            value = host
        assert_same(value.to("jax").to(target), value.to(target), (0.0, 0.0))
        assert_same(value.to("jax", target), value.to(target), (0.0, 0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int32], ids=str)
@pytest.mark.parametrize("shape", [(3, 4), (4,), (1, 4), ()], ids=str)
def test_copy_goes_in_every_direction_with_broadcast_and_cast(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    source = (batch(*shape) * 10).to(dtype)
    want = torch.zeros(3, 4).copy_(source)
    assert_same(torch.zeros(3, 4, device="jax").copy_(source), want)
    assert_same(torch.zeros(3, 4, device="jax").copy_(source.to("jax")), want)
    assert_same(torch.zeros(3, 4).copy_(source.to("jax")), want)
    held = torch.zeros(4, 3, device="jax")
    held.T.copy_(source)
    assert_same(held, want.T.contiguous())
    part = torch.zeros(5, 4, device="jax")
    part[1:4].copy_(source)
    assert_same(part[1:4], want)
    assert part[0].sum().item() == part[4].sum().item() == 0


IN_PLACE: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "add_": lambda x, y: x.add_(y, alpha=2),
    "mul_": lambda x, y: x.mul_(3),
    "operator": lambda x, y: x.__iadd__(y),
    "clamp_": lambda x, y: x.clamp_(-0.5, 0.5),
    "relu_": lambda x, y: x.relu_(),
    "fill_": lambda x, y: x.fill_(2),
    "zero_": lambda x, y: x.zero_(),
    "masked_fill_": lambda x, y: x.masked_fill_(y > 0, 9.0),
    "addcmul_": lambda x, y: x.addcmul_(y, y, value=0.5),
    "set_item": lambda x, y: x.__setitem__((slice(None), 1), y[:, 0]),
    "set_mask": lambda x, y: x.__setitem__(x > 0, 0.0),
    "view": lambda x, y: x[1:].t().mul_(2),
    "out": lambda x, y: torch.add(x, y, out=x),
    "out_other": lambda x, y: torch.mul(x, 2, out=y),
    "matmul_out": lambda x, y: torch.matmul(x, y.T, out=torch.empty(3, 3, device=x.device)),
    "uniform_": lambda x, y: x.uniform_().ge_(0).le_(1),
}


@pytest.mark.parametrize("name", list(IN_PLACE))
def test_in_place_and_out_forms_write_where_torch_writes(name: str) -> None:
    host = [batch(3, 4), batch(3, 4, seed=2)]
    device = [t.to("jax") for t in host]
    alias = [t.view(-1) for t in device]
    want, got = IN_PLACE[name](*host), IN_PLACE[name](*device)
    assert_same(device, host)
    assert_same(alias, [t.view(-1) for t in host])
    if isinstance(want, torch.Tensor):
        assert_same(got, want)
        assert any(got is t for t in device) == any(want is t for t in host)


def test_an_in_place_result_of_another_dtype_or_shape_is_refused_as_torch_does() -> None:
    with pytest.raises(RuntimeError, match="can't be cast to the desired output type"):
        torch.ones(2, dtype=torch.int64, device="jax").add_(0.5)
    with pytest.raises(RuntimeError, match="shape"):
        torch.ones(2, device="jax").add_(torch.ones(3, 2, device="jax"))


def test_requires_grad_flows_through_moves() -> None:
    host = batch(3).requires_grad_()
    (host.to("jax") * 2).sum().backward()
    assert_same(host.grad, torch.full((3,), 2.0))
    device = batch(3).to("jax").requires_grad_()
    assert device.is_leaf
    (device.cpu() * 3).sum().backward()
    assert_same(device.grad, torch.full((3,), 3.0))
    assert not device.detach().requires_grad and device.clone().grad_fn is not None


@pytest.mark.parametrize(
    "fn",
    [
        torch.exp,
        lambda x: x.softmax(-1),
        lambda x: torch.special.log_softmax(x, -1),
        lambda x: torch.nn.functional.scaled_dot_product_attention(*[x[None, None]] * 3),
    ],
)
def test_an_illegal_in_place_write_is_noticed_by_its_version(fn: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = batch(3, 4).to("jax").requires_grad_()
    y = fn(x)
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
    with pytest.raises(RuntimeError, match="a leaf Variable that requires grad is being used in an in-place operation"):
        x.add_(1)


def test_copies_are_independent() -> None:
    host, device = twins()
    twin = copy.deepcopy(device)
    tensor = batch(3).to("jax")
    other = copy.deepcopy(tensor)
    with torch.no_grad():
        for t in (*twin.parameters(), other):
            t.zero_()
    assert_same(list(device.parameters()), list(host.parameters()))
    assert_same(tensor, batch(3))


def test_moving_a_module_back_and_forth_keeps_it() -> None:
    host, device = twins()
    assert_same(dict(device.cpu().state_dict()), dict(host.state_dict()))
    assert_same(dict(device.to("jax").double().state_dict()), dict(copy.deepcopy(host).double().state_dict()))
    meta = copy.deepcopy(host).to("meta").to_empty(device="jax")
    meta.load_state_dict(host.state_dict())
    assert_same(dict(meta.state_dict()), dict(host.state_dict()))


def test_an_op_without_a_lowering_says_which_where_and_what_to_do() -> None:
    library = torch.library.Library("spmd_test", "FRAGMENT")
    library.define("unknown(Tensor x, Tensor[] more, int dim=-1) -> Tensor")
    x = batch(2, 3).to("jax")

    def user_code() -> torch.Tensor:
        return torch.ops.spmd_test.unknown(x, [x.long(), x], dim=1)

    line = user_code.__code__.co_firstlineno + 1
    for run in (user_code, spmd.compile(user_code)):
        with pytest.raises(spmd.UnsupportedOpError) as raised:
            run()
        text = str(raised.value)
        assert "spmd_test.unknown.default has no lowering for device 'jax'" in text
        assert f"called at test_device.py:{line} in user_code" in text
        assert "with float32[2, 3], [int64[2, 3], float32[2, 3]]" in text and "1" in text
        assert "fix: register one with @spmd.lowering.lower(" in text
    assert isinstance(raised.value, NotImplementedError)


def test_tensors_of_two_devices_are_refused_with_the_line() -> None:
    with pytest.raises(RuntimeError, match=r"(?s)one of shape \(3,\) on cpu.*test_device.py.*\.to\('jax'\)"):
        _ = torch.ones(3, device="jax") + torch.ones(3)


def draws() -> list[list[float]]:
    x = torch.empty(4, device="jax")
    return [torch.rand(4, device="jax").tolist(), torch.randn(4, device="jax").tolist(), x.uniform_().tolist(), x.normal_().tolist()]


def test_a_seed_gives_the_same_numbers_again() -> None:
    torch.manual_seed(11)
    first = draws()
    assert draws() != first
    torch.manual_seed(11)
    assert draws() == first
    torch.manual_seed(12)
    assert draws() != first
    jax_module.manual_seed(11)
    assert draws() == first


def test_a_random_state_can_be_taken_and_set() -> None:
    torch.manual_seed(2**40 + 3)
    draws()
    state = jax_module.get_rng_state()
    assert (state.dtype, state.shape, state.device.type) == (torch.uint8, (16,), "cpu")
    first = draws()
    jax_module.set_rng_state(state)
    assert draws() == first
    with torch.random.fork_rng(devices=[0], device_type="jax"):
        draws()
    assert jax_module.get_rng_state().tolist() != state.tolist()
    with pytest.raises(spmd.SpmdError, match="not a random state of device 'jax'"):
        jax_module.set_rng_state(torch.get_rng_state())


def test_a_generator_of_another_device_is_refused() -> None:
    with pytest.raises((spmd.SpmdError, RuntimeError), match="generator"):
        torch.rand(2, device="jax", generator=torch.Generator())


SLOT_TAKEN = {
    "renamed": "import torch; torch.utils.rename_privateuse1_backend('npu')",
    "torchax": "import sys, types; sys.modules['torchax'] = types.ModuleType('torchax')",
    "torch_xla": "import sys, types; sys.modules['torch_xla'] = types.ModuleType('torch_xla')",
}


# Each in a fork of one process that has imported torch and jax already.
IMPORTS_WITH_TAKEN_SLOTS = f"""
import json, os, traceback
import jax, torch
said = {{}}
for owner, take in {SLOT_TAKEN!r}.items():
    here, there = os.pipe()
    if os.fork() == 0:
        try:
            exec(take)
            import spmd
        except BaseException:
            os.write(there, traceback.format_exc().encode())
        os._exit(0)
    os.close(there)
    with os.fdopen(here) as file:
        said[owner] = file.read()
print(json.dumps(said))
"""


@pytest.fixture(scope="module")
def said_of_taken_slots() -> dict[str, str]:
    done = subprocess.run([sys.executable, "-c", IMPORTS_WITH_TAKEN_SLOTS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("owner", list(SLOT_TAKEN))
def test_a_taken_device_slot_is_a_clear_error(owner: str, said_of_taken_slots: dict[str, str]) -> None:
    said = said_of_taken_slots[owner]
    assert "DeviceSlotError: device 'jax' cannot be registered" in said
    assert ("'npu'" if owner == "renamed" else f"loaded: ['{owner}']") in said
    assert "fix: import spmd in a process of its own" in said


def test_jax_of_the_process_keeps_its_own_precision() -> None:
    import jax.numpy as jnp

    assert torch.ones(2, dtype=torch.float64, device="jax").sum().dtype == torch.float64
    assert jnp.arange(3).dtype == jnp.int32
    assert jnp.ones(2).dtype == jnp.float32


def test_the_only_device_is_device_0() -> None:
    for device in (0, -1, "jax", "jax:0", torch.device("jax", 0)):
        torch.accelerator.set_device_index(device)
        torch.jax.set_device(device)  # type: ignore[attr-defined]
    assert torch.accelerator.current_device_index() == 0
    for choose in (torch.accelerator.set_device_index, torch.jax.set_device, torch.jax.device):  # type: ignore[attr-defined]
        with pytest.raises(spmd.SpmdError, match=r"there is no device 'jax:5'\n(.|\n)*fix: spmd.mark_sharding"):
            choose(5)
    with pytest.raises(ValueError, match="cpu doesn't match the current accelerator jax"):
        torch.accelerator.set_device_index("cpu")


def test_synchronize_waits_and_says_what_was_found_wrong() -> None:
    def positive(x: torch.Tensor) -> torch.Tensor:
        if (x < 0).any():
            raise ArithmeticError("negative")
        return x * 2

    step = spmd.compile(positive)
    step(torch.ones(2, device="jax"))
    torch.accelerator.synchronize()
    step(-torch.ones(2, device="jax"))
    with pytest.raises(ArithmeticError, match="negative"):
        torch.accelerator.synchronize()


@pytest.mark.parametrize("write", [lambda x: x.add_(1), lambda x: x.mul_(x), lambda x: x.masked_fill_(x > 3, 0), lambda x: x.relu_()])
def test_a_write_to_windows_that_overlap_is_refused(write: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """CPU torch leaves there what depends on the order in which it happens to go."""
    x = torch.arange(6.0, device="jax")
    with pytest.raises(spmd.SpmdError, match="whose elements share memory"):
        write(x.unfold(0, 3, 1))
    write(x.unfold(0, 3, 3))
    x.unfold(0, 3, 1).fill_(2)
    assert x.tolist() == [2.0] * 6


@pytest.mark.parametrize(
    "place",
    [
        lambda: torch.zeros(2, device="jax:3"),
        lambda: torch.tensor([1.0], device="jax:1"),
        lambda: torch.arange(3, device=torch.device("jax", 2)),
        lambda: torch.ones(2).to("jax:3"),
        lambda: torch.ones(2, device="jax").to("jax:1"),
        lambda: torch.ones(2).jax(3),  # type: ignore[attr-defined]
        lambda: torch.rand_like(torch.ones(2), device="jax:3"),
        lambda: nn.Linear(2, 2).to("jax:1"),
        lambda: torch.Generator("jax:3"),
    ],
)
def test_a_second_device_is_refused(place: Callable[[], Any]) -> None:
    with pytest.raises(spmd.SpmdError, match=r"there is no device 'jax:\d'"):
        place()


def test_the_device_has_index_0() -> None:
    x = torch.ones(2, device="jax:0")
    assert x.device == torch.ones(2, device="jax").to("jax:0").device == torch.device("jax", 0)


def test_a_compiled_function_refuses_a_second_device() -> None:
    with pytest.raises(spmd.SpmdError, match="there is no device 'jax:1'"):
        spmd.compile(lambda x: x + torch.ones(2, device="jax:1"))(torch.ones(2, device="jax"))
