"""Injects faults of many kinds into benchmarks/faulty_job.py under `spmd launch`, and counts the jobs that survive.

    python benchmarks/faults.py                                 # all rows with the trials of docs/reliability.md: an hour
    python benchmarks/faults.py --rows processes --trials 12

Results are written to benchmarks/results/faults.json, row by row, with the number of trials and the load of the machine. A job survives
if its final weights equal those of a run without faults, bit for bit. The network row creates two network namespaces and needs root, ip
and nft. Without them it is not run, and its recorded result is kept.
"""

from __future__ import annotations

import argparse
import collections
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
JOB = ROOT / "benchmarks" / "faulty_job.py"
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
LAUNCH = [sys.executable, "-W", "ignore", "-m", "spmd.cli", "launch"]
STEPS = 12
WATCHDOG_S = 4.0
SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGSEGV": signal.SIGSEGV,
    "SIGSTOP": signal.SIGSTOP,
    "exception": signal.SIGUSR1,
    "out of memory": signal.SIGUSR2,
}
NETWORK_WATCHDOG_S = 12.0  # longer than the flap
SLOW_LINK, DELAY_S = "slow", 0.05  # the second link between the two hosts, and its delay each way
SLOW_STEP = "so far, the median is"  # part of the message about a step that takes three times the median or more
Row = dict[str, Any]
Result = TypeVar("Result")


def environ(**more: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **more}


class Trial:
    """One run of the job, in its own folder.

    Args:
        options: options of the launcher.
        arguments: arguments of the job.
        size: options of the launcher for the number of processes and devices.
    """

    def __init__(
        self, *options: object, arguments: tuple[object, ...] = (), size: tuple[object, ...] = ("-n", 2, "--devices-per-process", 2)
    ):
        self.folder = Path(tempfile.mkdtemp(prefix="faults-"))
        self.out, self.job = self.folder / "out", self.folder / "job"
        words = [*LAUNCH, *size, "--watchdog", WATCHDOG_S, "--first-step", 60, "--job-dir", self.job, *options]
        command = [*map(str, words), str(JOB), "--out", str(self.out), "--steps", str(STEPS), *map(str, arguments)]
        self.began = time.time()
        self.err = (self.folder / "err").open("w+", encoding="utf-8")
        self.process = subprocess.Popen(command, env=environ(), stdout=subprocess.DEVNULL, stderr=self.err, cwd=ROOT)

    def pids(self) -> dict[int, int]:
        try:
            return {int(k): v for k, v in json.loads((self.job / "pids.json").read_text(encoding="utf-8"))["pids"].items()}
        except (OSError, ValueError):
            return {}

    def steps(self, process: int = 0) -> list[dict[str, Any]]:
        path = self.out / f"steps-{process}.jsonl"
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith("}")]

    def record(self, name: str) -> dict[str, Any]:
        path = self.job / name
        return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}

    def wait(self, timeout_s: float = 120.0) -> int:
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            return -1000

    def text(self) -> str:
        self.err.seek(0)
        return self.err.read()

    def is_like(self, reference: Path) -> bool:
        path = self.out / "checkpoint.npz"
        if not path.exists():
            return False
        with np.load(path) as ours, np.load(reference) as theirs:
            return sorted(ours) == sorted(theirs) and all(np.array_equal(ours[name], theirs[name]) for name in ours)

    def cleanup(self) -> None:
        self.err.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def until(what: Callable[[], Any], timeout_s: float = 60.0) -> Any:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        found = what()
        if found:
            return found
        time.sleep(0.01)
    return None


def reference_run(**kwargs: Any) -> tuple[Path, float]:
    """Run the job without faults. Returns the file with its weights, and its seconds."""
    trial = Trial("--restarts", 0, **kwargs)
    code = trial.wait()
    assert code == 0, trial.text()
    kept = Path(tempfile.mkdtemp(prefix="faults-reference-")) / "checkpoint.npz"
    shutil.copy(trial.out / "checkpoint.npz", kept)
    seconds = time.time() - trial.began
    trial.cleanup()
    return kept, seconds


def tried(trials: int, rng: random.Random, one: Callable[[int, random.Random], Result], at_once: int | None = None) -> list[Result]:
    """The results of `one(number, rng)` for every trial. `at_once` run in parallel (None: one per core), each with its own `rng`."""
    seeds = [rng.random() for _ in range(trials)]
    with ThreadPoolExecutor(at_once or os.cpu_count()) as pool:
        return list(pool.map(lambda number: one(number, random.Random(seeds[number])), range(trials)))


def processes(trials: int, rng: random.Random, at_once: int | None = None) -> Row:
    """Inject a random fault into a random process at a random time: during import, joining, compilation, steps or saving."""
    reference, seconds = reference_run(arguments=("--pause", 0.05))

    def one(number: int, rng: random.Random) -> tuple[str, float | None, str]:
        """Returns the kind of fault, the seconds to recover (None: no restart), and the reason of a failure or ""."""
        kind, rank, after = rng.choice(list(SIGNALS)), rng.randrange(2), rng.uniform(0.05, 0.95) * seconds
        while True:
            trial = Trial("--restarts", 3, arguments=("--pause", 0.05))
            pid = until(lambda trial=trial: trial.pids().get(rank))
            time.sleep(max(0.0, after - (time.time() - trial.began)))
            injected = time.time()
            with suppress(ProcessLookupError):
                os.kill(pid, SIGNALS[kind])
                break
            trial.wait()  # it was faster than the reference run and has ended without a fault; try again with an earlier fault
            trial.cleanup()
            after *= 0.8
        code = trial.wait()
        failed = "" if code == 0 and trial.is_like(reference) else f"trial {number}: {kind} to {rank} after {after:.1f} s: code {code}: "
        again = [step["time"] for step in trial.steps() if step["attempt"] > 0]
        found = (kind, again[0] - injected if again else None, failed and failed + trial.text()[-600:])
        trial.cleanup()
        return found

    found = tried(trials, rng, one, at_once)
    recoveries = sorted(recovery for _, recovery, _ in found if recovery is not None)
    of_dead = [recovery for kind, recovery, _ in found if recovery is not None and kind != "SIGSTOP"]
    good = collections.Counter(kind for kind, _, failed in found if not failed)
    return {
        "trials": trials,
        "survived bit-identical": good.total(),
        "by kind": {kind: good[kind] for kind in SIGNALS},
        "restarted": len(recoveries),
        "recovery median s": rounded(statistics.median(recoveries)) if recoveries else None,
        "recovery 99th percentile s": rounded(recoveries[math.ceil(0.99 * len(recoveries)) - 1]) if recoveries else None,
        "recovery worst s": rounded(max(recoveries)) if recoveries else None,
        "recovery median s, but for SIGSTOP": rounded(statistics.median(of_dead)) if of_dead else None,
        "watchdog s": WATCHDOG_S,
        "failed": [failed for _, _, failed in found if failed],
    }


def detection(trials: int, rng: random.Random) -> Row:
    """Measure how soon a dead and a stuck process are detected, and whether the right process is named."""
    deaths, hangs, named, hung = [], [], 0, 0
    for number in range(trials):
        rank = rng.randrange(2)
        trial = Trial(arguments=("--pause", 0.05))
        until(lambda trial=trial: len(trial.steps()) > 3)
        injected = time.time()
        os.kill(trial.pids()[rank], signal.SIGKILL)
        trial.wait()
        first = trial.record("first-exit-0.json")
        if first.get("process") == rank:
            deaths.append(first["seen"] - injected)
        trial.cleanup()
        spoil = ("hang", "stop")[number % 2]
        trial = Trial(arguments=("--spoil", spoil, "--rank", rank, "--at", 5))
        trial.wait()
        last = trial.steps(rank)[-1:]
        failures = [trial.record(f"failure-0-{i}.json") for i in range(2)]
        records = [record for record in failures if record.get("kind") == "stuck"]
        hung += bool(records)
        if records and last:
            hangs.append(min(record["time"] for record in records) - last[0]["time"])
            named += all(record["why"].startswith(f"process {rank} stopped first") for record in records)
        trial.cleanup()
    return {
        "trials": trials,
        "deaths named": len(deaths),
        "death noticed after s, worst": rounded(max(deaths)) if deaths else None,
        "standstills noticed": hung,
        "standstills whose process was named": named,
        "standstill noticed after s, worst": rounded(max(hangs)) if hangs else None,
        "watchdog s": WATCHDOG_S,
    }


def by_hand(
    rank_environ: dict[int, dict[str, str]], count_of: dict[int, int], options: tuple[object, ...] = ()
) -> tuple[list[int], str, int]:
    """Start two processes without the launcher, as a scheduler would. Returns exit codes, stderr, and the number of logged steps."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    port = 20_000 + random.randrange(5_000) * 2
    running: list[subprocess.Popen[str]] = []
    for rank in range(2):
        place = {
            "SPMD_COORDINATOR": f"127.0.0.1:{port}",
            "SPMD_PROCESS": str(rank),
            "SPMD_PROCESSES": str(count_of.get(rank, 2)),
            "SPMD_DEVICES": "2",
        }
        command = [
            sys.executable,
            "-W",
            "ignore",
            "-m",
            "mesh.launch",
            "--join",
            "--timeout",
            "15",
            str(JOB),
            "--out",
            str(folder),
            "--steps",
            "3",
        ]
        env = environ(**place, **rank_environ.get(rank, {}))
        if "PYTHONPATH" in rank_environ.get(rank, {}):
            env["PYTHONPATH"] += os.pathsep + str(ROOT)
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    texts = [process.communicate(timeout=120)[1] for process in running]
    noted = sum(1 for path in folder.glob("steps-*.jsonl") for _ in path.open(encoding="utf-8"))
    shutil.rmtree(folder)
    return [process.returncode for process in running], "\n".join(texts), noted


def mismatch(trials: int, rng: random.Random) -> Row:
    """One process runs a different program or configuration. Expected: an error that names the difference, before the first collective."""
    kinds = ["op", "shape", "dtype", "spec", "mesh", "constant", "seed", "flags", "versions", "count"]
    messages = {"flags": "flags", "versions": "versions of numpy", "count": "how many they are"}

    def one(number: int, rng: random.Random) -> tuple[str, str]:
        """Returns the kind of mismatch, and the reason of a failure or ""."""
        kind, rank = kinds[number % len(kinds)], rng.randrange(2)
        if kind in messages:
            with fake_version() as folder:
                changed = {"flags": {"XLA_FLAGS": "--xla_cpu_enable_fast_math=true"}, "versions": {"PYTHONPATH": str(folder)}, "count": {}}
                codes, text, noted = by_hand({rank: changed[kind]}, {rank: 3} if kind == "count" else {})
            good = all(codes) and noted == 0 and messages[kind] in text
        else:
            trial = Trial(arguments=("--spoil", kind, "--rank", rank))
            code, text = trial.wait(), trial.text()
            good = code == 1 and not trial.steps() and "differs from the others at program" in text
            trial.cleanup()
        return kind, "" if good else f"{kind} in {rank}: {text[-500:]}"

    found = tried(trials, rng, one)
    refused = collections.Counter(kind for kind, failed in found if not failed)
    return {
        "trials": trials,
        "refused before the first collective": refused.total(),
        "by kind": {kind: refused[kind] for kind in kinds},
        "failed": [failed for _, failed in found if failed],
    }


@contextmanager
def fake_version() -> Iterator[Path]:
    """A folder for PYTHONPATH whose metadata reports another version of numpy."""
    with tempfile.TemporaryDirectory() as name:
        info = Path(name) / "numpy-0.0.1.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: numpy\nVersion: 0.0.1\n", encoding="utf-8")
        yield Path(name)


def skew(trials: int, rng: random.Random) -> Row:
    """One process skips a step, repeats one, or uses different data or another learning rate. Expected: an error within one step."""
    kinds = ["skip", "double", "data", "lr"]

    def one(number: int, rng: random.Random) -> str:
        """Returns the reason of a failure, or ""."""
        kind, rank, at = kinds[number % len(kinds)], rng.randrange(2), rng.randrange(2, 8)
        trial = Trial(arguments=("--spoil", kind, "--rank", rank, "--at", at))
        code = trial.wait()
        noted = max((step["step"] for step in trial.steps()), default=-1)
        good = code == 1 and "differs from the others at step" in trial.text() and noted <= at + 1
        failed = "" if good else f"{kind} in {rank} at {at}: code {code}, steps to {noted}: {trial.text()[-500:]}"
        trial.cleanup()
        return failed

    failed = list(filter(None, tried(trials, rng, one)))
    return {"trials": trials, "caught within one step": trials - len(failed), "failed": failed}


def preemption(trials: int, rng: random.Random) -> Row:
    """Send SIGTERM to one process, to process 0 or to all at a random time, then resume. Expected: no step is lost.

    The runs also evaluate, and every second run saves checkpoints.
    """
    runs = [("--pause", 0.05, "--evaluate-every", 3, "--save-every", every) for every in (100, 2)]
    reference, seconds = reference_run(arguments=runs[0])

    def one(number: int, rng: random.Random) -> tuple[int, str]:
        """Returns the exit code, and the reason of a failure or ""."""
        target = ("one", "process 0", "all")[number % 3]
        trial = Trial(arguments=runs[number % 2])
        pids = until(lambda: trial.pids() if len(trial.pids()) == 2 else None)
        time.sleep(max(0.0, rng.uniform(0.1, 0.95) * seconds - (time.time() - trial.began)))
        targets = {"one": [pids[1]], "process 0": [pids[0]], "all": [trial.process.pid]}[target]
        joined = (trial.job / "programs").exists()
        for pid in targets:
            if trial.process.poll() is None:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        code = trial.wait()
        done = [step["step"] for step in trial.steps()]
        again = subprocess.run(
            trial.process.args, env=environ(), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, cwd=ROOT, check=False
        )
        every = [step["step"] for step in trial.steps()]
        expected = (0, 75) if joined else (0, 75, 128 + signal.SIGTERM)
        good = code in expected and again.returncode == 0 and len(every) == len(set(every)) and trial.is_like(reference)
        text = f"{target}: code {code}, then {again.returncode}, steps {done} then {every}: {trial.text()[-400:]}{again.stderr[-300:]}"
        trial.cleanup()
        return code, "" if good else text

    found = tried(trials, rng, one)
    failed = [text for _, text in found if text]
    codes = collections.Counter(str(code) for code, _ in found)
    return {"trials": trials, "no step lost": trials - len(failed), "exit codes": dict(codes), "failed": failed}


def network(trials: int, rng: random.Random) -> Row:
    """Two hosts as network namespaces: link down, a flap of 5 s, one-way loss, partial loss, delay, and loss of the coordinator's ports."""
    if os.geteuid() or not shutil.which("ip") or not shutil.which("nft"):
        return {"trials": 0, "not run": "needs root, ip and nft"}
    row: Row = {"trials": 0, "watchdog s": NETWORK_WATCHDOG_S}
    with namespaces() as ssh:
        size = ("-n", 2, "--devices-per-process", 1, "--hosts", "fault-a,fault-b", "--ssh", ssh, "--coordinator", "10.77.0.1:8476")
        reference, _ = reference_run(size=size, arguments=("--pause", 0.3))
        for name, (start, end, lasts_s) in NETWORK.items():
            good, slow, seconds, wrong = 0, 0, [], []
            for _ in range(trials):
                trial = Trial("--restarts", 3, "--watchdog", NETWORK_WATCHDOG_S, size=size, arguments=("--pause", 0.3))
                until(lambda trial=trial: len(trial.steps(0)) > STEPS // 2)  # a slow step is detected by comparison with earlier ones
                injected = time.time()
                subprocess.run(["sh", "-c", start], check=True)
                time.sleep(lasts_s)
                subprocess.run(["sh", "-c", end], check=True)
                code = trial.wait(240)
                again = sum(step["attempt"] > 0 for step in trial.steps()) > 0
                was_reported = SLOW_STEP in trial.text()
                is_fine = code == 0 and trial.is_like(reference) and (not name.startswith("flap") or (was_reported and not again))
                good += is_fine
                slow += was_reported
                seconds.append(time.time() - injected)
                if not is_fine:
                    wrong.append(f"code {code}, restarted {again}, slow step reported {was_reported}: {trial.text()[-600:]}")
                trial.cleanup()
            row[name] = {
                "trials": trials,
                "ended bit-identical": good,
                "a slow step was said": slow,
                "seconds from the fault to the end, worst": rounded(max(seconds)),
                "failed": wrong,
            }
            row["trials"] += trials
    return row


def rules(where: str, text: str) -> str:
    return f"ip netns exec {where} nft '{text}'"


_CLEAR = " ; ".join(rules(name, "flush ruleset") for name in ("fault-a", "fault-b"))


def over_slow_link(verb: str) -> str:
    """The command to `add` or `del` the routes over the slow link."""
    routes = (("fault-a", "10.77.0.1", "10.77.0.2"), ("fault-b", "10.77.0.2", "10.77.0.1"))
    return " && ".join(f"ip -n {name} route {verb} {there}/32 dev {SLOW_LINK} src {here}" for name, here, there in routes)


def dropping(where: str, condition: str) -> str:
    return rules(where, f"add table ip t; add chain ip t o {{ type filter hook output priority 0; }}; add rule ip t o {condition} drop")


# name -> command that starts it, command that ends it, seconds between
NETWORK: dict[str, tuple[str, str, float]] = {
    "flap of 5 s": ("ip -n fault-b link set fb down", "ip -n fault-b link set fb up", 5.0),
    "link down for 30 s": ("ip -n fault-b link set fb down", "ip -n fault-b link set fb up", 30.0),
    "one way lost for 30 s": (dropping("fault-b", "ip daddr 10.77.0.1"), _CLEAR, 30.0),
    "1 % lost": (dropping("fault-b", "ip daddr 10.77.0.1 numgen random mod 100 < 1"), _CLEAR, 10.0),
    "5 % lost": (dropping("fault-b", "ip daddr 10.77.0.1 numgen random mod 100 < 5"), _CLEAR, 10.0),
    "20 % lost": (dropping("fault-b", "ip daddr 10.77.0.1 numgen random mod 100 < 20"), _CLEAR, 10.0),
    "50 ms delay": (over_slow_link("add"), over_slow_link("del"), 10.0),
    "coordinator's ports lost for 30 s": (dropping("fault-b", "tcp dport 8476-8600"), _CLEAR, 30.0),
}


@contextmanager
def namespaces() -> Iterator[str]:
    """Two connected network namespaces. Yields an ssh-like command that runs a command in one of them."""
    names = {"fault-a": ("fa", "10.77.0.1"), "fault-b": ("fb", "10.77.0.2")}
    host = os.uname().nodename
    for name, (_, address) in names.items():
        subprocess.run(["ip", "netns", "add", name], check=True)
        hosts = Path("/etc/netns") / name / "hosts"
        hosts.parent.mkdir(parents=True, exist_ok=True)
        hosts.write_text(f"127.0.0.1 localhost\n{address} {host}\n", encoding="utf-8")
    subprocess.run(["ip", "link", "add", "fa", "type", "veth", "peer", "name", "fb"], check=True)
    for name, (device, address) in names.items():
        subprocess.run(["ip", "link", "set", device, "netns", name], check=True)
        subprocess.run(["ip", "-n", name, "addr", "add", f"{address}/24", "dev", device], check=True)
        for each in (device, "lo"):
            subprocess.run(["ip", "-n", name, "link", "set", each, "up"], check=True)
    with tempfile.TemporaryDirectory() as folder:
        ssh = Path(folder) / "ssh"
        ssh.write_text('#!/bin/sh\nhost=$1\nshift\nexec ip netns exec "$host" sh -c "$*"\n', encoding="utf-8")
        ssh.chmod(0o755)
        command = [sys.executable, str(Path(__file__).with_name("slow_link.py")), SLOW_LINK, *names, str(DELAY_S)]
        slow = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        try:
            assert slow.stdout is not None and slow.stdout.readline() == "ready\n"
            for name in names:
                subprocess.run(["ip", "-n", name, "link", "set", SLOW_LINK, "up"], check=True)
            yield str(ssh)
        finally:
            slow.kill()
            slow.wait()
            for name in names:
                subprocess.run(["ip", "netns", "del", name], check=False)
                shutil.rmtree(Path("/etc/netns") / name, ignore_errors=True)


def rounded(seconds: float) -> float:
    return round(seconds, 2)


# name -> function, default number of trials
ROWS: dict[str, tuple[Callable[[int, random.Random], Row], int]] = {
    "processes": (processes, 300),
    "recovery": (partial(processes, at_once=1), 40),  # measures the time to recover, without other trials in parallel
    "detection": (detection, 20),
    "mismatch": (mismatch, 100),
    "skew": (skew, 30),
    "preemption": (preemption, 50),
    "network": (network, 1),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, help="number of trials of every row; default: as in docs/reliability.md")
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    for name in args.rows.split(","):
        began = time.time()
        run_row, default_trials = ROWS[name]
        row = run_row(args.trials or default_trials, random.Random(args.seed))
        row["seconds"] = round(time.time() - began)
        row["load of the machine"] = f"{os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
        record = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
        if "not run" not in row or name not in record:
            record[name] = row
            RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        print(name, json.dumps(row, indent=1), flush=True)


if __name__ == "__main__":
    main()
