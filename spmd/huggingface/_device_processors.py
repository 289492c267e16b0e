"""transformers' logits processors, for sequences of a fixed size whose current length is a number on the device.

Processors that look only at scores run unchanged, with their numbers as tensors. Those that need the length of the sequence are
reimplemented here. A processor that is in neither table, or is user-defined, needs the host for each token.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process as theirs


@dataclass(frozen=True)
class Sequences:
    """The sequences inside a program.

    Attributes:
        tokens_BL: int64; entries from `length` on are undefined.
        length: 0-dim, number of tokens in each row.
    """

    tokens_BL: Tensor
    length: Tensor


Apply = Callable[[Sequences, Tensor, Sequence[Tensor]], Tensor]


@dataclass(frozen=True)
class OnDevice:
    """A processor inside a program.

    Attributes:
        key: static part of the processor, for the program's key.
        numbers: host tensors that are inputs of each call.
        apply: function of sequences, scores [B, V] and the numbers on the device; returns scores.
    """

    key: tuple[Any, ...]
    apply: Apply
    numbers: list[Tensor] = field(default_factory=list[Tensor])


# Processors of scores alone, with their attributes that become inputs of a call, in float64 like Python floats.
_OF_SCORES: dict[str, tuple[str, ...]] = {
    "TemperatureLogitsWarper": ("temperature",),
    "TopKLogitsWarper": (),
    "TopPLogitsWarper": ("top_p",),
    "MinPLogitsWarper": ("min_p",),
    "TypicalLogitsWarper": ("mass",),
    "EpsilonLogitsWarper": ("epsilon",),
    "InfNanRemoveLogitsProcessor": (),
    "LogitNormalization": (),
}


def on_device(processors: Sequence[Any]) -> list[OnDevice] | None:
    """All processors in the form for a program; None if one needs the host."""
    found: list[OnDevice] = []
    for processor in processors:
        made = _one(processor)
        if made is None:
            return None
        found.append(made)
    return found


def _one(processor: Any) -> OnDevice | None:
    kind = type(processor)
    if kind.__module__ != theirs.__name__:
        return None
    if kind.__name__ in _OF_SCORES:
        return _of_scores(processor, _OF_SCORES[kind.__name__])
    make = _OF_LENGTH.get(kind.__name__)
    return None if make is None else make(processor)


def _of_scores(processor: Any, names: tuple[str, ...]) -> OnDevice:
    fixed = tuple(sorted((name, value) for name, value in vars(processor).items() if name not in names))

    def apply(sequences: Sequences, scores_BV: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        its = copy.copy(processor)
        vars(its).update(zip(names, numbers, strict=True))
        return its(sequences.tokens_BL, scores_BV)

    return OnDevice(
        (type(processor).__name__, fixed), apply, [torch.tensor(getattr(processor, name), dtype=torch.float64) for name in names]
    )


def _mask(tokens: Tensor, scores_BV: Tensor) -> Tensor:
    """bool [V]: which vocabulary entries are among `tokens`."""
    return torch.isin(torch.arange(scores_BV.shape[-1], device=scores_BV.device), tokens)


def _without(tokens: Tensor, scores_BV: Tensor) -> Tensor:
    return scores_BV.masked_fill(_mask(tokens, scores_BV), -math.inf)


def _only(tokens: Tensor, scores_BV: Tensor) -> Tensor:
    return torch.full_like(scores_BV, -math.inf).masked_fill(_mask(tokens, scores_BV), 0.0)


def _where(name: str, tests: Callable[[Tensor, Tensor], Tensor], bound: int, change: Callable[..., Tensor], tokens: Any) -> OnDevice:
    """Apply `change(tokens, scores)` while `tests(length, bound)` is true."""

    def apply(sequences: Sequences, scores_BV: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        limit, found = numbers
        return torch.where(tests(sequences.length, limit), change(found, scores_BV), scores_BV)

    found = torch.as_tensor(tokens).reshape(-1)
    return OnDevice((name, len(found)), apply, [torch.tensor(bound), found])


def _suppressed(processor: Any) -> OnDevice:
    tokens = processor.suppress_tokens
    return OnDevice(("suppress", len(tokens)), lambda sequences, scores_BV, numbers: _without(numbers[0], scores_BV), [tokens])


def _repetition(processor: Any) -> OnDevice | None:
    ignored = processor.prompt_ignore_length

    def apply(sequences: Sequences, scores_BV: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        penalty, first = numbers
        places = torch.arange(sequences.tokens_BL.shape[1], device=scores_BV.device)
        counts_BL = (places >= first.reshape(-1, 1)) & (places < sequences.length)
        size = scores_BV.shape[-1]
        tokens_BL = torch.where(counts_BL, sequences.tokens_BL.clamp(max=size), size)
        seen_BV = torch.zeros(len(scores_BV), size + 1, dtype=torch.bool, device=scores_BV.device).scatter(1, tokens_BL, True)[:, :size]
        return torch.where(seen_BV, torch.where(scores_BV < 0, scores_BV * penalty, scores_BV / penalty), scores_BV)

    first = torch.as_tensor(0 if ignored is None else ignored)
    return OnDevice(("repetition", first.dim()), apply, [torch.tensor(processor.penalty, dtype=torch.float64), first])


def _no_repeat(processor: Any) -> OnDevice:
    size = processor.ngram_size

    def apply(sequences: Sequences, scores_BV: Tensor, numbers: Sequence[Tensor]) -> Tensor:
        tokens_BL, length, num_scores = sequences.tokens_BL, sequences.length, scores_BV.shape[-1]
        windows_BWN = tokens_BL.unfold(1, size, 1)
        last = length + 1 - size + torch.arange(size - 1, device=scores_BV.device)
        prefix_BN = tokens_BL.index_select(1, last.clamp(min=0))
        matches_BW = (windows_BWN[..., :-1] == prefix_BN[:, None]).all(-1)
        ends = torch.arange(windows_BWN.shape[1], device=scores_BV.device) + size
        matches_BW = matches_BW & (ends <= length) & (length >= size)
        banned_BW = torch.where(matches_BW, windows_BWN[..., -1].clamp(max=num_scores), num_scores)
        banned_BV = torch.zeros(len(scores_BV), num_scores + 1, dtype=torch.bool, device=scores_BV.device).scatter(1, banned_BW, True)
        return scores_BV.masked_fill(banned_BV[:, :num_scores], -math.inf)

    return OnDevice(("no repeat", size), apply)


_OF_LENGTH: dict[str, Callable[[Any], OnDevice | None]] = {
    "MinLengthLogitsProcessor": lambda p: _where("min", torch.lt, p.min_length, _without, p.eos_token_id),
    "MinNewTokensLengthLogitsProcessor": lambda p: _where(
        "min", torch.lt, p.prompt_length_to_skip + p.min_new_tokens, _without, p.eos_token_id
    ),
    "ForcedBOSTokenLogitsProcessor": lambda p: _where("only", torch.eq, 1, _only, p.bos_token_id),
    "ForcedEOSTokenLogitsProcessor": lambda p: _where("only", torch.eq, p.max_length - 1, _only, p.eos_token_id),
    "SuppressTokensAtBeginLogitsProcessor": lambda p: _where("begin", torch.eq, p.begin_index, _without, p.begin_suppress_tokens),
    "SuppressTokensLogitsProcessor": _suppressed,
    "RepetitionPenaltyLogitsProcessor": _repetition,
    "NoRepeatNGramLogitsProcessor": _no_repeat,
}

__all__ = ["OnDevice", "Sequences", "on_device"]
