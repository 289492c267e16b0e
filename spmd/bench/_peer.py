"""Runs one contender in its own process. A script, run by its path: it does not import `spmd`, so torchax's environment can run it.

    python _peer.py ours            # reads one JSON command per line from stdin, and writes one JSON answer per line to stdout

A contender is a class `Contender(job)` in `peers/<name>.py`, with a function `prepare(job)` that sets up the devices first. Methods:

    step()          run one training step and return without waiting for the devices
    wait()          block until everything that `step` changed is computed
    loss()          the loss of the last step
    stages(cold)    seconds to trace, lower and compile a fresh program, or {} if the contender has no such stages
    program()       HLO text, memory, executables and retraces of the running program, or {}
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
sys.path.append(str(HERE.parents[1]))  # the checkout's root, in case `mesh` and `spmd` are not installed


def loaded(path: Path) -> Any:
    """Load a file as a module with `_task.load`, after loading `_task.py` itself by its path."""
    spec = importlib.util.spec_from_file_location("_bench_job", HERE / "_task.py")
    assert spec is not None and spec.loader is not None
    if "_bench_job" not in sys.modules:
        sys.modules["_bench_job"] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules["_bench_job"])
    return sys.modules["_bench_job"] if path.name == "_task.py" else sys.modules["_bench_job"].load(path)


class Peer:
    """Executes commands for one contender."""

    def __init__(self, name: str) -> None:
        self.module: Any = loaded(HERE / "peers" / f"{name}.py")
        self.contender: Any = None

    def answer(self, command: dict[str, Any]) -> dict[str, Any]:
        """Call the method that `command["do"]` names, with the other fields as arguments."""
        do = command.pop("do")
        return getattr(self, f"do_{do}")(**command)

    def do_make(self, job: dict[str, Any]) -> dict[str, Any]:
        parsed = loaded(HERE / "_task.py").Job.from_dict(job)
        start = time.perf_counter()
        self.module.prepare(parsed)
        self.contender = self.module.Contender(parsed)
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
        """Clocks of each step: seconds until the results are computed and until the call returned, CPU seconds of the calling thread."""
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
        """The figures of the program. Its text is written to `hlo_path`, from where the parent process reads it."""
        found = self.contender.program()
        if found:
            Path(hlo_path).write_text(found.pop("hlo"), encoding="utf-8")
        return found

    def do_save(self, path: str) -> dict[str, Any]:
        """Write the trained weights in the script's format."""
        self.contender.save(Path(path))
        return {}

    def do_stop(self) -> dict[str, Any]:
        if hasattr(self.contender, "close"):
            self.contender.close()
        return {}


def versions() -> dict[str, str]:
    """Versions of the packages that this process has imported."""
    names = ("torch", "jax", "jaxlib", "torchax", "numpy", "transformers")
    return {name: str(sys.modules[name].__version__) for name in names if hasattr(sys.modules.get(name), "__version__")}


def main(name: str) -> None:
    """Execute commands until standard input ends or a command fails."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # output that libraries print goes to standard error

    def reply(value: dict[str, Any]) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    peer = None
    for line in sys.stdin:
        command = json.loads(line)
        try:
            peer = peer or Peer(name)
            reply({"answer": peer.answer(command)})
        except Exception as error:  # the parent process reports any exception of a contender
            traceback.print_exc()
            reply({"error": f"{type(error).__name__}: {error}"})
            return


if __name__ == "__main__":
    main(sys.argv[1])
