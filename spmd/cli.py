"""The command `spmd`: reads arguments, calls one floor down, renders what comes back. Decides nothing itself.

A command's module is imported only when that command is asked for. To add one: a loader, and a line in `COMMANDS`.

    spmd doctor
    spmd ckpt verify runs/a
    spmd demo --help

A command line that makes no sense is one line on stderr and exit code 2, before any work.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import rich.box
import tyro
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from mesh._mesh_errors import nearest
from spmd import _command_line, _version
from spmd._wrong_input import mesh_axes, require_exists
from spmd.base._errors import CheckpointError, UsageError
from spmd.checkpoint import Step, Verdict
from spmd.doctor import Check, DeviceGroup, Report
from spmd.ops import How, Operator


@dataclass(frozen=True)
class Command:
    """`load` returns the function whose parameters tyro turns into options; what it returns is the exit code."""

    summary: str
    load: Callable[[], Callable[..., Any]]


def doctor_command() -> Callable[..., Any]:
    from spmd import doctor

    def run() -> int:
        """Check versions, devices and conflicts of this machine; exit code 1 when something is wrong."""
        report = doctor.examine()
        show_report(report, Console(markup=False, highlight=False))
        return 1 if report.problems else 0

    return run


def demo_command() -> Callable[..., Any]:
    from spmd import demo

    return demo.main


def bench_command() -> Callable[..., Any]:
    from spmd import bench

    return bench.run


def ckpt_command() -> Callable[..., Any]:
    from spmd import checkpoint
    from spmd.checkpoint._ckpt_command import Ls, Reshard, Verify

    def run(action: Ls | Verify | Reshard) -> int:
        """Look at checkpoints, check them, cut them for another mesh."""
        console = Console(markup=False, highlight=False, soft_wrap=True)
        try:
            require_exists("PATH", action.source if isinstance(action, Reshard) else action.path, is_folder=True)
            if isinstance(action, Reshard):
                mesh_axes("--mesh", action.mesh)
                console.print(f"wrote {checkpoint.reshard(action.source, action.target, action.mesh, step=action.step)}")
                return 0
            found = checkpoint.steps(action.path)
            if not found:
                console.print(f"{action.path} holds no checkpoint")
                return 1
            if isinstance(action, Ls):
                show_steps(found, console)
                return 1 if any(step.problem for step in found) else 0
            verdicts = [checkpoint.verify_step(step) for step in found if action.step in (None, step.step)]
        except CheckpointError as error:
            console.print(Text(str(error), style="red"))
            return 1
        if not verdicts:
            raise UsageError(f"--step {action.step}: {action.path} has steps {', '.join(str(step.step) for step in found)}")
        for verdict in verdicts:
            show_verdict(verdict, console)
        return 1 if any(verdict.problems for verdict in verdicts) else 0

    return run


def ops_command() -> Callable[..., Any]:
    from spmd import ops

    def run(pattern: Annotated[str, tyro.conf.Positional] = "", markdown: bool = False) -> int:
        """Show what computes each of PyTorch's operators.

        Args:
            pattern: a regular expression that is found in the operator's name; all operators when left out.
            markdown: print the page docs/ops.md instead of a table.
        """
        try:
            found = ops.coverage(pattern)
        except ValueError as error:
            raise UsageError("; ".join(map(str.strip, str(error).splitlines()))) from error
        if not found:
            names = {operator.name.partition(".")[0] for operator in ops.coverage("")}
            raise UsageError(f"no operator's name has {pattern!r} in it{nearest(pattern, names)}")
        if markdown:
            print(ops.markdown(found), end="")
        else:
            show_operators(found, ops.counts(found), ops, Console(markup=False, highlight=False))
        return 0

    return run


def launch_command() -> Callable[..., Any]:
    from mesh import launch

    return launch.main


def train_command() -> Callable[..., Any]:
    from spmd.train import _train_command

    return _train_command.main


# torch._dynamo: torch's optimizers import it when the first one is made, in a second or two
PRELOADED = ("spmd", "torch._dynamo")

COMMANDS = {
    "doctor": Command("Check versions, devices and conflicts of this machine.", doctor_command),
    "ckpt": Command("Look at checkpoints, check them, cut them for another mesh.", ckpt_command),
    "ops": Command("Show what computes each of PyTorch's operators.", ops_command),
    "launch": Command("Run a program as one job of several processes.", launch_command),
    "train": Command("Train a model as a recipe says.", train_command),
    "bench": Command("Run a benchmark beside hand-written JAX and other peers.", bench_command),
    "demo": Command("Train a sharded model on virtual devices.", demo_command),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and leave with the command's exit code.

    Args:
        argv: arguments after the program's name; those of the process when None.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["launch"]:  # what follows the program's name is the program's own: nothing for tyro
        raise SystemExit(launch_command()(arguments[1:], prog="spmd launch", preload=PRELOADED))
    if arguments[:1] == ["train"]:  # overrides are read as the recipe is, with its errors
        raise SystemExit(train_command()(arguments[1:]))
    if arguments in (["--version"], ["-V"]):
        print(f"spmd {_version.__version__}")
        raise SystemExit(0)
    functions = {name: command.load() if arguments[:1] == [name] else listed(command) for name, command in COMMANDS.items()}
    title = f"spmd {arguments[0]}" if arguments and arguments[0] in COMMANDS else "spmd"
    try:
        raise SystemExit(_command_line.read("spmd", arguments, functions)())
    except UsageError as error:
        print(f"{title}: {error}", file=sys.stderr)
        raise SystemExit(2) from None


def listed(command: Command) -> Callable[[], None]:
    """A command that was not asked for: shows up in the help, without the cost of importing it."""

    def stand_in() -> None: ...

    stand_in.__doc__ = command.summary
    return stand_in


def show_report(report: Report, console: Console) -> None:
    table = Table("what", "found", "supported", "", box=rich.box.SIMPLE)
    for check in report.checks:
        table.add_row(check.name, check.found, check.supported, mark(check))
    for group in report.devices:
        table.add_row("devices", device_line(group), "", Text("OK", style="green"))
    console.print(table)
    for check in report.problems:
        console.print(Text(f"{check.problem}", style="red"), Text(f"  fix: {check.fix}"), sep="\n", soft_wrap=True)


def show_steps(found: Sequence[Step], console: Console) -> None:
    table = Table("step", "saved", "arrays", "MiB", "processes", "", box=rich.box.SIMPLE)
    for step in found:
        about = {} if step.manifest is None else step.manifest.about
        arrays = "" if step.manifest is None else str(len(step.manifest.arrays))
        verdict = Text("OK", style="green") if step.problem is None else Text(step.problem, style="bold red", overflow="fold")
        size = f"{step.nbytes / 2**20:.1f}"
        table.add_row(str(step.step), str(about.get("saved", "")), arrays, size, str(about.get("processes", "")), verdict)
    console.print(table)


def show_verdict(verdict: Verdict, console: Console) -> None:
    if not verdict.problems:
        console.print(f"{verdict.folder}: {verdict.nbytes / 2**20:.1f} MiB as they were written")
    for problem in verdict.problems:
        console.print(Text(f"{verdict.folder}: {problem}", style="red"))


def show_operators(found: Sequence[Operator], counts: Mapping[How, tuple[int, int]], ops: Any, console: Console) -> None:
    """`ops`: the module, for what its words mean."""
    table = Table(
        "overload", "computed by", Column("where", no_wrap=True), Column("in-place and out=", overflow="fold"), box=rich.box.SIMPLE
    )
    for operator in found:
        how = Text(operator.how, style="bold red" if operator.how == "unsupported" else "")
        table.add_row(operator.name, how, operator.where, " ".join(operator.variants))
    console.print(table)
    summary = Table("computed by", "overloads", "in-place and out=", "", box=rich.box.SIMPLE)
    for how, (count, num_variants) in counts.items():
        summary.add_row(how, str(count), str(num_variants), ops.MEANING[how])
    summary.add_row("total", str(len(found)), str(sum(len(operator.variants) for operator in found)), "")
    console.print(summary)
    order = Table("mechanism", "here", "the first that has an overload serves it", box=rich.box.SIMPLE)
    for name, text in ops.MECHANISMS.items():
        served = [operator.name for operator in found if operator.mechanism == name]
        order.add_row(name, served[0] if len(served) == 1 else str(len(served)), text)
    console.print(order)


def mark(check: Check) -> Text:
    return Text("OK", style="green") if check.problem is None else Text("problem", style="bold red")


def device_line(group: DeviceGroup) -> str:
    memory = "" if group.memory_bytes is None else f", {group.memory_bytes / 2**30:.0f} GiB each"
    kind = "" if group.kind == group.platform else f" ({group.kind})"
    return f"{group.num_devices} x {group.platform}{kind}{memory}"


if __name__ == "__main__":
    main()
