"""Streams text files as packed windows of tokens. Every token of an epoch is used, except those of a last batch that is not full.

    batches = TextFeed(TextFiles(files, tokenizer), seq=1024, batch=32, rows=range(32), shuffle=True, seed=0)

Documents are concatenated with an end-of-text token after each, and windows cross document boundaries. A .jsonl file has one document
per line, under the key "text"; any other file is one document. The order of the files is drawn for each epoch. Every process reads all
of the text, since the start of a window depends on all text before it, and yields the rows of its own devices.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from spmd.base._errors import message
from spmd.train._recipe import RecipeError

SUFFIXES = (".txt", ".md", ".jsonl", ".py")  # files that are read from a folder


@dataclass(frozen=True)
class TextFiles:
    """UTF-8 text files and their tokenizer.

    Attributes:
        files: the files, in order.
        tokenizer: has `encode(text)` and `end`, the end-of-text token or None.
        vocabulary: a token >= this is an error when it is read. 0: no check.
    """

    files: Sequence[Path]
    tokenizer: Any
    vocabulary: int = 0


class TextFeed:
    """Loader of (tokens, next tokens), int64[rows, seq] each, for `spmd.shard_loader`. It resumes at its exact position.

    Args:
        text: the files to read.
        seq: length of a window, in tokens.
        batch: number of windows in a global batch.
        rows: the rows of a global batch that this process yields.
        shuffle: draw a new order of the files for every epoch.
        seed: seed of these orders.
        accumulate: number of micro-batches in a batch; both tensors get a leading dim of this size. 0 adds no dim.
        whole: drop the last batch if it is not full.
    """

    def __init__(
        self,
        text: TextFiles,
        seq: int,
        batch: int,
        rows: Sequence[int],
        *,
        shuffle: bool = False,
        seed: int = 0,
        accumulate: int = 0,
        whole: bool = True,
    ) -> None:
        self.text, self.seq, self.batch, self.rows = text, seq, batch, list(rows)
        self.shuffle, self.seed, self.accumulate, self.whole = shuffle, seed, accumulate, whole
        self.epoch = 0
        self._place: dict[str, Any] = _start()
        self._resumes = False

    def set_epoch(self, epoch: int) -> None:
        """Set the number of the next epoch."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """The position: the file's index in this epoch's order, the byte where its next line begins, and tokens read but not yielded."""
        return dict(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume at a saved position."""
        self._place, self._resumes = dict(state), True

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        if not self._resumes:
            self._place = _start()
        self._resumes = False
        order = list(range(len(self.text.files)))
        if self.shuffle:
            random.Random(f"{self.seed} {self.epoch}").shuffle(order)
        needed = self.batch * self.seq + 1
        rest: list[int] = torch.as_tensor(self._place["rest"]).tolist()
        for number in range(self._place["file"], len(order)):
            start = self._place["byte"] if number == self._place["file"] else 0
            for end, tokens in self._lines(self.text.files[order[number]], start):
                rest += tokens
                while len(rest) >= needed:
                    taken, rest = rest[:needed], rest[needed - 1 :]
                    self._place = {"file": number, "byte": end, "rest": torch.tensor(rest)}
                    yield self._windows(taken)
        rows = max(0, len(rest) - 1) // self.seq
        if not self.whole and any(row < rows for row in self.rows):
            yield self._windows(rest[: rows * self.seq + 1])

    def _lines(self, file: Path, start: int) -> Iterator[tuple[int, list[int]]]:
        """Yields (byte after the line, its tokens) for each line from byte `start` on. A document's last line ends with `end`."""
        is_records = file.suffix == ".jsonl"
        with file.open("rb") as stream:
            stream.seek(start)
            size = file.stat().st_size
            end = start
            for line in stream:
                begin, end = end, end + len(line)
                if is_records and not line.strip():
                    continue
                is_last = is_records or end == size
                try:
                    text = json.loads(line)["text"] if is_records else line.decode()
                except (ValueError, KeyError, TypeError) as error:
                    found = 'no record with a "text"' if is_records else "not UTF-8"
                    raise RecipeError(message(f"{file}, byte {begin}: {found}", fix="repair the file, or leave it out")) from error
                tokens, separator = self.text.tokenizer.encode(text), self.text.tokenizer.end
                yield end, [*tokens, separator] if is_last and separator is not None else tokens

    def _windows(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """This process's rows of a batch."""
        whole = torch.tensor(tokens)
        if self.text.vocabulary and int(whole.max()) >= self.text.vocabulary:
            what = f"the tokenizer gives token {int(whole.max())}, the model's vocabulary is {self.text.vocabulary}"
            raise RecipeError(message(what, fix="a model with a larger vocabulary, or another [data] tokenizer"))
        num_rows = (len(tokens) - 1) // self.seq
        mine = [row for row in self.rows if row < num_rows]
        x_BT, y_BT = (part.view(num_rows, self.seq)[mine] for part in (whole[:-1], whole[1:]))
        return (x_BT.unflatten(0, (self.accumulate, -1)), y_BT.unflatten(0, (self.accumulate, -1))) if self.accumulate else (x_BT, y_BT)


def _start() -> dict[str, Any]:
    return {"file": 0, "byte": 0, "rest": torch.zeros(0, dtype=torch.int64)}


__all__ = ["SUFFIXES", "TextFeed", "TextFiles"]
