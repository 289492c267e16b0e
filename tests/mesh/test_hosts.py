"""Joining a job: what schedulers say, the roll call, what is compared, who is blamed; no process is started here but threads."""

from __future__ import annotations

import random
import socket
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import cast

import pytest

from mesh import DeviceError, JobError, _devices
from mesh._devices import gpu_share
from mesh.job._agreement import StepChecks, compare, difference
from mesh.job._clusters import detect, expand_hostlist, on_tpu_vm
from mesh.job._join import init
from mesh.job._place import Host
from mesh.job._preemption import Preemption
from mesh.job._rollcall import MAX_BYTES, Report, RollCall, report, require_reachable_name, resolve
from mesh.job._service import Service
from mesh.job._watchdog import Heartbeat, Limits, Watchdog, blame
from tests.ports import reserve_port

VERSIONS = {"jax": "1"}


LAUNCHER = {"SPMD_COORDINATOR": "a:1", "SPMD_PROCESS": "1", "SPMD_PROCESSES": "2", "SPMD_DEVICES": "4", "SPMD_JOB_DIR": "/x"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "r",
    "MASTER_ADDR": "a",
    "MASTER_PORT": "29500",
    "RANK": "3",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
}
OPEN_MPI = {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "n"}
SLURM = {
    "SLURM_JOB_ID": "77",
    "SLURM_STEP_ID": "0",
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NODELIST": "n[01-03]",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_NODEID": "2",
}
TPU = {"TPU_WORKER_ID": "1", "TPU_WORKER_HOSTNAMES": "t0,t1"}


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (LAUNCHER, Host(1, 2, "a:1", "launcher", None, 4, Path("/x"))),
        (TORCHRUN, Host(3, 4, "a:29501", "torchrun", 2, key="r")),
        ({**SLURM, "SPMD_COORDINATOR": "n01:9"}, Host(5, 6, "n01:9", "SLURM", 2, key="77.0")),
        (TPU, Host(1, 2, "t0:8476", "TPU", 1)),
        (
            {**TPU, "MEGASCALE_NUM_SLICES": "2", "MEGASCALE_SLICE_ID": "1", "MEGASCALE_COORDINATOR_ADDRESS": "s0:8080"},
            Host(3, 4, "s0:8476", "TPU", 1),
        ),
    ],
    ids=["launcher", "torchrun", "SLURM", "TPU", "TPU slices"],
)
def test_place_is_read_from_the_schedulers_variables(environ: dict[str, str], expected: Host) -> None:
    assert detect(environ) == expected


def test_place_on_a_tpu_vm_is_what_its_metadata_server_says() -> None:
    said = {"agent-worker-number": "2", "worker-network-endpoints": "u:u:10.0.0.5,u:u:10.0.0.6,u:u:10.0.0.7"}
    found = on_tpu_vm(said.get)
    assert found is not None
    assert (found.index, found.count, found.coordinator) == (2, 3, "10.0.0.5:8476")
    assert on_tpu_vm({"agent-worker-number": "0", "worker-network-endpoints": "u:u:10.0.0.5"}.get) is None
    assert on_tpu_vm(lambda name: None) is None


def test_the_more_particular_scheduler_wins() -> None:
    everything = {**TPU, **SLURM, **OPEN_MPI, **TORCHRUN, **LAUNCHER}
    order: list[str] = []
    for variables in (LAUNCHER, TORCHRUN, OPEN_MPI, SLURM, TPU):
        found = detect(everything)
        assert found is not None
        order.append(found.found_by)
        everything = {name: value for name, value in everything.items() if name not in variables}
    assert order == ["launcher", "torchrun", "Open MPI", "SLURM", "TPU"]
    assert detect(everything) is None


def test_processes_of_one_job_derive_the_same_port_and_those_of_another_a_different_one() -> None:
    coordinators = [detect({**SLURM, "SLURM_PROCID": str(i)}) for i in range(6)]
    assert len({host.coordinator for host in coordinators if host is not None}) == 1
    other, first = detect({**SLURM, "SLURM_JOB_ID": "78"}), coordinators[0]
    assert other is not None and first is not None and other.coordinator != first.coordinator
    assert (first.coordinator or "").startswith("n01:")


def test_open_mpi_on_several_machines_says_what_to_pass() -> None:
    with pytest.raises(JobError, match="has no variable for the host of process 0(?s:.*)mpirun -x SPMD_COORDINATOR"):
        detect({**OPEN_MPI, "OMPI_COMM_WORLD_LOCAL_SIZE": "1"})


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("n1", ["n1"]),
        ("n[01-03,7],login", ["n01", "n02", "n03", "n7", "login"]),
        ("r[1-2]n[8-9]", ["r1n8", "r1n9", "r2n8", "r2n9"]),
        ("a-b[9-11]-x", ["a-b9-x", "a-b10-x", "a-b11-x"]),
    ],
)
def test_host_lists_are_spelled_out(text: str, names: list[str]) -> None:
    assert expand_hostlist(text) == names


@pytest.mark.parametrize("text", ["", "n[1-", "n[a-b]", "n[1-2]]", "n[1-999999999]"])
def test_host_list_that_makes_no_sense_is_refused(text: str) -> None:
    with pytest.raises(JobError, match="is not a list of hosts"):
        expand_hostlist(text)


@pytest.mark.parametrize(
    ("environ", "text"),
    [({**LAUNCHER, "SPMD_PROCESS": "one"}, "SPMD_PROCESS is 'one'"), ({**TORCHRUN, "RANK": ""}, "the environment has no RANK")],
)
def test_variables_that_make_no_sense_are_named(environ: dict[str, str], text: str) -> None:
    with pytest.raises(JobError, match=text):
        detect(environ)


def test_processes_on_one_machine_share_its_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidia3", "nvidiactl"):
        (tmp_path / name).touch()
    assert gpu_share(1, 2, tmp_path) is None  # this process is confined to CPU
    monkeypatch.setattr(_devices, "is_confined_to_cpu", lambda: False)
    assert [gpu_share(i, 2, tmp_path) for i in range(2)] == [[0, 1], [2, 3]]
    assert gpu_share(0, 1, tmp_path) is None and gpu_share(0, 2, tmp_path / "none") is None
    with pytest.raises(DeviceError, match="3 processes cannot share this machine's GPUs evenly"):
        gpu_share(0, 3, tmp_path)


def test_init_wants_all_of_its_place_or_nothing() -> None:
    with pytest.raises(JobError, match="got only some of coordinator, count and index(?s:.*)count=2"):
        init(count=2)


# The roll call


def called(count: int, reports: list[Report], key: str = "k", timeout_s: float = 3.0, own_count: int | None = None) -> list[str]:
    """What everybody hears: process 0 last. A report's answer or error is its text."""
    port = reserve_port()
    roll = RollCall("127.0.0.1", port, Report(0, own_count or count, VERSIONS, "host 0"), key)

    def ask(own: Report) -> str:
        try:
            return report(("127.0.0.1", port), own, key, timeout_s)
        except JobError as error:
            return str(error)

    with ThreadPoolExecutor(len(reports) or 1) as pool:
        asked: list[Future[str]] = [pool.submit(ask, own) for own in reports]
        try:
            roll.wait(timeout_s)
            roll.start("127.0.0.1:1")
            roll.close()
            end = "all there"
        except JobError as error:
            end = str(error)
        return [future.result() for future in asked] + [end]


def test_processes_that_fit_are_told_where_the_service_is() -> None:
    reports = [Report(i, 4, VERSIONS, f"host {i}") for i in (3, 1, 2)]
    assert called(4, reports) == ["127.0.0.1:1"] * 3 + ["all there"]


@pytest.mark.parametrize(
    ("reports", "text"),
    [
        ([Report(1, 3, VERSIONS, "host 1")], "disagree on the number of processes"),
        ([Report(0, 2, VERSIONS, "host 9")], "process 0 reported twice"),
        ([Report(5, 2, VERSIONS, "host 5")], "there is no process 5 in a job of 2"),
        ([Report(1, 2, {"jax": "2"}, "host 1")], "different versions of jax"),
        ([Report(1, 2, {"jax": "1", "torch": "3"}, "host 1")], "different versions of torch"),
    ],
    ids=["count", "process 0 twice", "number too large", "version", "package on one only"],
)
def test_everybody_hears_what_does_not_fit(reports: list[Report], text: str) -> None:
    answers = called(2, reports)
    assert all(text in answer and "fix:" in answer for answer in answers)


def test_number_given_twice_is_named_with_both_places() -> None:
    answers = called(3, [Report(1, 3, VERSIONS, "host a"), Report(1, 3, VERSIONS, "host b")])
    assert "process 1 reported twice" in answers[-1]
    assert "host a" in answers[-1] and "host b" in answers[-1]


def test_absent_process_is_named_to_those_who_came() -> None:
    answers = called(3, [Report(2, 3, VERSIONS, "host 2")], timeout_s=0.5)
    assert all("process 1 did not report within 0.5 s" in answer for answer in answers)
    assert "2 of 3 processes connected" in answers[-1]


def test_without_process_0_the_others_say_so() -> None:
    with pytest.raises(JobError, match="process 0 did not answer at 127.0.0.1:\\d+ within 0.3 s"):
        report(("127.0.0.1", reserve_port()), Report(1, 2, VERSIONS, "here"), "", 0.3)


def test_another_jobs_process_is_not_counted() -> None:
    port = reserve_port()
    roll = RollCall("127.0.0.1", port, Report(0, 2, VERSIONS, "host 0"), "our key")
    with ThreadPoolExecutor(1) as pool:
        stranger = pool.submit(report, ("127.0.0.1", port), Report(1, 2, VERSIONS, "host 1"), "their key", 0.5)
        with pytest.raises(JobError, match="process 1 did not report"):
            roll.wait(0.7)
        with pytest.raises(JobError, match="did not answer(?s:.*)another job's process"):
            stranger.result()


def test_port_that_somebody_listens_on_is_refused_at_once() -> None:
    port = reserve_port()
    with socket.create_server(("127.0.0.1", port)), pytest.raises(JobError, match=f"port {port} of 127.0.0.1 is in use"):
        RollCall("127.0.0.1", port, Report(0, 2, VERSIONS, "host 0"), "")


def test_address_of_another_machine_is_refused() -> None:
    with pytest.raises(JobError, match="192.0.2.1 is not an address of this host"):
        RollCall("192.0.2.1", reserve_port(), Report(0, 2, VERSIONS, "here"), "")


def test_late_comer_is_turned_away() -> None:
    port = reserve_port()
    roll = RollCall("127.0.0.1", port, Report(0, 1, VERSIONS, "host 0"), "")
    roll.wait(1.0)
    roll.start("127.0.0.1:1")
    with pytest.raises(JobError, match="the job has started without this process"):
        report(("127.0.0.1", port), Report(1, 2, VERSIONS, "late"), "", 2.0)
    roll.close()


def test_random_bytes_do_not_disturb_the_roll_call() -> None:
    """Connections full of noise and well-formed nonsense; then the real process comes."""
    port, rng = reserve_port(), random.Random(0)
    roll = RollCall("127.0.0.1", port, Report(0, 2, VERSIONS, "host 0"), "k")
    nonsense = [b"{}\n", b"[]\n", b"null\n", b'{"report": 1, "mac": 2}\n', b'{"report": "{}", "mac": ""}\n', b"[" * 4000 + b"\n"]
    signed = [Report(1, 2, VERSIONS, "x").to_line("other"), Report(1, 2, VERSIONS, "x").to_line("k").replace(b"jax", b"jex")]

    def disturb() -> None:
        for _ in range(60):
            noise = rng.randbytes(rng.randrange(0, 3 * MAX_BYTES)) if rng.random() < 0.7 else rng.choice(nonsense + signed)
            try:
                with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
                    connection.sendall(noise)
            except OSError:
                continue

    with ThreadPoolExecutor(2) as pool:
        noise = pool.submit(disturb)
        real = pool.submit(lambda: (noise.result(), report(("127.0.0.1", port), Report(1, 2, VERSIONS, "host 1"), "k", 10.0))[1])
        roll.wait(60.0)
        roll.start("127.0.0.1:1")
        assert real.result() == "127.0.0.1:1"
        roll.close()


def test_bytes_that_are_no_report_of_this_job_are_none() -> None:
    rng = random.Random(1)
    line = Report(1, 2, VERSIONS, "host 1").to_line("k")
    for _ in range(10_000):
        spoiled = bytearray(line)
        for _ in range(rng.randrange(1, 8)):
            spoiled[rng.randrange(len(spoiled) - 1)] = rng.randrange(256)
        found = Report.from_line(rng.choice((bytes(spoiled), rng.randbytes(rng.randrange(200)))), "k")
        assert found is None or found == Report(1, 2, VERSIONS, "host 1")
    assert Report.from_line(line, "k") == Report(1, 2, VERSIONS, "host 1")
    assert Report.from_line(line, "another job's key") is None


# Names


@pytest.mark.parametrize("address", ["host", "host:", ":80", "host:x", "host:0", "host:65535", "host:99999"])
def test_address_without_a_sensible_port_is_refused(address: str) -> None:
    with pytest.raises(JobError, match="is not a coordinator address"):
        resolve(address, spans_machines=False)


def test_unknown_name_is_refused_in_one_line_with_a_fix() -> None:
    with pytest.raises(JobError, match="the coordinator's name 'no-such-host.invalid' cannot be resolved on this host"):
        resolve("no-such-host.invalid:1", spans_machines=False)


def test_name_that_leads_back_to_this_machine_is_refused_when_others_must_reach_it() -> None:
    assert resolve("localhost:1", spans_machines=False)[1] == 1
    with pytest.raises(JobError, match="resolves to loopback(?s:.*)/etc/hosts"):
        resolve("localhost:1", spans_machines=True)
    assert resolve("127.0.0.1:1", spans_machines=True) == ("127.0.0.1", 1)  # written as an address: meant so


@pytest.mark.parametrize(("name", "text"), [("localhost", "resolves to loopback"), ("no-such-host.invalid", "cannot be resolved")])
def test_own_name_that_others_cannot_use_is_refused_with_the_line_to_write(name: str, text: str) -> None:
    with pytest.raises(JobError, match=f"this host's own name '{name}' {text}(?s:.*)/etc/hosts"):
        require_reachable_name(name)


# What is compared


def test_odd_process_and_item_are_named() -> None:
    items = {i: {"mesh": "data=4", "seed": "0"} for i in range(4)} | {2: {"mesh": "data=4", "seed": "1"}}
    text = difference("program 0 (step)", items) or ""
    assert text.startswith("process 2 differs from the others at program 0 (step): seed")
    assert "process 2: 1" in text and "process 0: 0" in text


def test_of_two_processes_the_one_that_differs_from_process_0_is_named() -> None:
    assert (difference("x", {0: {"a": "1"}, 1: {"a": "2"}}) or "").startswith("process 1 differs")


def test_process_0_is_named_when_all_others_agree() -> None:
    assert (difference("x", {0: {"a": "1"}, 1: {"a": "2"}, 2: {"a": "2"}}) or "").startswith("process 0 differs")


def test_item_that_one_process_lacks_is_a_difference() -> None:
    text = difference("x", {0: {"a": "1", "b": "1"}, 1: {"a": "1"}}) or ""
    assert "process 1 differs" in text and "missing" in text


def test_equal_items_are_no_difference() -> None:
    assert difference("x", {0: {"a": "1"}, 1: {"a": "1"}}) is None


class SharedKeys:
    """The coordination service, for threads that stand for processes."""

    def __init__(self, count: int) -> None:
        self.count, self._held, self._changed = count, dict[str, str](), threading.Condition()

    def set(self, key: str, value: str, *, overwrite: bool = False) -> None:
        with self._changed:
            assert overwrite or key not in self._held
            self._held[key] = value
            self._changed.notify_all()

    def get(self, key: str, timeout_s: float) -> str | None:
        with self._changed:
            self._changed.wait_for(lambda: key in self._held, timeout_s)
            return self._held.get(key)

    def get_folder(self, folder: str) -> dict[str, str]:
        with self._changed:
            return {key.removeprefix(folder + "/"): value for key, value in self._held.items() if key.startswith(folder + "/")}

    def delete(self, key: str) -> None:
        with self._changed:
            for name in [name for name in self._held if name == key or name.startswith(key + "/")]:
                del self._held[name]


def service_of(count: int) -> Service:
    return cast("Service", SharedKeys(count))


def fed(service: Service, index: int, batches: list[int]) -> tuple[int, str]:
    """Run the steps of one process that feeds these batches: how many began, and the error that stopped it."""
    checks = StepChecks(service, index, lambda why, code: None)
    for number, batch in enumerate(batches):
        checks.note("batch", batch)
        try:
            checks.begin()
        except JobError as error:
            return number, str(error)
    checks.stop()
    return len(batches), ""


@pytest.mark.parametrize(
    "spoiled",
    [[0, 1, 2, 4, 5, 6, 7, 8], [0, 1, 2, 2, 3, 4, 5, 6], [0, 1, 2, 9, 4, 5, 6, 7]],
    ids=["a step skipped", "a step run twice", "another batch"],
)
def test_process_whose_steps_are_not_the_others_is_stopped_within_one_step(spoiled: list[int]) -> None:
    service, right = service_of(3), [*range(8)]
    with ThreadPoolExecutor(3) as pool:
        runs = [pool.submit(fed, service, i, spoiled if i == 1 else right) for i in range(3)]
        for begun, error in (run.result() for run in runs):
            assert begun in (3, 4)  # batch 3 was the first to differ: it may begin, the next step does not
            assert error.startswith("process 1 differs from the others at step 3: batch")


def test_processes_that_feed_the_same_go_on() -> None:
    service = service_of(2)
    with ThreadPoolExecutor(2) as pool:
        assert [run.result() for run in [pool.submit(fed, service, i, [*range(50)]) for i in range(2)]] == [(50, "")] * 2


def test_meeting_before_a_program_names_who_does_not_come() -> None:
    service = service_of(2)
    with pytest.raises(JobError, match="process 1 did not reach program 0 \\(step\\) within 0.1 s"):
        compare(service, 0, "program 0 (step)", {"a": "1"}, 0.1)


# Who stopped first


class Bitten:
    """A watchdog whose warnings and stalls are kept."""

    def __init__(self, service: Service, index: int, limits: Limits) -> None:
        self.stalls: list[tuple[int | None, str]] = []
        self.warnings: list[str] = []
        self.over = threading.Event()
        self.dog = Watchdog(service, index, 2, limits, self._on_stall, self.warnings.append)

    def _on_stall(self, culprit: int | None, why: str) -> None:
        self.stalls.append((culprit, why))
        self.over.set()

    def step(self) -> None:
        self.dog.enter()
        self.dog.leave()


def test_watchdog_calls_when_steps_stop_and_names_the_process_that_is_behind() -> None:
    service = service_of(2)
    here, there = (Bitten(service, i, Limits(1.0, 60.0)) for i in range(2))
    for _ in range(4):
        here.step()
    there.step()
    assert here.over.wait(20)
    assert here.stalls[0][0] == 1
    assert "process 1 stopped first: it did not get past step 1, between steps" in here.stalls[0][1]
    there.dog.stop()


class SlowKeys(SharedKeys):
    """A service that takes its time."""

    def set(self, key: str, value: str, *, overwrite: bool = False) -> None:
        time.sleep(0.3)
        super().set(key, value, overwrite=overwrite)


def test_no_heartbeat_is_under_way_when_a_watchdog_has_stopped() -> None:
    """Python would shut down while a thread is in jax's client, which aborts the process."""
    service = SlowKeys(2)
    dog = Bitten(cast("Service", service), 1, Limits(1.0, 60.0)).dog
    dog.stop()
    assert not any(thread.is_alive() for thread in dog._threads)
    assert "left" in service.get_folder("spmd/heartbeat")["1"]


def test_watchdog_waits_for_what_is_announced_as_long_and_for_the_first_step() -> None:
    service = service_of(2)
    first, saving = Bitten(service, 0, Limits(0.1, 60.0)), Bitten(service, 1, Limits(0.1, 60.0))
    first.dog.enter()
    with saving.dog.extended("saving"):
        assert not first.over.wait(0.7) and not saving.over.is_set()
        assert saving.dog.limit_s == 60.0
    for each in (first, saving):
        each.dog.stop()


def test_process_that_stops_as_a_whole_is_named_also_while_it_compiles() -> None:
    service = service_of(2)
    here, there = (Bitten(service, i, Limits(1.0, 600.0, silent_s=2.0)) for i in range(2))
    stopped = threading.Event()

    def set_unless_stopped(key: str, value: str, *, overwrite: bool = False) -> None:
        if key.endswith("/1") and stopped.is_set():
            threading.Event().wait(30)  # as a process does that got SIGSTOP
        SharedKeys.set(cast("SharedKeys", service), key, value, overwrite=overwrite)

    service.set = set_unless_stopped
    assert not here.over.wait(1.5)
    stopped.set()
    assert here.over.wait(20)
    assert here.stalls[0][0] == 1
    assert "process 1 stopped first: no heartbeat for " in here.stalls[0][1]
    there.dog.stop()


def test_process_that_has_left_in_order_is_not_missed() -> None:
    service = service_of(2)
    here, there = (Bitten(service, i, Limits(0.5, 600.0, silent_s=2.0)) for i in range(2))
    there.dog.stop()
    assert not here.over.wait(2.5)
    here.dog.stop()


def test_step_of_three_medians_and_more_is_told_once() -> None:
    here = Bitten(service_of(2), 0, Limits(3.0, 60.0))
    for _ in range(8):
        here.step()
    assert here.over.wait(20)
    assert len(here.warnings) == 1
    assert here.warnings[0].startswith("step 8 has taken")


def beats(*steps_phases_counts: tuple[int, str, int]) -> dict[int, Heartbeat]:
    return {i: Heartbeat(*entry) for i, entry in enumerate(steps_phases_counts)}


@pytest.mark.parametrize(
    ("before", "now", "culprit"),
    [
        (beats((9, "in a step", 5), (9, "in a step", 7), (9, "in a step", 5)), beats((9, "x", 8), (9, "x", 7), (9, "x", 8)), 1),
        (beats((9, "x", 5), (8, "x", 5), (9, "x", 5)), beats((9, "in a step", 8), (8, "in a step", 8), (9, "in a step", 8)), 1),
        (beats((9, "x", 5), (9, "x", 5), (9, "x", 5)), beats((9, "in a step", 8), (9, "in a step", 8), (9, "between steps", 8)), 2),
        (beats((9, "x", 5), (9, "x", 5), (9, "x", 5)), beats((9, "in a step", 8), (9, "in a step", 8), (9, "in a step", 8)), None),
        (beats((9, "x", 5)), beats((9, "in a step", 8), (9, "in a step", 8)), 2),
    ],
    ids=["no heartbeat", "fewest steps", "not in a step", "all in the same step", "never came"],
)
def test_process_that_stopped_first_is_named(before: dict[int, Heartbeat], now: dict[int, Heartbeat], culprit: int | None) -> None:
    assert blame(before, now, 0, 3, "here")[0] == culprit


# Preemption


def test_all_processes_stop_at_the_same_step_wherever_they_are() -> None:
    """Threads stand for processes: each runs its own way, one is told to stop; step n of one needs step n of all."""
    for trial in range(20):
        rng, count = random.Random(trial), 4
        everyone: list[Preemption] = []

        def say(index: int, step: int, everyone: list[Preemption] = everyone) -> None:
            for other in everyone:
                other.record(index, step)

        everyone += [Preemption(count, lambda step, i=i: say(i, step)) for i in range(count)]
        together = threading.Barrier(count, timeout=20)
        told = rng.randrange(1, 20)

        def run(index: int, everyone: list[Preemption] = everyone, together: threading.Barrier = together, told: int = told) -> int:
            for step in range(100):
                if everyone[index].should_stop(step):
                    return step
                together.wait()  # the step's collective
                if index == 1 and step == told:
                    for other in everyone:
                        threading.Thread(target=other.request_stop).start()
            return -1

        with ThreadPoolExecutor(count) as pool:
            stopped = {future.result() for future in [pool.submit(run, i) for i in range(count)]}
        assert len(stopped) == 1 and stopped.pop() >= told


def test_process_that_does_not_say_where_it_is_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mesh.job._preemption.AGREE_ON_STOP_S", 0.1)
    preemption = Preemption(2, lambda step: preemption.record(0, step))
    preemption.request_stop()
    with pytest.raises(JobError, match="process 1 did not report the step at which it can stop within 0.1 s"):
        preemption.should_stop(3)
