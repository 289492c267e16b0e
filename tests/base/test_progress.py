"""What takes long is said while it does: on one line at a terminal, in lines elsewhere, through logging always; nothing else is."""

import io
import logging
import re
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import fields
from types import SimpleNamespace

import pytest
import torch

import mesh
import spmd
from spmd.base import _progress, _progress_line
from spmd.base._progress import underway
from spmd.base._progress_line import clock
from spmd.base._settings import in_force


@pytest.fixture(autouse=True)
def settings_as_before() -> Iterator[None]:
    before = {field.name: getattr(in_force, field.name) for field in fields(in_force)}
    _progress._progress._finish_eager()  # compilations of the test before, which would be long in this one
    yield
    for name, value in before.items():
        setattr(in_force, name, value)


class Stderr(io.StringIO):
    """stderr, at a terminal or not."""

    def __init__(self, is_terminal: bool) -> None:
        super().__init__()
        self._is_terminal = is_terminal

    def isatty(self) -> bool:
        return self._is_terminal


def stderr_of(monkeypatch: pytest.MonkeyPatch, seconds: float, *, is_terminal: bool, has_logging: bool) -> str:
    """What is written there while something takes that long, where 0.1 s are long."""
    monkeypatch.setattr(sys, "stderr", Stderr(is_terminal))
    monkeypatch.setattr(_progress_line._log, "hasHandlers", lambda: has_logging)
    in_force.progress_after_s = 0.1
    with underway("compiling train_step"):
        time.sleep(seconds)
    return sys.stderr.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def all_is_long(caplog: pytest.LogCaptureFixture) -> None:
    """Everything that takes any time at all is logged."""
    caplog.set_level(logging.INFO, logger="spmd")
    in_force.progress_after_s = 0.0


def told(caplog: pytest.LogCaptureFixture) -> str:
    return "\n".join(caplog.messages)


def test_what_is_short_is_not_said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="spmd")
    assert stderr_of(monkeypatch, 0.0, is_terminal=True, has_logging=False) == ""
    assert not caplog.messages


def test_at_a_terminal_it_is_one_line_that_goes_away(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="spmd")
    text = stderr_of(monkeypatch, 1.5, is_terminal=True, has_logging=False)
    assert "compiling train_step, 0:00" in text
    assert "\n" not in text
    assert text.endswith("\r\x1b[2K"), "the line is erased at the end"
    assert caplog.messages == ["compiling train_step, 0:00", "compiling train_step took 0:01"]


def test_elsewhere_it_is_lines_unless_logging_is_set_up(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = ["spmd: compiling train_step, 0:00", "spmd: compiling train_step took 0:01"]
    assert stderr_of(monkeypatch, 1.5, is_terminal=False, has_logging=False).splitlines() == lines
    assert stderr_of(monkeypatch, 1.5, is_terminal=False, has_logging=True) == ""


@pytest.mark.parametrize("is_terminal", [True, False])
def test_without_progress_it_is_only_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, is_terminal: bool) -> None:
    caplog.set_level(logging.INFO, logger="spmd")
    assert spmd.configure(progress=False).progress is False
    assert stderr_of(monkeypatch, 1.5, is_terminal=is_terminal, has_logging=False) == ""
    assert len(caplog.messages) == 2


@pytest.mark.parametrize(("index", "writes"), [(0, True), (1, False)])
def test_in_a_job_process_0_writes_and_the_others_log(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, index: int, writes: bool
) -> None:
    caplog.set_level(logging.INFO, logger="spmd")
    monkeypatch.setattr(_progress_line._join, "job", lambda: SimpleNamespace(host=mesh.Host(index=index, count=2)))
    assert bool(stderr_of(monkeypatch, 1.5, is_terminal=False, has_logging=False)) == writes
    assert len(caplog.messages) == 2


def test_it_is_said_again_ever_more_rarely() -> None:
    assert [_progress._report_time_s(n, 2.0) for n in range(6)] == [2.0, 10.0, 30.0, 60.0, 120.0, 180.0]
    assert [_progress._report_time_s(n, 45.0) for n in range(3)] == [45.0, 60.0, 120.0]
    assert [clock(s) for s in (2.9, 41, 227, 3600)] == ["0:02", "0:41", "3:47", "1:00:00"]


def test_its_thread_keeps_no_process_alive_and_ends_when_nothing_is_underway(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "_IDLE_S", 0.05)
    in_force.progress_after_s = 0.1
    with underway("tracing f"):
        thread = next(t for t in threading.enumerate() if t.name == "progress")
        assert thread.daemon
    thread.join(10)
    assert not thread.is_alive()


def test_a_call_of_a_program_begins_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    step = spmd.compile(lambda x: x * 2)
    x = torch.ones(3, device="jax")
    step(x)
    monkeypatch.setattr(_progress, "Work", None)
    step(x)
    with pytest.raises(TypeError):  # a new program would have
        step(torch.ones(4, device="jax"))


@pytest.mark.multidevice(num=8)
@pytest.mark.usefixtures("all_is_long")
def test_tracing_and_compiling_a_step_name_it_and_its_mesh(caplog: pytest.LogCaptureFixture, mesh_4x2: mesh.Mesh) -> None:
    model = torch.nn.Linear(8, 8).to("jax")
    spmd.mark_sharding(model.weight, mesh_4x2, ("model", None))
    optimizer = torch.optim.Adam(model.parameters())

    @spmd.compile
    def train_step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    train_step(torch.ones(4, 8, device="jax"))
    text = told(caplog)
    for what in ("tracing train_step took", "preparing the state of Adam took", "compiling train_step over data=4, model=2 took"):
        assert what in text


@pytest.mark.usefixtures("all_is_long")
def test_compiling_ahead_of_time_names_the_chips(caplog: pytest.LogCaptureFixture) -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'spmd-mesh[tpu]'")
    chips = mesh.Mesh(range(8), (8,), ("data",), topology="v5e:2x4")
    x = spmd.mark_sharding(torch.empty(16, 8, device="jax"), chips, ("data", None))

    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    spmd.compile(double).program(x)
    assert "compiling double for v5e:2x4 took" in told(caplog)


@pytest.mark.usefixtures("all_is_long")
def test_a_lazy_program_says_its_operations(caplog: pytest.LogCaptureFixture) -> None:
    x = torch.ones(3, 5, device="jax")
    with spmd.lazy():
        x = (x + 1).sin()
        spmd.sync()
    assert "compiling 2 recorded operations up to test_progress.py:" in told(caplog)


@pytest.mark.usefixtures("all_is_long")
def test_eager_compilations_are_said_together(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_progress, "_GAP_S", 10.0)
    for size in range(101, 107):
        torch.ones(size, device="jax").cos()
    with underway("something else"):  # which ends it
        pass
    assert re.search(r"compiling operations, \d+ so far, at test_progress.py:\d+ in test_eager\w+ took", told(caplog))


def test_every_retrace_is_logged_with_its_reason_and_one_too_many_as_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="spmd.compile")
    step = spmd.compile(lambda x: x * 2, max_retraces=2)
    step(torch.ones(3, device="jax"))
    step(torch.ones(4, device="jax"))
    with pytest.warns(UserWarning, match="traced again 2 times"):
        step(torch.ones(5, device="jax"))
    assert [(r.levelname, r.getMessage().partition(": ")[2]) for r in caplog.records] == list(
        zip(("INFO", "WARNING"), step.retraces, strict=True)
    )


def test_a_step_shows_what_it_compiled() -> None:
    model = torch.nn.Linear(300, 300).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)

    @spmd.compile
    def train_step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    assert str(train_step) == "train_step: 0 programs kept, 0 traces"
    train_step(torch.ones(2, 300, device="jax"))
    train_step(torch.ones(4, 300, device="jax"))
    assert repr(train_step) == "<compiled function train_step: 2 programs, 2 traces>"
    lines = str(train_step).splitlines()
    assert lines[:2] == ["train_step: 2 programs kept, 2 traces", "  on 1 cpu device"]
    assert "352.7 KiB donated on each device" in lines[2]
    assert lines[-1] == f"  trace 2: {train_step.retraces[0]}"
    assert "of memory on each device, at the peak:" in str(train_step)


def test_a_lazy_session_shows_what_it_compiled() -> None:
    with spmd.lazy() as lazy:
        assert str(lazy) == "spmd.lazy(): 0 programs kept"
        for size in (3, 4, 5):
            x = torch.ones(size, 100, device="jax") + 1
            spmd.sync()
            assert x.shape[0] == size
    lines = str(lazy).splitlines()
    assert lines[0] == "spmd.lazy(): 3 programs kept"
    assert lines[1].startswith("  the latest: 1 recorded operation up to test_progress.py:")
    assert "of memory on each device, at the peak:" in lines[2]
    assert lines[-1] == f"  program 3: {lazy.retraces[0]}"


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"progress": "no"}, "progress must be True or False"),
        ({"check_indices": 1}, "check_indices must be True or False"),
        ({"progress_after_s": -1}, "progress_after_s must be a number of seconds"),
        ({"progress_after_s": float("nan")}, "progress_after_s must be a number of seconds"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given: dict[str, object], text: str) -> None:
    with pytest.raises(spmd.SpmdError, match=text):
        spmd.configure(**given)  # type: ignore[arg-type]


def test_index_checks_that_are_configured_hold_for_programs_that_are_there_too() -> None:
    w = torch.arange(4.0, device="jax") + 1
    step = spmd.compile(lambda w, i: w[i])
    i = torch.tensor([1, 9]).to("jax") + torch.zeros((), dtype=torch.int64, device="jax")
    step(w, i)
    spmd.configure(check_indices=True)
    with pytest.raises(IndexError, match="9"):
        step(w, i).cpu()
    assert step.retraces == ["spmd.configure(check_indices=True) was called"]
    with pytest.raises(IndexError, match="9"):
        w[i].cpu()
