"""Trains GPT-2 on the bytes of Python's standard library with `spmd.train`, your own model and partition specs; the job can resume.

    python examples/train_gpt2.py                                             # 8 virtual devices
    python examples/train_gpt2.py                                             # again: resumes from the last checkpoint
    spmd launch -n 4 --devices-per-process 2 --restarts 3 examples/train_gpt2.py
    python examples/train_gpt2.py --devices 2 --mesh data=2 --steps 60        # the same run on another mesh

Data, schedule, evaluation, samples, checkpoints and metrics are described by a recipe, which is created in Python here. `examples/recipes`
contains recipes as files for `spmd train`. docs/checkpoints.md shows how to write your own loop.
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
    """Train a small GPT-2; see the docstring of the file."""

    out: Path = Path("runs/gpt2")
    """Folder of the run."""
    steps: int = 30
    """Total number of steps, including those before a restart."""
    mesh: str = "data=4,model=2"
    """Mesh axes and their sizes; "data" splits batches, "model" splits the model; either may be left out."""
    devices: int = 8
    """Number of virtual CPU devices of the whole job; 0 uses the machine's own devices."""
    batch: int = 16
    """Sequences per step, over all devices."""
    seq: int = 32
    """Bytes per sequence."""
    width: int = 64
    """Width of the model."""
    layers: int = 2
    """Number of blocks."""
    heads: int = 4
    """Number of attention heads."""
    dropout: float = 0.1
    """Dropout probability."""
    learning_rate: float = 4e-3
    """Peak learning rate."""
    schedule_steps: int = 110
    """Step at which the schedule ends."""
    save_every: int = 10
    """Steps between checkpoints; the two newest are kept."""
    evaluate_every: int = 15
    """Steps between evaluations on held-out files, and between samples."""
    sample: int = 20
    """Bytes to generate for a sample."""
    seed: int = 0
    """Seed of parameters, dropout, data order and samples."""


def model(**sizes: Any) -> GPT:
    """The model. Any ordinary module can be used."""
    return GPT(GPTConfig(vocabulary=257, **sizes))


def drop_missing_axes(spec: tuple[str | None, ...]) -> Callable[..., tuple[str | None, ...]]:
    """A function of a rule that returns the spec without axes that the mesh does not have."""

    def spec_on(name: str, shape: tuple[int, ...], mesh: Mesh) -> tuple[str | None, ...]:
        return tuple(axis if axis in mesh.axis_names else None for axis in spec)

    return spec_on


LAYOUT = [*((pattern, drop_missing_axes(spec)) for pattern, spec in SHARDINGS.items()), ("**", None)]


def recipe(args: Args) -> dict[str, Any]:
    """The recipe, which `spmd train` would read from a file."""
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
