"""`make bench`: runs every benchmark on its meshes, at small sizes, and rewrites the results and docs/benchmarks.md.

python -m spmd.bench                       # all benchmarks
python -m spmd.bench --only gpt2           # one benchmark
python -m spmd.bench --document-only       # tables and charts from the existing results
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich.console import Console

from spmd.bench import _chart, _document, _result_table
from spmd.bench._run_command import NAMES, BenchArgs, measured

ROOT = Path(__file__).resolve().parents[2]
ALL = "jax,torchax,torch,torch.compile"
RUNS: tuple[BenchArgs, ...] = (
    BenchArgs("megatron", "data=4,model=2", against=f"{ALL},fsdp", rounds=60, traces=5),
    BenchArgs("megatron", "model=8"),
    BenchArgs("megatron", "data=2,model=4", variant="sequence"),
    BenchArgs("megatron", "data=4,model=2", preset="dispatch", losses=3, rounds=60, traces=1),
    BenchArgs("gpt2", "data=2,model=4", against=f"{ALL},fsdp"),
    BenchArgs("gpt2", "data=2,fsdp=2,model=2"),
    BenchArgs("gpt2", "data=2,model=4", variant="hf", against="jax,torchax"),
    BenchArgs("resnet50", "data=8", against=ALL, rounds=40),
    BenchArgs("resnet50", "data=4,spatial=2", rounds=12, traces=1),
)
TPU_RUNS: tuple[BenchArgs, ...] = (
    BenchArgs("megatron", "data=4,model=2", topology="v5e:2x4"),
    BenchArgs("gpt2", "data=2,model=4", topology="v5e:2x4"),
    BenchArgs("resnet50", "data=8", topology="v5e:2x4"),
    BenchArgs("megatron", "data=32,model=8", topology="v5e:16x16", preset="full", batch=64),
    BenchArgs("gpt2", "data=64,model=4", topology="v5e:16x16", preset="full", batch=256),
    BenchArgs("resnet50", "data=256", topology="v5e:16x16", preset="full", batch=4096),
    BenchArgs("megatron", "data=128,model=8", topology="v5p:8x8x16", preset="full", batch=256),
    BenchArgs("gpt2", "data=256,model=4", topology="v5p:8x8x16", preset="full", batch=1024),
    BenchArgs("resnet50", "data=512,spatial=2", topology="v5p:8x8x16", preset="full", batch=8192),
)


@dataclass(frozen=True)
class SuiteArgs:
    """Run the small presets and rewrite benchmarks/results and docs/benchmarks.md."""

    only: str = ""
    """One benchmark: megatron, gpt2 or resnet50."""
    ground: str = "cpu"
    """cpu, tpu (compiled ahead of time) or gpu."""
    scale: float = 1.0
    """Factor for the number of rounds."""
    torchax_python: Path | None = None
    """Python interpreter of the environment with torchax."""
    document_only: bool = False
    """Write the document and charts from the existing results."""


def suite(args: SuiteArgs) -> int:
    """Run the selected benchmarks. Results of other platforms and meshes are kept."""
    console = Console(highlight=False)
    runs = {"cpu": RUNS, "tpu": TPU_RUNS, "gpu": gpu_runs()}[args.ground]
    for one in () if args.document_only else runs:
        if args.only in ("", one.name):
            scaled = replace(one, rounds=max(2, round(one.rounds * args.scale)), torchax_python=args.torchax_python)
            result = measured(scaled, console)
            console.print(_result_table.table(result), _result_table.goals(result), sep="\n")
            keep(result)
    results = {name: read(name) for name in NAMES}
    for name, listed in results.items():
        if any("clocks" in peer for result in listed for peer in result["peers"].values()):
            _chart.save(listed, ROOT / "docs" / "images" / f"bench-{name}.png")
    (ROOT / "docs" / "benchmarks.md").write_text(_document.document(results), encoding="utf-8")
    return 0


def gpu_runs() -> tuple[BenchArgs, ...]:
    """Runs on one GPU in bfloat16 with the full shapes, against JAX by hand, torch and torch.compile."""
    options = {"platform": "gpu", "dtype": "bfloat16", "preset": "full", "against": "jax,torch,torch.compile"}
    return BenchArgs("gpt2", **options), BenchArgs("resnet50", **options), BenchArgs("megatron", **options)  # type: ignore[arg-type]


def path_of(name: str) -> Path:
    """The file with a benchmark's results."""
    return ROOT / "benchmarks" / "results" / f"{name}.json"


def read(name: str) -> list[dict[str, Any]]:
    """The results in a benchmark's file. Empty if there is no file."""
    return json.loads(path_of(name).read_text(encoding="utf-8"))["runs"] if path_of(name).exists() else []


def keep(result: dict[str, Any]) -> None:
    """Write a result to its benchmark's file. It replaces the result with the same title."""
    name, title = result["job"]["name"], _result_table.title_of(result)
    kept = {_result_table.title_of(other): other for other in read(name)} | {title: result}
    path_of(name).parent.mkdir(parents=True, exist_ok=True)
    path_of(name).write_text(json.dumps({"runs": list(kept.values())}, indent=1) + "\n", encoding="utf-8")
