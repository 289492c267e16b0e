"""GPT-2 on the bytes of Python's own sources, as a job that may be stopped and goes on: one's own model and layouts under `spmd.train`.

    python examples/train_gpt2.py                                             # 8 virtual devices
    python examples/train_gpt2.py                                             # again: goes on where it was
    spmd launch -n 4 --devices-per-process 2 --restarts 3 examples/train_gpt2.py
    python examples/train_gpt2.py --devices 2 --mesh data=2 --steps 60        # the same run on another mesh

What a job needs around model and layouts (data, schedule, evaluation, samples, checkpoints, metrics) is a recipe, here made in Python;
`examples/recipes` has such as files, for `spmd train`. A loop of one's own: docs/checkpoints.md.
"""

from __future__ import annotations

import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from mesh import Mesh
from spmd.demo import GPT, SHARDINGS, GPTConfig
from spmd.train import Run, recipe_of


@dataclass(frozen=True)
class Args:
    """Train a small GPT-2; see the top of the file."""

    out: Path = Path("runs/gpt2")
    """Folder of the run."""
    steps: int = 30
    """Steps in all, those before a restart included."""
    mesh: str = "data=4,model=2"
    """Axes and sizes; "data" splits batches, "model" the model, either may be left out."""
    devices: int = 8
    """Virtual CPU devices of the whole job; 0 takes the machine's own."""
    batch: int = 16
    """Sequences per step, over all devices."""
    seq: int = 32
    """Bytes per sequence."""
    width: int = 64
    """Width of the model."""
    layers: int = 2
    """Blocks."""
    heads: int = 4
    """Attention heads."""
    dropout: float = 0.1
    """Probability that dropout drops a value."""
    learning_rate: float = 4e-3
    """Peak of the schedule."""
    schedule_steps: int = 110
    """Step at which the schedule ends."""
    save_every: int = 10
    """Steps between checkpoints; the two newest stay."""
    evaluate_every: int = 15
    """Steps between evaluations on held-out files, and samples."""
    sample: int = 20
    """Bytes of a sample."""
    seed: int = 0
    """Seed of parameters, dropout, data order and samples."""


def model(**sizes: Any) -> GPT:
    """An ordinary module; any will do."""
    return GPT(GPTConfig(vocabulary=257, **sizes))


def known(spec: tuple[str | None, ...]) -> Callable[..., tuple[str | None, ...]]:
    """The spec without the axes that a mesh has not."""

    def spec_on(name: str, shape: tuple[int, ...], mesh: Mesh) -> tuple[str | None, ...]:
        return tuple(axis if axis in mesh.axis_names else None for axis in spec)

    return spec_on


LAYOUT = [*((pattern, known(spec)) for pattern, spec in SHARDINGS.items()), ("**", None)]


def recipe(args: Args) -> dict[str, Any]:
    """What `spmd train` reads from a file."""
    sources = sysconfig.get_paths()["stdlib"]
    sizes = {"seq": args.seq, "width": args.width, "layers": args.layers, "heads": args.heads, "dropout": args.dropout}
    return {
        "out": str(args.out),
        "steps": args.steps,
        "seed": args.seed,
        "model": {"own": "__main__:model", "arguments": sizes, "rules": "__main__:LAYOUT"},
        "mesh": {"axes": args.mesh, "devices": args.devices},
        "data": {"kind": "text", "paths": [f"{sources}/[a-s]*.py"], "tokenizer": "bytes", "seq": args.seq, "batch": args.batch},
        "optimizer": {"lr": args.learning_rate, "weight_decay": 0.1, "arguments": {"betas": [0.9, 0.99]}},
        "schedule": {"name": "cosine", "warm_up": 10, "steps": args.schedule_steps, "final": 0.05},
        "evaluation": {"every": args.evaluate_every, "batches": 4, "paths": [f"{sources}/[t-z]*.py"]},
        "samples": {"every": args.evaluate_every, "prompts": ["    def "], "tokens": args.sample, "temperature": 0.7},
        "checkpoint": {"every": args.save_every, "export": False},
        "metrics": {"every": 1},
    }


if __name__ == "__main__":
    raise SystemExit(Run(recipe_of(recipe(tyro.cli(Args, config=(tyro.conf.OmitArgPrefixes,))))).train())
