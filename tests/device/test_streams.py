"""`torch.jax`'s streams and events: one stream, in program order; what is waited for is done, and times are times."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import mesh
import spmd

JAX = torch.jax  # pyright: ignore[reportAttributeAccessIssue]


def test_there_is_one_stream_and_work_on_it_is_done_when_it_was_waited_for() -> None:
    side = JAX.Stream()
    assert side == JAX.current_stream()
    side.wait_stream(JAX.current_stream())
    with JAX.stream(side):
        x = torch.ones(64, 64, device="jax") @ torch.ones(64, 64, device="jax")
    event = side.record_event()
    side.wait_event(event)
    event.synchronize()
    assert side.query() and event.query()
    assert float(x[0, 0]) == 64


def test_timed_events_tell_the_time_between_them() -> None:
    start, end = JAX.Event(enable_timing=True), JAX.Event(enable_timing=True)
    start.record()
    end.record()
    assert start.elapsed_time(end) >= 0
    with pytest.raises(spmd.SpmdError, match=r"fix: torch.jax.Event\(enable_timing=True\)"):
        start.elapsed_time(JAX.Event())


def test_torchs_own_words_for_the_accelerator_are_answered() -> None:
    assert torch.accelerator.is_available() and str(torch.accelerator.current_accelerator()) == "jax"
    assert (torch.accelerator.device_count(), torch.accelerator.current_device_index()) == (1, 0)
    torch.accelerator.synchronize()
    stream = JAX.current_stream()
    x = torch.ones(256, 256, device="jax") @ torch.ones(256, 256, device="jax")
    stream.synchronize()
    assert stream.query() and stream == JAX.default_stream()
    assert float(x[0, 0]) == 256


def test_the_device_says_what_it_is() -> None:
    properties = JAX.get_device_properties()
    assert properties.name == JAX.get_device_name() == "cpu"
    assert (properties.total_memory, properties.num_devices) == (0, len(mesh.devices()))
    assert JAX.is_bf16_supported() and torch.get_device_module("jax") is JAX
    JAX.init()
    JAX.ipc_collect()
    with pytest.raises(spmd.SpmdError, match="jax provides no memory statistics"):
        JAX.mem_get_info()


def test_a_loader_that_pins_gives_the_same_batches() -> None:
    loader = DataLoader(TensorDataset(torch.arange(8.0)), batch_size=4, pin_memory=True)
    batches = [batch for (batch,) in loader]
    assert all(batch.is_pinned() for batch in batches)
    assert torch.cat([batch.to("jax", non_blocking=True) for batch in batches]).tolist() == list(range(8))
