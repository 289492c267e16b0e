"""`torch.jax`'s streams and events: one stream, in program order; what is waited for is done, and times are times."""

import pytest
import torch

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
    stream = torch.accelerator.current_stream()
    stream.synchronize()
