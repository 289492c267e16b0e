"""Compares presets with hand-written shardings of the same models: the collectives of one training step, read from compiled programs.

    python -m benchmarks.presets                     # all models and forms; writes benchmarks/results/presets.json
    python -m benchmarks.presets --models Llama --forms megatron,lora

The hand-written version calls `mark_sharding` for each parameter by name, and `fully_shard` for each block. The mesh is 2 x 4 ("data",
"model") with tensor parallelism, otherwise 8, of virtual devices. Counts and bytes are exact; nothing is timed.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from torch import nn

import mesh
import spmd
from benchmarks.preset_models import SAMPLES, Sample

RESULTS = Path(__file__).resolve().parent / "results" / "presets.json"
FORMS = ("megatron", "fsdp", "fsdp+megatron", "lora")


@dataclass(frozen=True)
class Options:
    """Attributes:
    models: comma-separated names of models; empty: all.
    forms: comma-separated forms: "megatron", "fsdp", "fsdp+megatron", "lora" (PEFT adapters with "megatron"); empty: all.
    json: file for the result; None only prints it.
    """

    models: str = ""
    forms: str = ""
    json: Path | None = RESULTS


def made(sample: Sample, form: str) -> nn.Module:
    """The model on the device, with LoRA adapters for the form "lora"."""
    torch.manual_seed(0)
    model = sample.make()
    if form == "lora":
        import peft

        config = peft.LoraConfig(r=4, target_modules=r".*\.(" + "|".join(a.replace(".", r"\.") for a in sample.adapters) + ")")
        model = peft.get_peft_model(model, config)  # pyright: ignore[reportArgumentType]
    return model.to("jax")


def by_hand(model: nn.Module, sample: Sample, form: str, m: mesh.Mesh) -> None:
    """Shard without a preset: each parameter by name, and each block as an FSDP unit."""
    if form != "fsdp":
        adapted = [
            (pattern.replace(".weight", ".base_layer.weight").replace(".bias", ".base_layer.bias"), spec) for pattern, spec in sample.rules
        ]
        lines = [*sample.adapter_rules, *adapted, *sample.rules] if form == "lora" else sample.rules
        rules = mesh.Rules(*lines)
        for name, parameter in model.named_parameters():
            rule = rules.first(name)
            spec = (None,) * parameter.dim() if rule is None else rule.spec_for(name, tuple(parameter.shape), m)
            spmd.mark_sharding(parameter, m, spec)
    if "fsdp" in form:
        for path in sample.blocks:
            for block in model.get_submodule(path).children():
                spmd.fully_shard(block, m)
        spmd.fully_shard(model, m)


def collectives(sample: Sample, form: str, is_preset: bool) -> dict[str, int]:
    """Collectives of one training step: the count by kind and axis, and the total "bytes"."""
    m = mesh.Mesh(range(8), (8,), ("data",)) if form == "fsdp" else mesh.Mesh(range(8), (2, 4), ("data", "model"))
    model = made(sample, form)
    if is_preset:
        spmd.shard_module(model, m, "megatron" if form == "lora" else form)
    else:
        by_hand(model, sample, form, m)
    torch.manual_seed(1)
    batch: dict[str, torch.Tensor] = {
        k: spmd.mark_sharding(v.to("jax"), m, ("data", *(None,) * (v.dim() - 1))) for k, v in sample.batch().items()
    }
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)

    @spmd.compile
    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        optimizer.zero_grad()
        output: Any = model(**batch)
        loss = output if isinstance(output, torch.Tensor) else output.loss
        loss.backward()
        optimizer.step()
        return loss

    program = step.program(batch)
    found = program.collectives()
    counts = {f"{kind} {'×'.join(axes)}".strip(): count for (kind, axes), count in sorted(found.by_axis().items())}
    return {**counts, "bytes": sum(one.num_bytes for one in found)}


def run(options: Options) -> None:
    """Measure all selected pairs of model and form, and write the results."""
    mesh.virtual_devices(8)
    results: dict[str, dict[str, Any]] = {}
    for name in options.models.split(",") if options.models else SAMPLES:
        for form in options.forms.split(",") if options.forms else FORMS:
            hand, ours = (collectives(SAMPLES[name], form, is_preset) for is_preset in (False, True))
            ratio = round(ours["bytes"] / hand["bytes"], 3)
            results.setdefault(name, {})[form] = {"by hand": hand, "preset": ours, "bytes, preset / by hand": ratio}
            print(f"{name} {form}: {ratio} of {hand['bytes']:,} bytes, {ours}", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    run(tyro.cli(Options))
