"""`spmd launch` with real processes: started as one, ended as one, and started again."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mesh.job._place import PREEMPTED, STUCK
from mesh.launch import main
from mesh.launch._attempt import meaning
from mesh.launch._launch_options import parse
from tests import launched
from tests.launched import LAUNCH_WITHOUT_TORCH, command, environ, launch, start, steps
from tests.ports import reserve_port

TWO = ("-n", 2, "--devices-per-process", 2)
QUICK = ("-n", 2, "--devices-per-process", 1, "--preload", "jax")  # for programs that need no torch


def script(folder: Path, text: str) -> Path:
    path = folder / "program.py"
    path.write_text(text, encoding="utf-8")
    return path


def wait_for(what: Any, timeout_s: float = 240.0) -> Any:
    """The first truthy value of `what()`."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"nothing came within {timeout_s} s")


def is_running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def pids_of(job: Path) -> dict[str, int]:
    path = job / "pids.json"
    return json.loads(path.read_text(encoding="utf-8"))["pids"] if path.exists() else {}


def equal(one: Path, other: Path) -> bool:
    a, b = np.load(one / "checkpoint.npz"), np.load(other / "checkpoint.npz")
    return sorted(a) == sorted(b) and all(np.array_equal(a[name], b[name]) for name in a)


@pytest.fixture(scope="session")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten steps of the job on two processes of two devices, undisturbed."""
    folder = tmp_path_factory.mktemp("unbroken")
    done = launch(*TWO, arguments=("--out", folder, "--steps", 10))
    assert done.code == 0, done.err
    return folder


def test_killed_gang_resumes_and_ends_bit_identical(unbroken: Path, tmp_path: Path) -> None:
    job, out = tmp_path / "job", tmp_path / "out"
    running = start(*TWO, "--restarts", 1, "--job-dir", job, arguments=("--out", out, "--steps", 10, "--pause", 0.05))
    wait_for(lambda: len(steps(out)) > 6)
    os.kill(pids_of(job)["1"], signal.SIGKILL)
    code, err = running.result().code, running.result().err
    assert code == 0, err
    assert "process 1" in err and "failed first" in err and "killed by SIGKILL" in err
    assert "restarting all 2 processes from the checkpoint of step 5 (restart 1)" in err
    assert [step["step"] for step in steps(out) if step["attempt"] == 1] == [5, 6, 7, 8, 9]
    assert equal(out, unbroken)


def test_sigterm_to_one_stops_all_before_the_same_step_and_none_is_lost(unbroken: Path, tmp_path: Path) -> None:
    job, out = tmp_path / "job", tmp_path / "out"
    arguments = ("--out", out, "--steps", 10, "--save-every", 100, "--pause", 0.1)
    running = start(*TWO, "--job-dir", job, arguments=arguments)
    wait_for(lambda: len(steps(out)) > 2)
    os.kill(pids_of(job)["1"], signal.SIGTERM)
    assert running.result().code == PREEMPTED, running.result().err
    done = len(steps(out))
    assert done < 10
    resumed = launch(*TWO, arguments=arguments)
    assert resumed.code == 0, resumed.err
    assert [step["step"] for step in steps(out)] == [*range(10)]
    assert equal(out, unbroken)


@pytest.mark.parametrize(
    ("spoil", "code", "text"),
    [("raise", 1, "process 1 (host"), ("exit", 3, "exit code 3"), ("stop", STUCK, "process 1 stopped first: no heartbeat")],
)
def test_first_failure_is_named_last_and_is_the_jobs_exit_code(spoil: str, code: int, text: str, tmp_path: Path) -> None:
    options = ("--watchdog", 2, "--first-step", 120)
    done = launch(*TWO, *options, arguments=("--out", tmp_path, "--steps", 8, "--spoil", spoil, "--rank", 1, "--at", 4))
    assert done.code == code, done.err
    assert done.last_line.startswith("spmd launch: process") and text in done.last_line
    if spoil == "raise":
        last = done.err[: done.err.rindex("spmd launch")].strip().splitlines()
        assert last[-1] == "ValueError: injected failure"
        assert "Traceback (most recent call last):" in last


@pytest.mark.parametrize(
    ("spoil", "item"), [("spec", "state"), ("constant", "program"), ("order", "mesh"), ("data", "step 4: uploaded"), ("lr", "numbers")]
)
def test_process_that_differs_is_refused_by_name_and_item(spoil: str, item: str, tmp_path: Path) -> None:
    done = launch(*TWO, arguments=("--out", tmp_path, "--steps", 8, "--spoil", spoil, "--rank", 1, "--at", 4))
    assert done.code == 1
    assert "process 1 differs from the others at" in done.err and item in done.err.partition("process 1 differs")[2].splitlines()[0]
    noted = len(steps(tmp_path))
    assert noted == 0 if spoil in ("spec", "constant", "order") else noted <= 6  # before the first step, or within one


def test_gives_up_after_so_many_failures_without_a_new_checkpoint(tmp_path: Path) -> None:
    program = script(tmp_path, "import mesh, sys\nmesh.init()\nsys.exit(9)\n")
    done = launch(*QUICK, "--restarts", 2, program=program)
    assert done.code == 9
    assert done.err.count("restarting all 2 processes from the start") == 2
    assert "giving up after 3 failures without a checkpoint, --restarts 2" in done.last_line


def test_failures_after_new_checkpoints_are_progress(tmp_path: Path) -> None:
    text = f"""import mesh, sys, pathlib
host = mesh.init()
count = pathlib.Path({str(tmp_path)!r}) / "count"
mesh.barrier("read")
before = int(count.read_text()) if count.exists() else 0
mesh.barrier("all read")
if host.index == 0:
    count.write_text(str(before + 1))
    mesh.report_saved(before + 1)
mesh.barrier("written")
sys.exit(0 if before == 3 else 9)
"""
    done = launch(*QUICK, "--restarts", 1, program=script(tmp_path, text))
    assert done.code == 0, done.err
    assert done.err.count("restarting all 2 processes") == 3


def test_children_of_the_processes_die_with_a_killed_launcher(tmp_path: Path) -> None:
    text = f"""import mesh, subprocess, time, pathlib, os
host = mesh.init()
child = subprocess.Popen(["sleep", "1000"])
pathlib.Path({str(tmp_path)!r}, f"pids{{host.index}}").write_text(f"{{os.getpid()}} {{child.pid}}\\n")
time.sleep(1000)
"""
    quick = command(*QUICK, program=script(tmp_path, text), launcher=LAUNCH_WITHOUT_TORCH)
    running = subprocess.Popen(quick, env=environ(), stderr=subprocess.DEVNULL)
    files = [tmp_path / f"pids{i}" for i in range(2)]
    wait_for(lambda: all(path.exists() and path.read_text().endswith("\n") for path in files))
    pids = [int(pid) for path in files for pid in path.read_text().split()]
    running.kill()
    running.wait()
    wait_for(lambda: not any(map(is_running, pids)), 10)


def test_process_held_at_its_first_instruction_is_ended_and_named(tmp_path: Path) -> None:
    (tmp_path / "holding.py").write_text("""import os, signal
forks = 0
def count():
    global forks
    forks += 1
def hold():
    if forks == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
os.register_at_fork(before=count, after_in_child=hold)
""")
    job, program = tmp_path / "job", script(tmp_path, "import mesh\nmesh.init()\n")
    options = ("-n", 2, "--devices-per-process", 1, "--preload", "jax,holding", "--job-dir", job, "--watchdog", 1, "--restarts", 1)
    env = environ()
    running = subprocess.Popen(
        command(*options, program=program, launcher=LAUNCH_WITHOUT_TORCH),
        env={**env, "PYTHONPATH": f"{env['PYTHONPATH']}:{tmp_path}"},
        stderr=subprocess.PIPE,
        text=True,
    )
    wait_for(lambda: pids_of(job))
    first = pids_of(job)
    _, err = running.communicate(timeout=240)
    assert running.returncode == 0, err
    assert "stopped first: it has been stopped by a signal for" in err
    assert not any(map(is_running, first.values()))


def test_ctrl_c_ends_everything(tmp_path: Path) -> None:
    text = "import mesh, time\nhost = mesh.init()\nprint('here', flush=True)\ntime.sleep(1000)\n"
    running = subprocess.Popen(
        command(*QUICK, "--job-dir", tmp_path, program=script(tmp_path, text), launcher=LAUNCH_WITHOUT_TORCH),
        env=environ(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert running.stdout is not None
    for _ in range(2):
        assert running.stdout.readline().endswith(b"here\n")
    running.send_signal(signal.SIGINT)
    running.communicate(timeout=120)
    assert running.returncode == 130
    assert not any(map(is_running, pids_of(tmp_path).values()))


def test_sigterm_while_the_interpreter_ends_is_no_failure(tmp_path: Path) -> None:
    text = """
    import builtins, os
    import mesh

    mesh.init()

    class Late:
        def __del__(self, kill=os.kill, pid=os.getpid()):
            os.write(1, b"late\\n")
            kill(pid, 15)

    builtins.late = Late()  # the last module to go: after what is registered with atexit, and after Python's own handlers
    """
    done = launch(*QUICK, program=script(tmp_path, textwrap.dedent(text)))
    assert done.out.count("late") == 2
    assert done.code == 0, done.err


def test_process_that_never_comes_is_named(tmp_path: Path) -> None:
    address = f"127.0.0.1:{reserve_port()}"
    run = [sys.executable, "-m", "mesh.launch", "--node", "0", "--local", "1", "-n", "2", "--coordinator", address, "--timeout", "1"]
    program = script(tmp_path, "import mesh\nmesh.init()\n")
    node = subprocess.Popen([*run, str(program)], env=environ(), stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert node.stdin is not None and node.stderr is not None
    node.stdin.write("{}\n")
    node.stdin.flush()  # and stays open: a node whose stdin closes has lost who started it
    assert node.wait(120) == 1
    assert "process 1 did not report within 1 s" in node.stderr.read()
    node.stdin.close()
    node.stderr.close()


def test_hosts_over_ssh_run_one_job_and_end_together(tmp_path: Path) -> None:
    """With a stand-in for ssh that runs the command here: what is passed on, and how it ends, is the same."""
    ssh = tmp_path / "ssh"
    ssh.write_text('#!/bin/sh\nshift\nexec sh -c "$1"\n', encoding="utf-8")
    ssh.chmod(0o755)
    text = "import mesh, sys\nhost = mesh.init()\nmesh.barrier('b')\nprint(host, flush=True)\nmesh.barrier('c')\n"
    text += "sys.exit(host.index == 3 and 'told to fail')\n"
    options = ("-n", 4, "--hosts", "one,two", "--ssh", ssh, "--coordinator", f"127.0.0.1:{reserve_port()}", "--preload", "jax")
    done = launch(*options, program=script(tmp_path, text))
    assert done.code == 1, done.err
    assert sorted(line.partition("] ")[2] for line in done.out.splitlines()) == [f"process {i} of 4" for i in range(4)]
    assert "told to fail" in done.err
    assert "host two failed first" in done.last_line


LISTENING = """import mesh, jax, os
host = mesh.init()
mesh.barrier("all")
jax.device_count()
inodes = set()
for descriptor in os.listdir("/proc/self/fd"):
    try:
        target = os.readlink(f"/proc/self/fd/{descriptor}")
    except OSError:
        continue
    if target.startswith("socket:["):
        inodes.add(target[8:-1])
for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
    for line in open(table).readlines()[1:]:
        words = line.split()
        if words[3] == "0A" and words[9] in inodes:
            print("listens on", words[1].partition(":")[0], flush=True)
mesh.barrier("read")
"""


def test_job_on_one_machine_listens_on_loopback_only(tmp_path: Path) -> None:
    done = launch(*QUICK, program=script(tmp_path, LISTENING))
    assert done.code == 0, done.err
    addresses = [line.rpartition(" ")[2] for line in done.out.splitlines() if "listens on" in line]
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert len(addresses) >= 2  # the roll call's port and jax's service
    assert set(addresses) <= loopback


def test_second_job_at_the_same_address_is_refused_and_the_first_goes_on(tmp_path: Path) -> None:
    text = f"""import mesh, pathlib, time
host = mesh.init()
mesh.barrier("in")
here = pathlib.Path({str(tmp_path)!r})
(here / f"in{{host.index}}").touch()
while not (here / "go").exists():
    time.sleep(0.05)
mesh.barrier("still fine")
"""
    address = ("--coordinator", f"127.0.0.1:{reserve_port()}")
    program = script(tmp_path, text)
    quick = command(*QUICK, *address, program=program, launcher=LAUNCH_WITHOUT_TORCH)
    first = subprocess.Popen(quick, env=environ(), stderr=subprocess.PIPE, text=True)
    wait_for(lambda: (tmp_path / "in0").exists() and (tmp_path / "in1").exists())
    second = launch(*QUICK, *address, "--timeout", 3, program=program)
    (tmp_path / "go").touch()
    _, err = first.communicate(timeout=240)
    assert second.code == 1 and "is in use: another job or program listens there" in second.err
    assert first.returncode == 0, err


# The command line


def test_program_keeps_its_own_options() -> None:
    options = parse(["-n", "2", "train.py", "--steps", "3", "-n", "7"], "x", ("jax",))
    assert options.processes == 2
    assert options.program == ("train.py", "--steps", "3", "-n", "7")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ([], "no program to run"),
        (["-n", "3", "--hosts", "a,b", "x.py"], "does not divide over 2 hosts"),
        (["--hosts", "a,a", "-n", "2", "x.py"], "a host is named twice"),
        (["--restarts", "-1", "x.py"], "--restarts must be at least 0, got -1"),
    ],
)
def test_options_that_make_no_sense_are_refused(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parse(arguments, "x", ())
    assert text in capsys.readouterr().err


def test_emit_writes_instead_of_running(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--emit", "slurm", "--out", str(tmp_path), "-n", "2", "no-such-file.py"]) == 0
    assert str(tmp_path / "no-such-file.sbatch") in capsys.readouterr().err


@pytest.mark.parametrize(
    ("code", "text"), [(3, "exit code 3"), (-9, "killed by SIGKILL: out of memory, or killed from outside"), (-11, "killed by SIGSEGV")]
)
def test_exit_codes_in_words(code: int, text: str) -> None:
    assert meaning(code) == text


def test_single_process_pays_nothing_and_is_never_told_to_stop() -> None:
    run = "import mesh\nassert mesh.init().count == 1\nassert not mesh.should_stop(0)\nmesh.barrier('b')\n"
    run += "with mesh.extended_timeout('x'): pass\n"
    run += "mesh.virtual_devices(2)\nimport spmd, torch\nf = spmd.compile(lambda x: x + 1)\nf(torch.ones(2).to('jax'))\n"
    run += "assert f._latest.watched is None\nimport threading\n"
    run += "names = {t.name for t in threading.enumerate()} - {'progress'}\n"  # which says what takes long, and ends by itself
    run += "assert names <= {'MainThread', 'SIGTERM'}\n"
    done = launched.run(run)
    assert done.code == 0, done.err
