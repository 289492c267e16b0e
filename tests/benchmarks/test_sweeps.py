"""Sweeps run in processes of their own: one that dies costs an answer and not the run, and each command line writes what it found."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import faults
from benchmarks.worker import ROOT, Worker, merged, shard_of

SERVE = "import os; from benchmarks.worker import serve; serve(lambda a: os._exit(3) if 'die' in a else [a, print('aside')], 'hello')"


def test_a_worker_that_dies_costs_one_answer() -> None:
    worker = Worker([sys.executable, "-c", SERVE])
    assert worker.hello == "hello"
    assert worker.ask({"op": "add"}, 60.0) == [{"op": "add"}, None]
    assert worker.ask({"die": ""}, 60.0) == "the process died with exit code 3"
    worker.stop()


def test_a_worker_that_died_unasked_costs_one_answer() -> None:
    worker = Worker([sys.executable, "-c", "print('0')"])
    worker.process.wait()
    assert worker.ask({"op": "add"}, 60.0) == "the process died with exit code 0"
    worker.stop()


def test_shards_are_put_together_again(tmp_path: Path) -> None:
    names = [f"op{i}" for i in range(7)]
    parts = [tmp_path / f"{i}.json" for i in range(3)]
    for i, path in enumerate(parts):
        path.write_text(json.dumps({name: {"float32": {"forward": "pass"}} for name in shard_of(names, f"{i}/3")}))
    (tmp_path / "more.json").write_text(json.dumps({"op3": {"float32": {"grad": "pass"}, "int64": {"forward": "fail"}}}))
    found = merged([*parts, tmp_path / "more.json"])
    assert sorted(found) == names
    assert found["op3"] == {"float32": {"forward": "pass", "grad": "pass"}, "int64": {"forward": "fail"}}


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        ("ops", "--ops", "^(abs|add)$", "--dtypes", "float32"),
        ("layouts", "--trials", "3"),
        ("fuzz", "--minutes", "0.01"),
        ("statements", "--every", "400"),
        ("models", "--models", "^ResNet$", "--columns", "eager"),
        ("dynamo_models", "--models", "^ResNet$"),
        ("presets", "--models", "Llama", "--forms", "megatron"),
        ("memory", "--layers", "1", "--width", "128", "--positions", "128"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_a_command_line_writes_what_it_found(arguments: tuple[str, ...], tmp_path: Path) -> None:
    name, *options = arguments
    out = tmp_path / "out.json"
    command = [sys.executable, "-m", f"benchmarks.{name}", *options, "--json", str(out)]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, "JAX_PLATFORMS": "cpu"}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert json.loads(out.read_text(encoding="utf-8"))


def test_a_row_that_cannot_be_run_here_leaves_its_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "faults.json"
    record.write_text(json.dumps({"network": {"trials": 1}}), encoding="utf-8")
    monkeypatch.setattr(faults, "RESULTS", record)
    monkeypatch.setattr(os, "geteuid", lambda: 1)
    monkeypatch.setattr(sys, "argv", ["faults.py", "--rows", "network"])
    faults.main()
    assert json.loads(record.read_text(encoding="utf-8")) == {"network": {"trials": 1}}
    record.unlink()
    faults.main()
    assert json.loads(record.read_text(encoding="utf-8"))["network"]["not run"] == "needs root, ip and nft"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("row", "counted"),
    [
        ("detection", ("deaths named", "standstills noticed", "standstills whose process was named")),
        ("mismatch", ("refused before the first collective",)),
        ("skew", ("caught within one step",)),
        ("preemption", ("no step lost",)),
    ],
)
def test_a_fault_is_thrown_and_counted(row: str, counted: tuple[str, ...]) -> None:
    throw, _ = faults.ROWS[row]
    found = throw(2, random.Random(0))
    assert {what: found[what] for what in counted} == dict.fromkeys(counted, 2), found.get("failed")
