"""Speed of a Llama's `model.generate`, compared with a hand-written loop around a compiled step and with CPU torch, on 1 and 8 devices.

    python -m benchmarks.generate                # writes benchmarks/results/generate.json
    python -m benchmarks.generate --tokens 16 --turns 1 --layers 1 --print

The hand-written loop uses known lengths, a static cache and greedy decoding inside the step, and reads no token before the end. All run in
turn. The figures are median times, and the median ratio of adjacent turns.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import torch
import transformers
from transformers.cache_utils import Cache, StaticLayer

import spmd
from mesh import Mesh, virtual_devices
from spmd.huggingface._generation_programs import programs_of

RESULTS = Path(__file__).resolve().parent / "results" / "generate.json"
_PROMPT, _ROWS = 12, {"1 device": 1, "8 devices": 4}


def llama(layers: int) -> Any:
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8}
    config = transformers.LlamaConfig(**sizes, vocab_size=2048, max_position_embeddings=512, eos_token_id=None, pad_token_id=0)
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(config).eval()


class ByHand:
    """Hand-written generation with two compiled functions: prefill of the prompt, and decoding of one token."""

    def __init__(self, model: Any, mesh: Mesh | None, slots: int) -> None:
        self.model, self.mesh, self.slots = model, mesh, slots
        self.prompt, self.token = spmd.compile(torch.no_grad()(self._prompt)), spmd.compile(torch.no_grad()(self._token))

    def _laid_out(self, tensor: torch.Tensor, *spec: str | None) -> torch.Tensor:
        return tensor if self.mesh is None else spmd.mark_sharding(tensor, self.mesh, spec)

    def _prompt(self, tokens: torch.Tensor) -> Any:
        cache = Cache(layers=[StaticLayer(self.slots) for _ in self.model.model.layers])
        logits = self.model(tokens, past_key_values=cache, logits_to_keep=1).logits
        kept = [self._laid_out(t, "data", "model", None, None) for layer in cache.layers for t in (layer.keys, layer.values)]
        return self._laid_out(logits[:, -1:].argmax(-1), "data", None), torch.full((), tokens.shape[1], device="jax"), kept

    def _token(self, token: torch.Tensor, place: torch.Tensor, kept: list[torch.Tensor]) -> Any:
        layers: list[Any] = []
        for keys, values in zip(kept[::2], kept[1::2], strict=True):
            layer = StaticLayer(self.slots)
            layer.keys, layer.values, layer.cumulative_length = keys, values, place.clone()
            layer.dtype, layer.device, layer.is_initialized = keys.dtype, keys.device, True
            layers.append(layer)
        positions = place.view(1, 1)
        logits = self.model(token, past_key_values=Cache(layers=layers), position_ids=positions, logits_to_keep=1).logits
        return self._laid_out(logits.argmax(-1), "data", None), place + 1

    def generate(self, tokens: torch.Tensor, count: int) -> torch.Tensor:
        token, place, kept = self.prompt(self._laid_out(tokens.to("jax"), "data", None))
        found = [token]
        for _ in range(count - 1):
            token, place = self.token(token, place, kept)
            found.append(token)
        return torch.cat([tokens, *(token.cpu() for token in found)], 1)


def seconds(call: Callable[[], torch.Tensor]) -> tuple[float, torch.Tensor]:
    start = time.perf_counter()
    found = call().cpu()
    return time.perf_counter() - start, found


def compilations(call: Callable[[], object]) -> int:
    """Number of compilations by jax during a call."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **kwargs: Any) -> None:
        found.extend([event] * (event == "/jax/core/compile/backend_compile_duration"))

    jax.monitoring.register_event_duration_secs_listener(note)
    call()
    jax.monitoring.unregister_event_duration_listener(note)
    return len(found)


def measured(where: str, layers: int, tokens: int, turns: int) -> dict[str, Any]:
    """Measure one number of devices, and return the figures."""
    host = llama(layers)
    model = copy.deepcopy(host)
    mesh = None if where == "1 device" else Mesh(range(8), (2, 4), ("data", "model"))
    if mesh is not None:
        spmd.shard_module(model, mesh, "megatron")
    model = model.to("jax")
    by_hand = ByHand(model, mesh, 64 if tokens + _PROMPT <= 64 else 256)
    prompt = torch.randint(3, 2000, (_ROWS[where], _PROMPT), generator=torch.Generator().manual_seed(1))
    options: dict[str, Any] = {"max_new_tokens": tokens, "do_sample": False}
    first_s, ours = seconds(lambda: model.generate(prompt, **options))
    by_hand_first_s, theirs = seconds(lambda: by_hand.generate(prompt, tokens))
    wanted = host.generate(prompt, **options)
    again = compilations(lambda: model.generate(prompt, **options))
    times: list[tuple[float, float, float]] = []
    for turn in range(turns):
        one = seconds(lambda: model.generate(prompt, **options))[0]
        other = seconds(lambda: by_hand.generate(prompt, tokens))[0]
        cpu = seconds(lambda: host.generate(prompt, **options))[0] if turn < 3 else times[0][2]
        times.append((one, other, cpu))
    rate = [len(prompt) * tokens / statistics.median(turn[i] for turn in times) for i in range(3)]
    return {
        "model": f"Llama, {layers} layers of width 256, {len(prompt)} x {_PROMPT} + {tokens} tokens",
        "mesh": "" if mesh is None else str(mesh),
        "programs": programs_of(model).num_executables,
        "compilations_of_the_second_call": again,
        "equal_to_cpu_torch": bool(torch.equal(ours, wanted)),
        "by_hand_equal_to_cpu_torch": bool(torch.equal(theirs, wanted)),
        "tokens_per_s_over_by_hand": round(statistics.median(other / one for one, other, _ in times), 2),
        "tokens_per_s": round(rate[0]),
        "by_hand_tokens_per_s": round(rate[1]),
        "cpu_torch_tokens_per_s": round(rate[2]),
        "first_call_s": round(first_s, 1),
        "by_hand_first_call_s": round(by_hand_first_s, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=48)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--print", action="store_true", help="only print; do not write the results")
    chosen = parser.parse_args()
    transformers.logging.set_verbosity_error()
    virtual_devices(8)
    found: dict[str, Any] = {}
    for where in _ROWS:
        found[where] = measured(where, chosen.layers, chosen.tokens, chosen.turns)
        print(where, json.dumps(found[where], indent=2), flush=True)
    if not chosen.print:
        RESULTS.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
