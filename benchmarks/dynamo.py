"""torch.compile(backend="spmd"): step time, host time, memory of saved tensors, and varying sizes.

python -m benchmarks.dynamo                       # writes benchmarks/results/dynamo.json and docs/images/compile-sizes.png
python -m benchmarks.dynamo --only host

step    seconds of a training step (forward, backward, AdamW) of GPT-2, BERT and Llama under torch.compile, relative to spmd.compile:
        medians of alternating runs
host    CPU seconds of the calling thread for a call of a graph with 100 parameters, in excess of jax.jit on the same flat arrays, and of
        the whole call with Dynamo's guards: lowest tenth and median
kept    forward and backward as Dynamo graphs, and through AOTAutograd with its default partitioner and with min-cut: seconds, and bytes
        saved between the passes in addition to parameters and inputs
sizes   an MLP, forward and backward, with 100 random batch sizes: number of programs, largest relative error of a gradient compared with
        CPU torch, and milliseconds by size, compared with the eager device and with inductor on the CPU: at 15 sizes, the minimum of 15
        alternating calls
"""

from __future__ import annotations

import argparse
import copy
import json
import platform
import random
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import torch
import torch.nn.functional as F
from torch import nn

import spmd
import spmd.dynamo
from spmd.dynamo import compile_graph, graphs

RESULTS = Path(__file__).resolve().parent / "results" / "dynamo.json"
CHART = Path(__file__).resolve().parents[1] / "docs" / "images" / "compile-sizes.png"
ROUNDS = 20
CALLS = 15
BATCH, LENGTH, VOCABULARY = 4, 64, 1000


def language_models() -> dict[str, Callable[[], nn.Module]]:
    """Small Hugging Face models without dropout, by name."""
    from transformers import BertConfig, BertForMaskedLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

    common = {"vocab_size": VOCABULARY, "use_cache": False}
    return {
        "GPT-2": lambda: GPT2LMHeadModel(
            GPT2Config(**common, n_layer=4, n_embd=128, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        ),
        "BERT": lambda: BertForMaskedLM(
            BertConfig(
                **common,
                **{"hidden_size": 128, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 512},
                **{"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
            )
        ),
        "Llama": lambda: LlamaForCausalLM(
            LlamaConfig(**common, hidden_size=128, intermediate_size=352, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=4)
        ),
    }


def tokens() -> torch.Tensor:
    return torch.randint(4, VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(1))


def timed(run: Callable[[], Any], clock: Callable[[], float] = time.perf_counter) -> float:
    if clock is time.perf_counter:
        torch.jax.synchronize()  # type: ignore[attr-defined]
    began = clock()
    run()
    if clock is time.perf_counter:
        torch.jax.synchronize()  # type: ignore[attr-defined]
    return clock() - began


def step() -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, make in language_models().items():
        torch.manual_seed(0)
        model = make()
        runs: dict[str, Callable[[], Any]] = {}
        for way in ("spmd.compile", "torch.compile"):
            ours = copy.deepcopy(model).to("jax")
            fn = training_step(ours, torch.optim.AdamW(ours.parameters(), lr=1e-3), tokens().to("jax"))
            runs[way] = spmd.compile(fn) if way == "spmd.compile" else torch.compile(fn, backend=compile_graph)
        losses = {way: [float(run()) for _ in range(3)] for way, run in runs.items()}
        assert losses["spmd.compile"] == losses["torch.compile"], losses
        times = alternated(runs)
        medians = {way: statistics.median(t) for way, t in times.items()}
        found[name] = {**medians, "ratio": medians["torch.compile"] / medians["spmd.compile"]}
    return found


def training_step(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> Callable[[], torch.Tensor]:
    def train_step() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        return loss

    return train_step


def alternated(runs: dict[str, Callable[[], Any]]) -> dict[str, list[float]]:
    times: dict[str, list[float]] = {way: [] for way in runs}
    for _ in range(ROUNDS):
        for way, run in runs.items():
            times[way].append(timed(run))
    return times


def host() -> dict[str, Any]:
    """CPU seconds of a call on the host, by kind of call."""
    model, x = nn.Sequential(*[nn.Linear(8, 8) for _ in range(50)]).to("jax"), torch.randn(4, 8).to("jax")
    fast = torch.compile(model, backend=compile_graph, fullgraph=True)
    cpu, on_cpu = copy.deepcopy(model).cpu(), torch.randn(4, 8)
    guarded = torch.compile(cpu, backend=lambda graph, inputs: lambda *args: (args[0],), fullgraph=True)
    with torch.no_grad():
        fast(x)
        guarded(on_cpu)
        graph = graphs()[-1]
        program, calls = graph.latest, list[Any]()
        assert program is not None
        kept = type(program).__call__
        type(program).__call__ = lambda self, args: calls.append(args) or kept(self, args)
        fast(x)
        type(program).__call__ = kept
        args = calls[0]
        ways: dict[str, Callable[[], Any]] = {
            "jax.jit": program.bare(args),
            "graph": lambda: graph(*args),
            "with Dynamo's guards": lambda: fast(x),
            "Dynamo's guards alone, on CPU tensors": lambda: guarded(on_cpu),
        }
        found: dict[str, dict[str, float]] = {}
        for way, run in ways.items():
            times = sorted(timed(run, time.thread_time) for _ in range(400))
            found[way] = {"lowest tenth": times[40], "median": times[200]}
    above = {kind: found["graph"][kind] - found["jax.jit"][kind] for kind in ("lowest tenth", "median")}
    return {**found, "graph above jax.jit": above}


def kept() -> dict[str, Any]:
    """Seconds and bytes saved between the passes, by model and by the way in which the two passes are made."""
    from functorch.compile import default_partition, make_boxed_func, min_cut_rematerialization_partition
    from torch._dynamo.backends.common import aot_autograd

    def through(partition: Any) -> Any:
        boxed = lambda graph, inputs: make_boxed_func(compile_graph(graph, inputs))  # noqa: E731
        return aot_autograd(fw_compiler=boxed, bw_compiler=boxed, partition_fn=partition)

    ways = {
        "graphs of Dynamo's": compile_graph,
        "AOT, default": through(default_partition),
        "AOT, min-cut": through(min_cut_rematerialization_partition),
    }
    found: dict[str, Any] = {}
    for name, make in language_models().items():
        torch.manual_seed(0)
        model, ids = make(), tokens().to("jax")
        runs: dict[str, Callable[[], Any]] = {}
        saved_bytes: dict[str, int] = {}
        for way, backend in ways.items():
            torch._dynamo.reset()
            ours = copy.deepcopy(model).to("jax")
            fast = torch.compile(ours, backend=backend)

            def both(fast: Any = fast, ours: nn.Module = ours, ids: torch.Tensor = ids) -> None:
                fast(input_ids=ids, labels=ids).loss.backward()
                ours.zero_grad()

            both()
            saved_bytes[way] = between(fast, ids, ours)
            runs[way] = both
        times = alternated(runs)
        found[name] = {way: {"seconds": statistics.median(times[way]), "bytes kept": saved_bytes[way]} for way in ways}
    return found


def between(fast: Any, ids: torch.Tensor, model: nn.Module) -> int:
    """Bytes of the tensors that autograd saves between the passes, without parameters, buffers and the input. Each storage counts once."""
    own = {p.untyped_storage()._cdata for p in (*model.parameters(), *model.buffers())} | {ids.untyped_storage()._cdata}
    seen: dict[int, int] = {}

    def note(t: torch.Tensor) -> torch.Tensor:
        if t.untyped_storage()._cdata not in own:
            seen[t.untyped_storage()._cdata] = t.untyped_storage().nbytes()
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        loss = fast(input_ids=ids, labels=ids).loss
    loss.backward()
    model.zero_grad()
    return sum(seen.values())


def sizes() -> dict[str, Any]:
    """Figures for 100 different batch sizes from 1 to 512."""
    torch.manual_seed(0)
    host = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))
    model, eager = copy.deepcopy(host).to("jax"), copy.deepcopy(host).to("jax")

    def loss_of(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(net(x), y)

    torch._dynamo.reset()
    before = set(graphs())
    fast = torch.compile(loss_of, backend=compile_graph, dynamic=True, fullgraph=True)
    inductor = torch.compile(loss_of, dynamic=True, fullgraph=True) if inductor_works() else None
    chosen = random.Random(0).sample(range(1, 513), 100)
    batches = {n: (torch.randn(n, 64), torch.randint(10, (n,))) for n in chosen}
    compiled: list[str] = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    )
    worst, began = 0.0, time.perf_counter()
    for x, y in batches.values():
        fast(model, x.to("jax"), y.to("jax")).backward()
        loss_of(host, x, y).backward()
        for p, q in zip(model.parameters(), host.parameters(), strict=True):
            worst = max(worst, float((p.grad.cpu() - q.grad).abs().max() / q.grad.abs().max()))
        host.zero_grad()
        model.zero_grad()
    first_s, num_compiled = time.perf_counter() - began, len(compiled)
    made = [graph for graph in graphs() if graph not in before]
    latency: dict[str, dict[int, float]] = {}
    for n in sorted(chosen)[1::7] * CALLS:
        x, y = batches[n]
        for way, net, run in (("spmd", model, fast), ("eager", eager, loss_of), ("inductor", host, inductor)):
            if run is not None:
                place = (x, y) if way == "inductor" else (x.to("jax"), y.to("jax"))
                took = timed(lambda run=run, net=net, place=place: run(net, *place).backward()) * 1e3
                own = latency.setdefault(way, {})
                own[n] = min(took, own.get(n, took))
    return {
        "sizes": len(chosen),
        "graphs": len(made),
        "programs": sum(graph.num_programs for graph in made),
        "executables compiled": num_compiled,
        "largest relative error of a gradient": worst,
        "seconds for every size once, compilation and CPU torch included": first_s,
        "milliseconds by size": latency,
    }


def draw(found: dict[str, Any], path: Path) -> None:
    """Plot milliseconds by size, with one line for each of the three ways to run."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 3.6), layout="constrained")
    FigureCanvasAgg(figure)
    axes: Any = figure.add_subplot()
    named = {"spmd": 'torch.compile(backend="spmd")', "eager": "device jax, eager", "inductor": "inductor, on CPU tensors"}
    for (way, times), color in zip(found["milliseconds by size"].items(), ("#c44e52", "#4c72b0", "#55a868"), strict=False):
        sizes = sorted(times, key=int)
        axes.plot([int(n) for n in sizes], [times[n] for n in sizes], "o-", markersize=3, color=color, label=named[way])
    axes.set(xlabel="batch size", ylabel="ms, forward and backward", xlim=(0, None), ylim=(0, None))
    axes.set_title(f"{found['sizes']} batch sizes, {found['programs']} programs", fontsize=9, loc="left")
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)


def inductor_works() -> bool:
    """Whether a C++ compiler for inductor's code is installed."""
    return shutil.which("g++") is not None or shutil.which("clang++") is not None


PARTS: dict[str, Callable[[], Any]] = {"step": step, "host": host, "kept": kept, "sizes": sizes}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=PARTS)
    parser.add_argument("--json", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    found = json.loads(chosen.json.read_text()) if chosen.json.exists() else {}
    for name in [chosen.only] if chosen.only else PARTS:
        found[name] = PARTS[name]()
        print(json.dumps({name: found[name]}, indent=1), flush=True)
        if name == "sizes":
            draw(found[name], CHART)
        found["machine"] = f"{platform.machine()}, torch {torch.__version__}"
        chosen.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
