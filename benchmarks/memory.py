"""Memory of each phase of training a Llama with FSDP over 8 virtual devices, and temporaries compared with hand-written JAX.

    make memory                                       # 24 layers; writes results/memory.json
    python -m benchmarks.memory --layers 6 --json None

Ours is built on meta, sharded, initialized, trained, saved, restored and trained again, with the layers as a loop (`roll=True`) and
recomputation of each layer. For each phase the figures are the bytes on the devices at its end, and the resident memory of the process at
its end and at its peak. They are compared with the bytes of the live state: the parameters, and from the first step on the optimizer's two
moments. Memory that the allocator caches is returned to the system before each phase. The hand-written step is that of `llama_pod_jax`, a
checkpointed `lax.scan` over layers with the same sharding. The temporaries of the two programs are compared for these devices and for v5e.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import rich.console
import rich.table
import tyro

HERE = Path(__file__).resolve().parent
CHIPS = 8
TOPOLOGIES = {"cpu": None, "v5e": "v5e:2x4"}


@dataclass(frozen=True)
class Options:
    """Attributes:
    layers: number of layers.
    width: width of the model; the MLP is four times as wide.
    positions: length of a sequence, in tokens; each device has one sequence.
    json: file for the result; None only prints it.
    """

    layers: int = 24
    width: int = 512
    positions: int = 256
    json: Path | None = HERE / "results" / "memory.json"


def config_of(layers: int, width: int, positions: int) -> Any:
    from transformers import LlamaConfig

    sizes = {"hidden_size": width, "intermediate_size": 4 * width, "num_attention_heads": width // 128, "num_key_value_heads": width // 128}
    return LlamaConfig(
        **sizes, num_hidden_layers=layers, vocab_size=1024, max_position_embeddings=positions, rope_theta=5e5, use_cache=False
    )


def host_bytes() -> tuple[int, int]:
    """Resident memory of this process in bytes, and its peak since the last call of `reset_peak`."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    now, peak = (int(lines[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return now, peak


def reset_peak() -> None:
    Path("/proc/self/clear_refs").write_text("5")


def device_bytes() -> int:
    """Bytes of all arrays on all devices. Memory that several arrays share counts once."""
    import jax

    shards = (shard.data for array in jax.live_arrays() for shard in array.addressable_shards)
    return sum({data.unsafe_buffer_pointer(): data.nbytes for data in shards}.values())


class Trained:
    """Our model, its optimizer and its step."""

    def __init__(self, layers: int, width: int, positions: int, topology: str | None) -> None:
        import torch
        from transformers import LlamaForCausalLM

        import mesh
        import spmd

        self.grid = mesh.Mesh(range(CHIPS), (CHIPS,), ("fsdp",), topology=topology)
        with torch.device("meta"):
            model = LlamaForCausalLM(config_of(layers, width, positions))
        if topology is not None:
            model = model.to(torch.bfloat16)
        model.activation_checkpointing_enable()
        model.train()
        spmd.shard_module(model, self.grid, "fsdp")
        self.model = model.to_empty(device="jax")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), 1e-3)
        self.step = spmd.compile(self._step, roll=True)
        ids = (
            torch.empty(CHIPS, positions, dtype=torch.int64, device="jax")
            if topology
            else torch.randint(0, 1024, (CHIPS, positions)).to("jax")
        )
        self.ids = spmd.mark_sharding(ids, self.grid, ("fsdp", None))

    def _step(self, ids: Any) -> Any:
        self.optimizer.zero_grad()
        loss = self.model(input_ids=ids, labels=ids).loss
        loss.backward()
        self.optimizer.step()
        return loss

    def initialise(self) -> None:
        import jax
        import torch

        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.normal_(0.0, 0.02)
        jax.block_until_ready(jax.live_arrays())

    def train(self) -> None:
        for _ in range(3):
            self.step(self.ids).item()

    def save(self, folder: str) -> None:
        import spmd

        spmd.checkpoint.save(folder, 1, {"model": self.model, "optimizer": self.optimizer}, wait=True)

    def restore(self, folder: str) -> None:
        import spmd

        spmd.checkpoint.restore(folder, {"model": self.model, "optimizer": self.optimizer})


def run_small() -> None:
    """Run every phase once with a small model."""
    small = Trained(2, 128, 64, None)
    with tempfile.TemporaryDirectory() as folder:
        small.initialise()
        small.train()
        small.save(folder)
        small.restore(folder)
        small.train()


def phases(layers: int, width: int, positions: int) -> dict[str, Any]:
    """Bytes after each phase, minus those after a run of all phases with a small model, so that code and compilers are not counted."""
    from mesh.platform._allocator import give_back_freed_memory

    run_small()
    gc.collect()
    give_back_freed_memory()
    before, rows, made = host_bytes()[0], dict[str, Any](), list[Trained]()
    num_parameters = 0

    def phase(name: str, do: Callable[[], Any], stays: int) -> None:
        gc.collect()
        give_back_freed_memory()
        reset_peak()
        do()
        gc.collect()
        now, peak = host_bytes()
        bytes_that_stay = 4 * stays * num_parameters
        rows[name] = {"stays": bytes_that_stay, "devices": device_bytes(), "host": now - before, "host_peak": peak - before}

    phase("build on meta", lambda: made.append(Trained(layers, width, positions, None)), 0)
    trained = made[0]
    num_parameters = sum(parameter.numel() for parameter in trained.model.parameters())
    with tempfile.TemporaryDirectory() as folder:
        phase("initialise", trained.initialise, 1)
        phase("first step", lambda: trained.step(trained.ids).item(), 3)
        phase("steady steps", trained.train, 3)
        phase("save", lambda: trained.save(folder), 3)
        phase("steps after the save", trained.train, 3)
        phase("restore", lambda: trained.restore(folder), 3)
        phase("steps after the restore", trained.train, 3)
        phase("six restores", lambda: [trained.restore(folder) for _ in range(6)], 3)
        phase("steps after them", trained.train, 3)
    return {"parameters": num_parameters, "phases": rows}


def ours(layers: int, width: int, positions: int, topology: str | None) -> Any:
    trained = Trained(layers, width, positions, topology)
    if topology is None:
        trained.initialise()
    return trained.step.program(trained.ids).compiled


def by_hand(layers: int, width: int, positions: int, topology: str | None) -> Any:
    import jax
    import jax.numpy as jnp
    import llama_pod_jax
    from jax.sharding import NamedSharding, PartitionSpec

    import mesh

    devices = mesh.Mesh(range(CHIPS), (CHIPS,), ("fsdp",), topology=topology).to_jax()
    config, dtype = config_of(layers, width, positions), jnp.float32 if topology is None else jnp.bfloat16

    def shape(sizes: tuple[int, ...], spec: tuple[str | None, ...], dtype: Any = dtype) -> Any:
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(devices, PartitionSpec(*spec)))

    own, stacked = llama_pod_jax.shapes(config, layers)
    both = {n: shape(s, ("fsdp",)) for n, s in own.items()}, {n: shape(s, (None, "fsdp")) for n, s in stacked.items()}
    state = both, both, both, shape((), (), jnp.float32)
    out = jax.tree.map(lambda v: v.sharding, state)
    kernel = llama_pod_jax.plain_attention if topology is None else None
    jitted = jax.jit(lambda s, x: llama_pod_jax.step(s, x, config, devices, kernel), donate_argnums=0, out_shardings=(out, None))
    lowered = jitted.lower(state, shape((CHIPS, positions), ("fsdp",), jnp.int32))
    return lowered.compile(mesh.topology_options() if topology else None)


def temporaries(contender: str, layers: int, width: int, positions: int, ground: str) -> dict[str, Any]:
    compiled = (ours if contender == "ours" else by_hand)(layers, width, positions, TOPOLOGIES[ground])
    memory = compiled.memory_analysis()
    return {"arguments": memory.argument_size_in_bytes, "temporaries": memory.temp_size_in_bytes}


def run_in_child(task: dict[str, Any]) -> None:
    """Run a task in this process, and print its result."""
    import mesh

    sys.path.insert(0, str(HERE))
    mesh.virtual_devices(CHIPS)
    what = task.pop("what")
    print("RESULT " + json.dumps(phases(**task) if what == "phases" else temporaries(what, **task)))


def measured(what: str, options: Options, **more: Any) -> dict[str, Any]:
    """The result of a task that runs in its own process."""
    task = {"what": what, "layers": options.layers, "width": options.width, "positions": options.positions, **more}
    command = [sys.executable, "-m", "benchmarks.memory", json.dumps(task)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=HERE.parent)
    lines = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if not lines:
        raise SystemExit(f"{what}: {done.stderr[-2000:]}")
    return json.loads(lines[0].removeprefix("RESULT "))


def main(options: Options) -> None:
    record: dict[str, Any] = {"options": {**asdict(options), "json": None}, **measured("phases", options)}
    record["programs"] = {ground: {who: measured(who, options, ground=ground) for who in ("ours", "by hand")} for ground in TOPOLOGIES}
    table = rich.table.Table("phase", "live state, MB", "devices, MB", "process, MB", "process at peak, MB")
    for name, row in record["phases"].items():
        table.add_row(name, *(f"{row[key] / 1e6:,.0f}" for key in ("stays", "devices", "host", "host_peak")))
    console = rich.console.Console()
    console.print(table)
    for ground, rows in record["programs"].items():
        ratio = rows["ours"]["temporaries"] / rows["by hand"]["temporaries"]
        console.print(
            f"{ground}: temporaries {rows['ours']['temporaries'] / 1e6:,.1f} MB per device, {ratio:.2f} times those of hand-written JAX"
        )
    if options.json is not None:
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    if len(sys.argv) == 2 and sys.argv[1].startswith("{"):
        run_in_child(json.loads(sys.argv[1]))
    else:
        main(tyro.cli(Options, description=(__doc__ or "").split("\n\n", maxsplit=1)[0]))
