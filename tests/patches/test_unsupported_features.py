"""Unsupported features of PyTorch are refused with a replacement; names of torch.cuda and torch.accelerator answer honestly."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from spmd.patches._unsupported_features import INSTEAD

jax_module: Any = torch.jax  # pyright: ignore[reportAttributeAccessIssue]


def test_inductor_for_the_cpu_is_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    inductor = SimpleNamespace(compile_fx=lambda model, inputs, **options: ("compiled", model))
    monkeypatch.setitem(sys.modules, "torch._inductor.compile_fx", inductor)  # type: ignore[arg-type]
    wrapper = torch._TorchCompileInductorWrapper("default", None, False)
    model = nn.Linear(3, 3)
    assert wrapper(model, [torch.ones(3)]) == ("compiled", model)


@pytest.mark.parametrize("options", [{}, {"device_ids": [0]}, {"device_ids": [0, 1]}, {"dim": 1}], ids=str)
@pytest.mark.parametrize("where", ["jax", "cpu"])
def test_data_parallel_says_what_to_use(options: dict[str, Any], where: str) -> None:
    with pytest.raises(spmd.SpmdError, match="PyTorch sees all chips as the one device"):
        nn.DataParallel(nn.Linear(3, 3).to(where), **options)


@pytest.mark.parametrize("name", INSTEAD)
def test_a_name_of_torch_cuda_says_what_to_use(name: str) -> None:
    assert not hasattr(jax_module, name)
    with pytest.raises(AttributeError) as refused:
        getattr(jax_module, name)
    assert str(refused.value) == f"torch.jax has no '{name}'\n  fix: {INSTEAD[name]}"


def test_a_misspelt_name_is_recognised() -> None:
    with pytest.raises(AttributeError, match="did you mean 'memory_allocated'"):
        _ = jax_module.memory_alocated
    with pytest.raises(AttributeError, match=r"print\(dir\(torch.jax\)\)"):
        _ = jax_module.zzz


# What users of torch.cuda call, and what it answers; memory is counted on TPUs and GPUs, and refused on CPU devices.
ANSWERS: dict[str, Callable[[Any], bool]] = {
    "is_available": lambda a: a is True,
    "is_initialized": lambda a: a is True,
    "device_count": lambda a: a == 1,
    "current_device": lambda a: a == 0,
    "get_device_name": lambda a: isinstance(a, str) and a != "",
    "get_device_properties": lambda a: a.name == jax_module.get_device_name() and a.num_devices >= 1,
    "is_bf16_supported": lambda a: a is True,
    "synchronize": lambda a: a is None,
    "empty_cache": lambda a: a is None,
    "ipc_collect": lambda a: a is None,
    "init": lambda a: a is None,
    "initial_seed": lambda a: isinstance(a, int),
    "get_rng_state": lambda a: a.dtype == torch.uint8,
    "get_rng_state_all": lambda a: len(a) == 1,
    "current_stream": lambda a: a is not None,
    "default_stream": lambda a: a is not None,
    "Event": lambda a: a.query() is True,
    "Stream": lambda a: a.query() is True,
}
REFUSED_ON_CPUS = (
    *("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved", "memory_stats", "memory_summary"),
    *("mem_get_info", "get_memory_info", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
)


@pytest.mark.parametrize("name", ANSWERS)
def test_a_function_of_torch_cuda_answers(name: str) -> None:
    assert ANSWERS[name](getattr(jax_module, name)())


@pytest.mark.parametrize("name", REFUSED_ON_CPUS)
def test_what_nobody_counts_is_refused(name: str) -> None:
    with pytest.raises(spmd.SpmdError, match="jax provides no memory statistics|cannot reset jax's statistics"):
        getattr(jax_module, name)()


def test_no_public_function_of_torch_accelerator_ends_in_an_internal_error() -> None:
    """Each answers, or refuses in words; those that need an argument are tested where they are made."""
    odd: list[str] = []
    for name in torch.accelerator.__all__:
        function = getattr(torch.accelerator, name)
        if name in ("Graph", "current_device_idx", "device_index", "set_device_idx", "set_device_index", "set_stream"):
            continue
        try:
            function()
        except spmd.SpmdError:
            pass
        except RuntimeError as error:
            if "INTERNAL ASSERT" in str(error) or "support" not in str(error):
                odd.append(f"{name}: {error}")
    assert not odd
    if hasattr(torch.accelerator, "Graph"):  # not in torch 2.11
        with pytest.raises(RuntimeError, match="not supported on device type: jax"):
            torch.accelerator.Graph()
