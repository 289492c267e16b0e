"""One contender in a process of its own. A script, run by its path: it imports no `spmd`, so torchax can run it too.

    python _peer.py ours            # then one JSON command per line on standard input, one JSON answer per line back

A contender is a class `Contender(job)` in `peers/<name>.py` (and `prepare(job)`, called before, which sets up devices) with

    step()          run one training step and return without waiting for the devices
    wait()          until everything that `step` changed is there
    loss()          of the last step
    stages(cold)    seconds to trace, lower and compile a fresh program, or {} if there is no such thing
    program()       HLO text, memory, executables and retraces of the program that runs, or {}
    save(file), close(), device_kind     optional
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
import time
import traceback
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
sys.path.append(str(HERE.parents[1]))  # where `mesh` and `spmd` are, for a checkout that is not installed


def loaded(path: Path) -> Any:
    """`_task.load`, which is itself in a file to be loaded."""
    spec = importlib.util.spec_from_file_location("_bench_job", HERE / "_task.py")
    assert spec is not None and spec.loader is not None
    if "_bench_job" not in sys.modules:
        sys.modules["_bench_job"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["_bench_job"])
    return sys.modules["_bench_job"] if path.name == "_task.py" else sys.modules["_bench_job"].load(path)


class Peer:
    """Answers commands about one contender."""

    def __init__(self, name: str) -> None:
        self.module: Any = loaded(HERE / "peers" / f"{name}.py")
        self.contender: Any = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """What `command["do"]` names, with its other fields as arguments."""
        do = command.pop("do")
        return getattr(self, f"do_{do}")(**command)

    def do_make(self, job: dict[str, Any]) -> dict[str, Any]:
        asked = loaded(HERE / "_task.py").Job.from_dict(job)
        start = time.perf_counter()
        self.module.prepare(asked)
        self.contender = self.module.Contender(asked)
        kind = getattr(self.contender, "device_kind", "cpu")
        return {"make_s": time.perf_counter() - start, "versions": versions(), "device_kind": kind}

    def do_losses(self, count: int) -> dict[str, Any]:
        start, losses, first_step_s = time.perf_counter(), list[float](), 0.0
        for _ in range(count):
            self.contender.step()
            losses.append(self.contender.loss())
            first_step_s = first_step_s or time.perf_counter() - start
        self.contender.wait()
        return {"losses": losses, "first_step_s": first_step_s}

    def do_steps(self, count: int) -> dict[str, Any]:
        """Clocks of each step: seconds until its results are there, until the call returned, and CPU seconds of the calling thread."""
        clocks: dict[str, list[float]] = {"ready_s": [], "returned_s": [], "returned_cpu_s": []}
        for _ in range(count):
            cpu, start = time.thread_time(), time.perf_counter()
            self.contender.step()
            returned, cpu_returned = time.perf_counter(), time.thread_time()
            self.contender.wait()
            clocks["ready_s"].append(time.perf_counter() - start)
            clocks["returned_s"].append(returned - start)
            clocks["returned_cpu_s"].append(cpu_returned - cpu)
        return clocks

    def do_stages(self, cold: bool) -> dict[str, Any]:
        return self.contender.stages(cold)

    def do_program(self, hlo_path: str) -> dict[str, Any]:
        """The program's facts; its text goes to `hlo_path`, where the asking process reads it."""
        found = self.contender.program()
        if found:
            Path(hlo_path).write_text(found.pop("hlo"), encoding="utf-8")
        return found

    def do_save(self, path: str) -> dict[str, Any]:
        """Write the trained weights as the script does."""
        self.contender.save(Path(path))
        return {}

    def do_stop(self) -> dict[str, Any]:
        if hasattr(self.contender, "close"):
            self.contender.close()
        return {}


def versions() -> dict[str, str]:
    """Of the packages that were imported here."""
    names = ("torch", "jax", "jaxlib", "torchax", "numpy", "transformers")
    return {name: str(sys.modules[name].__version__) for name in names if hasattr(sys.modules.get(name), "__version__")}


def main(name: str) -> None:
    """Answer until standard input ends or a command fails."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print goes to standard error

    def say(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    peer = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            peer = peer or Peer(name)
            say({"answer": peer.answer(command)})
        except Exception as error:  # whatever a contender raises, the asking process shows it
            traceback.print_exc()
            say({"error": f"{type(error).__name__}: {error}"})
            return


if __name__ == "__main__":
    main(sys.argv[1])
