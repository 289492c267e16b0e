"""Text read as it is needed, turned into tokens and packed: no token of a pass is left out but a last, uneven batch's.

    batches = TextFeed(TextFiles(files, tokenizer), seq=1024, batch=32, rows=range(32), shuffle=True, seed=0)

Documents follow each other, an end-of-text token between them; windows run across their ends. A .jsonl file has one document in the "text"
of each line, any other file is one document. The order of the files is drawn for each pass. Every process reads all of the text, since
where a window begins depends on what came before, and hands out the rows of its own devices.
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

SUFFIXES = (".txt", ".md", ".jsonl", ".py")  # of files that a folder is searched for


@dataclass(frozen=True)
class TextFiles:
    """Files of text, UTF-8, and what makes tokens of them.

    Attributes:
        tokenizer: has `encode(text)` and `end`, the token between documents or None.
        vocabulary: tokens from here on are an error when they are met; 0: any.
    """

    files: Sequence[Path]
    tokenizer: Any
    vocabulary: int = 0


class TextFeed:
    """A loader of (tokens, next tokens), int64[rows, seq] each, for `spmd.shard_loader`; its place is kept exactly.

    Args:
        text: what is read.
        seq: tokens of a window.
        batch: windows of a global batch.
        rows: which of them are this process's.
        shuffle: another order of the files in every pass.
        seed: of these orders.
        accumulate: micro-batches that a batch is stacked of; 0: none.
        whole: leave out a last batch of fewer windows.
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
        """The number of the next pass."""
        self.epoch = epoch

    def state_dict(self) -> dict[str, Any]:
        """Which file of the pass, the byte where its next line begins, and tokens that were read and not handed out."""
        return dict(self._place)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on there."""
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
        """The tokens of each line from byte `start` on, and the byte after it; the last line's end with the document's."""
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
                    raise RecipeError(message(f"{file}, byte {begin}: {found}", fix="mend the file, or leave it out")) from error
                tokens, separator = self.text.tokenizer.encode(text), self.text.tokenizer.end
                yield end, [*tokens, separator] if is_last and separator is not None else tokens

    def _windows(self, tokens: list[int]) -> tuple[Tensor, Tensor]:
        """This process's rows of a batch."""
        whole = torch.tensor(tokens)
        if self.text.vocabulary and int(whole.max()) >= self.text.vocabulary:
            what = f"the tokenizer gives token {int(whole.max())}, the model's vocabulary is {self.text.vocabulary}"
            raise RecipeError(message(what, fix="a model of this vocabulary, or another [data] tokenizer"))
        num_rows = (len(tokens) - 1) // self.seq
        mine = [row for row in self.rows if row < num_rows]
        x_BT, y_BT = (part.view(num_rows, self.seq)[mine] for part in (whole[:-1], whole[1:]))
        return (x_BT.unflatten(0, (self.accumulate, -1)), y_BT.unflatten(0, (self.accumulate, -1))) if self.accumulate else (x_BT, y_BT)


def _start() -> dict[str, Any]:
    return {"file": 0, "byte": 0, "rest": torch.zeros(0, dtype=torch.int64)}


__all__ = ["SUFFIXES", "TextFeed", "TextFiles"]
