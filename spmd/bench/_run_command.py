"""The command `spmd bench`: one run of a benchmark."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

import mesh
from mesh._mesh_errors import nearest
from spmd._wrong_input import mesh_axes, require_exists, require_least, require_writable
from spmd.base._errors import SpmdError, UsageError
from spmd.bench import _chart, _result_table
from spmd.bench._contenders import entrants_of
from spmd.bench._measure import Effort, measure, num_phases
from spmd.bench._task import Job, load

_TOPOLOGY = re.compile(r"[a-z]\w*:\d+(x\d+)*")
NAMES = ("megatron", "gpt2", "resnet50")


@dataclass(frozen=True)
class BenchArgs:
    """Run a benchmark and its peers, each in its own process, one step at a time in turn."""

    name: Annotated[Literal["megatron", "gpt2", "resnet50"], tyro.conf.Positional]
    """The benchmark."""
    mesh: str = ""
    """Mesh axes and their sizes, "data=4,model=2"; by default the script's mesh."""
    preset: str = "small"
    """Sizes: tiny, small or full."""
    variant: str = ""
    """Model: plain or sequence (megatron), own or hf (gpt2)."""
    against: str = "jax"
    """Comma-separated peers: jax, torchax, torch, torch.compile, fsdp."""
    topology: str = ""
    """Compile for this TPU topology ("v5e:2x4") and compare the programs without running them."""
    platform: Literal["cpu", "gpu"] = "cpu"
    """Virtual CPU devices, or the GPUs of this machine."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Dtype of parameters and floating inputs."""
    batch: int = 0
    """Batch size over all devices; by default the preset's."""
    rounds: int = 20
    """Timed steps of each contender."""
    losses: int = 20
    """Number of steps before the timed ones, whose loss is recorded."""
    traces: int = 2
    """Number of fresh programs that are traced and compiled with empty caches, and as many again with warm caches."""
    real_data: Path | None = None
    """A text file (gpt2), or a folder with one folder of images per class (resnet50)."""
    weights: Path | None = None
    """Start from these weights (gpt2: Hugging Face's model.safetensors)."""
    save: Path | None = None
    """File for our trained weights, in the same format."""
    torchax_python: Path | None = None
    """Python interpreter of the environment with torchax; by default the one that `make torchax` creates."""
    json: Path | None = None
    """File for the result."""
    chart: Path | None = None
    """File for a PNG chart; needs the extra `bench`."""


def scripts() -> Path:
    """The folder of the benchmark scripts: inside an installed package, or at the top of a checkout."""
    packaged = Path(__file__).with_name("scripts")
    return packaged if packaged.exists() else Path(__file__).resolve().parents[2] / "benchmarks"


def job_of(args: BenchArgs) -> Job:
    """The job that the contenders run.

    Raises:
        UsageError: unknown preset or variant, invalid mesh or topology, a number too small, or a file that is missing or not writable.
    """
    name = args.name
    script = load(scripts() / f"{name}.py")
    variant = args.variant or script.VARIANTS[0]
    for what, given, known in (("preset", args.preset, tuple(script.PRESETS)), ("variant", variant, script.VARIANTS)):
        if given not in known:
            raise UsageError(f"--{what} of {name} is one of {', '.join(known)}, not {given!r}{nearest(given, known)}")
    axes = mesh_axes("--mesh", args.mesh or ("data=1" if args.platform == "gpu" else script.MESH), ("data", "model"))
    if args.topology and not _TOPOLOGY.fullmatch(args.topology):
        raise UsageError(f"--topology {args.topology!r} is not a topology: write the chips and their grid, as in v5e:2x4")
    require_least(vars(args), {"--batch": 0, "--rounds": 1, "--losses": 1, "--traces": 1})
    require_exists("--real-data", args.real_data)
    require_exists("--weights", args.weights)
    for option, path in (("--save", args.save), ("--json", args.json), ("--chart", args.chart)):
        require_writable(option, path)
    return Job(
        name,
        str(scripts()),
        args.variant,
        args.preset,
        (("batch", args.batch),) if args.batch else (),
        tuple(axes.items()),
        args.dtype,
        args.topology,
        args.platform,
        real_data="" if args.real_data is None else str(args.real_data.resolve()),
        weights="" if args.weights is None else str(args.weights.resolve()),
    )


def run(args: BenchArgs) -> int:
    """Measure, print the tables, and write the requested files. The exit code is 0 if our step ran."""
    console = Console(highlight=False)
    try:
        result = measured(args, console)
    except UsageError:
        raise
    except (mesh.MeshError, SpmdError) as error:
        console.print(f"{error}", style="red", markup=False)
        return 2
    console.print(_result_table.table(result, console.width), _result_table.goals(result), _result_table.collectives(result), sep="\n")
    console.print(_chart.bars(result))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    if args.chart is not None:
        _chart.save([result], args.chart)
    return 0


def measured(args: BenchArgs, console: Console) -> dict[str, Any]:
    """The result of a run. Shows a progress bar meanwhile."""
    job = job_of(args)
    entrants = entrants_of(args.against.split(","), job, args.torchax_python)
    effort = Effort(0, 0, 0) if args.topology else Effort(args.rounds, args.losses, args.traces)
    columns = TextColumn("{task.fields[title]}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}")
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("starting", total=num_phases(entrants, effort), title=f"{job.name} on {job.mesh_text}")
        return measure(job, entrants, effort, lambda done: bar.update(task, advance=1, description=done), args.save)


def script(name: str) -> None:
    """`python benchmarks/<name>.py`: the same as `spmd bench <name>`."""
    try:
        raise SystemExit(run(tyro.cli(BenchArgs, args=[name, *sys.argv[1:]], prog=f"{name}.py")))
    except UsageError as error:
        sys.stderr.write(f"{name}.py: {error}\n")
        raise SystemExit(2) from None
