"""Generates many tokens per call: the program picks each token, appends it and continues until all rows have ended.

loop = token_loop(processors, criteria, config)      # None: something needs the host for each token
tokens_BT = loop.run(programs, cache, tokens_BT)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from spmd.device._random_stream import default_stream
from spmd.huggingface._device_processors import OnDevice, Sequences, on_device
from spmd.huggingface._generation_programs import Programs, scores
from spmd.huggingface._key_value_cache import KeyValueCache
from spmd.program.flow._loops import looped

_TOKENS_PER_CALL = 64  # few enough that Ctrl-C works and a job's watchdog sees progress


@dataclass(frozen=True)
class TokenLoop:
    """How tokens are chosen, and when a row ends.

    Attributes:
        processors: processors of the scores, in order.
        max_length: maximum number of tokens per row, including the prompt.
        ends: int64 [E], the tokens that end a row, and a 0-dim tensor, the padding token after the end; empty if no token ends a row.
        draws: sample tokens instead of taking the most likely one.
    """

    processors: list[OnDevice]
    max_length: int
    ends: list[Tensor]
    draws: bool

    def run(self, programs: Programs, cache: KeyValueCache, tokens_BT: Tensor) -> Tensor:
        """Generate; returns prompt and new tokens, [B, T + n], on the host. All of the prompt but its last token must be in `cache`."""
        batch, length = tokens_BT.shape
        tokens = programs.put(torch.nn.functional.pad(tokens_BT.long(), (0, cache.sizes.slots - length)))
        open_B = programs.put(torch.ones(batch, dtype=torch.bool))
        numbers = [[programs.put_whole(number) for number in processor.numbers] for processor in self.processors]
        ends = [programs.put_whole(tensor) for tensor in self.ends]
        key = ("tokens", cache.sizes, self.draws, tuple(p.key for p in self.processors), *(tuple(t.shape) for t in ends), cache.shapes)
        is_open = True
        while is_open and length < self.max_length:
            last = min(self.max_length, length + _TOKENS_PER_CALL)
            bounds = [programs.put_whole(torch.tensor(bound)) for bound in (length, last)]
            args = (dict(cache.given), cache.layers, tokens, open_B, bounds, numbers, ends)
            result = programs.run(key, self._tokens, *args)
            now, is_open = (int(value) for value in result.cpu())
            if self.draws:
                default_stream.draws += now - length - 1  # the call itself counted one
            length = now
        cache.num_tokens = length - 1
        return tokens.cpu().as_subclass(Tensor)[:, :length].contiguous()

    def _tokens(self) -> Callable[..., Any]:
        def take_tokens(
            model: Any,
            given: dict[str, Tensor],
            layers: list[Tensor],
            tokens_BL: Tensor,
            open_B: Tensor,
            bounds: list[Tensor],
            numbers: list[list[Tensor]],
            ends: list[Tensor],
        ) -> Tensor:
            first, last = bounds

            def continues(length: Tensor, tokens_BL: Tensor, open_B: Tensor) -> Tensor:
                return (length < last) & open_B.any()

            def one(length: Tensor, tokens_BL: Tensor, open_B: Tensor) -> tuple[Tensor, Tensor, Tensor]:
                slot = length - 1
                scores_BV = scores(model, given, layers, tokens_BL.index_select(1, slot[None]), slot)
                for processor, its in zip(self.processors, numbers, strict=True):
                    scores_BV = processor.apply(Sequences(tokens_BL, length), scores_BV, its)
                chosen_B = self._chosen(scores_BV)
                if ends:
                    chosen_B = torch.where(open_B, chosen_B, ends[1])
                    open_B = open_B & ~torch.isin(chosen_B, ends[0])
                return length + 1, tokens_BL.index_copy(1, length[None], chosen_B[:, None]), open_B

            length, new_BL, still_B = looped(continues, one, (first.clone(), tokens_BL.clone(), open_B.clone()), (), counts_draws=True)
            tokens_BL.copy_(new_BL)
            open_B.copy_(still_B)
            return torch.stack([length, still_B.any().to(length.dtype)])

        return take_tokens

    def _chosen(self, scores_BV: Tensor) -> Tensor:
        if self.draws:
            return torch.multinomial(torch.softmax(scores_BV, -1), 1)[:, 0]
        return scores_BV.argmax(-1)


def token_loop(processors: Any, criteria: Any, config: Any) -> TokenLoop | None:
    """The loop for the arguments that `generate` prepared; None if a processor or a criterion needs the host for each token."""
    made = on_device(processors)
    limits = [criterion.max_length for criterion in criteria if type(criterion) is MaxLengthCriteria]
    ends = [part for c in criteria if type(c) is EosTokenCriteria for part in (c.eos_token_id, config._pad_token_tensor)]
    if made is None or len(limits) != 1 or len(ends) > 2 or len(criteria) != 1 + len(ends) // 2 or any(part is None for part in ends):
        return None
    return TokenLoop(made, limits[0], ends, bool(config.do_sample))


__all__ = ["TokenLoop", "token_loop"]
