"""The command `spmd`: parses arguments, calls the command's module and renders the result. It decides nothing itself.

A command's module is imported only when that command runs. To add a command, write a loader and a line in `COMMANDS`.

    spmd doctor
    spmd ckpt verify runs/a
    spmd demo --help

An invalid command line is reported in one line on stderr, with exit code 2, before any work.
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
    """One subcommand.

    Attributes:
        summary: its line in the help.
        load: imports and returns its function. tyro turns the parameters into options, and the result is the exit code.
    """

    summary: str
    load: Callable[[], Callable[..., Any]]


def doctor_command() -> Callable[..., Any]:
    from spmd import doctor

    def run() -> int:
        """Check versions, devices and conflicts on this machine; exit code 1 when something is wrong."""
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
        """List checkpoints, verify them, or reshard them for another mesh."""
        console = Console(markup=False, highlight=False, soft_wrap=True)
        try:
            require_exists("PATH", action.source if isinstance(action, Reshard) else action.path, is_folder=True)
            if isinstance(action, Reshard):
                mesh_axes("--mesh", action.mesh)
                console.print(f"wrote {checkpoint.reshard(action.source, action.target, action.mesh, step=action.step)}")
                return 0
            found = checkpoint.steps(action.path)
            if not found:
                console.print(f"{action.path} has no checkpoint")
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
        """Show how each of PyTorch's operators is computed.

        Args:
            pattern: a regular expression to search for in operator names; all operators if omitted.
            markdown: print the page docs/ops.md instead of a table.
        """
        try:
            found = ops.coverage(pattern)
        except ValueError as error:
            raise UsageError("; ".join(map(str.strip, str(error).splitlines()))) from error
        if not found:
            names = {operator.name.partition(".")[0] for operator in ops.coverage("")}
            raise UsageError(f"no operator name matches {pattern!r}{nearest(pattern, names)}")
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


# torch's optimizers import torch._dynamo when the first one is made, which takes a second or two.
PRELOADED = ("spmd", "torch._dynamo")

COMMANDS = {
    "doctor": Command("Check versions, devices and conflicts on this machine.", doctor_command),
    "ckpt": Command("List checkpoints, verify them, or reshard them for another mesh.", ckpt_command),
    "ops": Command("Show how each of PyTorch's operators is computed.", ops_command),
    "launch": Command("Run a program as one job of several processes.", launch_command),
    "train": Command("Train a model from a recipe.", train_command),
    "bench": Command("Run a benchmark beside hand-written JAX and other peers.", bench_command),
    "demo": Command("Train a sharded model on virtual devices.", demo_command),
}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit with the command's exit code.

    Args:
        argv: arguments after the program's name; None: those of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == ["launch"]:  # arguments after the program's name belong to it, not to tyro
        raise SystemExit(launch_command()(arguments[1:], prog="spmd launch", preload=PRELOADED))
    if arguments[:1] == ["train"]:  # overrides are parsed like the recipe, with the same errors
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
    """A placeholder for a command that was not selected. It appears in the help without the cost of an import."""

    def stand_in() -> None: ...

    stand_in.__doc__ = command.summary
    return stand_in


def show_report(report: Report, console: Console) -> None:
    """Print the result of `spmd doctor`: a table of checks, then the problems with their fixes."""
    table = Table("what", "found", "supported", "", box=rich.box.SIMPLE)
    for check in report.checks:
        table.add_row(check.name, check.found, check.supported, mark(check))
    for group in report.devices:
        table.add_row("devices", device_line(group), "", Text("OK", style="green"))
    console.print(table)
    for check in report.problems:
        console.print(Text(f"{check.problem}", style="red"), Text(f"  fix: {check.fix}"), sep="\n", soft_wrap=True)


def show_steps(found: Sequence[Step], console: Console) -> None:
    """Print the table of `spmd ckpt ls`."""
    table = Table("step", "saved", "arrays", "MiB", "processes", "", box=rich.box.SIMPLE)
    for step in found:
        about = {} if step.manifest is None else step.manifest.about
        arrays = "" if step.manifest is None else str(len(step.manifest.arrays))
        verdict = Text("OK", style="green") if step.problem is None else Text(step.problem, style="bold red", overflow="fold")
        size = f"{step.nbytes / 2**20:.1f}"
        table.add_row(str(step.step), str(about.get("saved", "")), arrays, size, str(about.get("processes", "")), verdict)
    console.print(table)


def show_verdict(verdict: Verdict, console: Console) -> None:
    """Print the result of `spmd ckpt verify` for one step."""
    if not verdict.problems:
        console.print(f"{verdict.folder}: {verdict.nbytes / 2**20:.1f} MiB, all checksums match")
    for problem in verdict.problems:
        console.print(Text(f"{verdict.folder}: {problem}", style="red"))


def show_operators(found: Sequence[Operator], counts: Mapping[How, tuple[int, int]], ops: Any, console: Console) -> None:
    """Print the operators, a summary and the order of mechanisms. `ops` is the module `spmd.ops`."""
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
    order = Table("mechanism", "here", "the first one that has an overload is used", box=rich.box.SIMPLE)
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
