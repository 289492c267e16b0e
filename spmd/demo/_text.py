"""The demo's training data, which every machine has: the source files of Python's standard library as characters."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_MAX_CHARACTERS = 4_000_000
_HELD_OUT = 20  # one file in this many


@dataclass(frozen=True)
class Text:
    """Training text and held-out text as tensors of character indices.

    Attributes:
        train, held_out: int64[N] each, from different files.
        characters: all characters, by index.
        num_files: number of files in both texts.
    """

    train: Tensor
    held_out: Tensor
    characters: str
    num_files: int

    def decode(self, numbers: Tensor) -> str:
        """The characters of a tensor of indices, in row-major order."""
        return "".join(self.characters[number] for number in numbers.flatten().tolist())


def standard_library() -> Text:
    """The source files of the top-level modules in alphabetical order, without non-ASCII characters."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    sources = [path.read_text(encoding="utf-8", errors="ignore") for path in sorted(folder.glob("*.py"))]
    sources = [source.encode("ascii", "ignore").decode() for source in sources]
    kept = [source for index, source in enumerate(sources) if sum(map(len, sources[:index])) < _MAX_CHARACTERS]
    characters = "".join(sorted(set("".join(kept))))
    number_of = torch.zeros(128, dtype=torch.int64)
    number_of[torch.frombuffer(bytearray(characters, "ascii"), dtype=torch.uint8).long()] = torch.arange(len(characters))

    def encoded(texts: list[str]) -> Tensor:
        return number_of[torch.frombuffer(bytearray("".join(texts), "ascii"), dtype=torch.uint8).long()]

    held_out = [source for index, source in enumerate(kept) if index % _HELD_OUT == 0]
    train = [source for index, source in enumerate(kept) if index % _HELD_OUT]
    return Text(encoded(train), encoded(held_out), characters, len(kept))


def batch(text_N: Tensor, size: int, seq: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Random windows of a text, and the same windows one character later; int64[size, seq] each."""
    starts_B = torch.randint(len(text_N) - seq, (size,), generator=generator)
    windows_BT = text_N[starts_B[:, None] + torch.arange(seq + 1)]
    return windows_BT[:, :-1], windows_BT[:, 1:]
