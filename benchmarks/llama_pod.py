"""Memory of Llama-3-8B on a pod: Hugging Face's model under the preset "fsdp", and hand-written JAX, compiled for v5e:16x16.

    python benchmarks/llama_pod.py                       # 32 layers, one sequence of 4,096 per chip; writes results/llama_pod.json
    python benchmarks/llama_pod.py --layers 4 --json None

Both are compiled ahead of time without a TPU, each in its own process. The figures are the compile times, the host memory, and the
peak memory of a chip as reported by the TPU compiler.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.console
import rich.table
import tyro

HERE = Path(__file__).resolve().parent
TOPOLOGY, CHIPS = "v5e:16x16", 256


@dataclass(frozen=True)
class Options:
    """Attributes:
    layers: number of layers.
    positions: length of a sequence, in tokens.
    json: file for the result; None only prints it.
    """

    layers: int = 32
    positions: int = 4096
    json: Path | None = HERE / "results" / "llama_pod.json"


def config_of(layers: int) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 128256}
    return LlamaConfig(**sizes, num_hidden_layers=layers, max_position_embeddings=8192, rope_theta=500000.0, use_cache=False)


def ours(layers: int, positions: int) -> tuple[dict[str, float], Any]:
    import torch
    from transformers import LlamaForCausalLM

    import mesh
    import spmd

    grid = mesh.Mesh(range(CHIPS), (CHIPS,), ("fsdp",), topology=TOPOLOGY)
    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(layers)).to(torch.bfloat16)
    model.activation_checkpointing_enable()
    model.train()
    spmd.shard_module(model, grid, "fsdp")
    model.to_empty(device="jax")
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3)

    @spmd.compile(roll=True)
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        return loss

    x = spmd.mark_sharding(torch.empty(CHIPS, positions, dtype=torch.int64, device="jax"), grid, ("fsdp", None))
    program = step.program(x)
    return {name: getattr(program.timings, name) for name in ("trace_s", "lower_s", "compile_s")}, program.compiled


def by_hand(layers: int, positions: int) -> tuple[dict[str, float], Any]:
    import jax
    import jax.numpy as jnp
    import llama_pod_jax
    from jax.sharding import NamedSharding, PartitionSpec

    import mesh

    devices = mesh.Mesh(range(CHIPS), (CHIPS,), ("fsdp",), topology=TOPOLOGY).to_jax()
    config = config_of(layers)

    def shape(sizes: tuple[int, ...], spec: tuple[str | None, ...], dtype: Any = jnp.bfloat16) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(devices, PartitionSpec(*spec)))

    own, stacked = llama_pod_jax.shapes(config, layers)
    both = {n: shape(s, ("fsdp",)) for n, s in own.items()}, {n: shape(s, (None, "fsdp")) for n, s in stacked.items()}
    state = both, both, both, shape((), (), jnp.float32)
    out = jax.tree.map(lambda v: v.sharding, state)
    jitted = jax.jit(lambda s, x: llama_pod_jax.step(s, x, config, devices), donate_argnums=0, out_shardings=(out, None))
    marks = [time.perf_counter()]
    traced = jitted.trace(state, shape((CHIPS, positions), ("fsdp",), jnp.int32))
    marks.append(time.perf_counter())
    lowered = traced.lower()
    marks.append(time.perf_counter())
    compiled = lowered.compile(mesh.topology_options())
    marks.append(time.perf_counter())
    return {n: b - a for n, a, b in zip(("trace_s", "lower_s", "compile_s"), marks, marks[1:], strict=False)}, compiled


def main(options: Options) -> None:
    rows: dict[str, Any] = {}
    for contender in ("ours", "by hand"):
        task = json.dumps({"layers": options.layers, "positions": options.positions, "contender": contender})
        done = subprocess.run([sys.executable, __file__, task], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        rows[contender] = json.loads(done.stdout.splitlines()[-1])
    table = rich.table.Table("", "trace, s", "lower, s", "compile, s", "CPU, s", "host memory, GB", "peak of a chip, GiB")
    for name, row in rows.items():
        seconds = (f"{row[each]:.1f}" for each in ("trace_s", "lower_s", "compile_s", "cpu_s"))
        table.add_row(name, *seconds, f"{row['host_bytes'] / 1e9:.1f}", f"{row['peak_bytes'] / 2**30:.2f}")
    rich.console.Console(width=120).print(table)
    if options.json is not None:
        found = {"topology": TOPOLOGY, "layers": options.layers, "positions": options.positions, "rows": rows}
        options.json.write_text(json.dumps(found, indent=1) + "\n")


def run_one(task: dict[str, Any]) -> None:
    """Measure one contender in this process. The last line of output is the result."""
    stages, compiled = (ours if task["contender"] == "ours" else by_hand)(task["layers"], task["positions"])
    memory, used = compiled.memory_analysis(), resource.getrusage(resource.RUSAGE_SELF)
    stages |= {"cpu_s": used.ru_utime + used.ru_stime, "host_bytes": used.ru_maxrss * 1024}
    sizes = {
        "peak_bytes": memory.peak_memory_in_bytes,
        "temp_bytes": memory.temp_size_in_bytes,
        "argument_bytes": memory.argument_size_in_bytes,
    }
    print(json.dumps(stages | sizes))


if __name__ == "__main__":
    if sys.argv[1:] and sys.argv[1].startswith("{"):
        run_one(json.loads(sys.argv[1]))
    else:
        main(tyro.cli(Options))
