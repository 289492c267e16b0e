"""Text read as it is needed: every token once, in order, on any number of processes, and on from anywhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import torch

from spmd.train import RecipeError, Run, recipe_of
from spmd.train._text_files import TextFeed, TextFiles
from spmd.train._tokenizers import Bytes, tokenizer_of
from tests.later import transformers
from tests.oracle import TOLERANCE
from tests.train.recipes import BATCH, GPT2, NO_DROPOUT, SEQ, by_hand, records, tables

DOCUMENTS = [f"Document {number}.\n" + "words\n" * (7 * number) for number in range(1, 5)]


def written(folder: Path) -> TextFiles:
    """Three documents of one file each, and a file of two records."""
    folder.mkdir(exist_ok=True)
    for number, text in enumerate(DOCUMENTS[:3]):
        (folder / f"{number}.txt").write_text(text, encoding="utf-8")
    lines = [json.dumps({"text": text, "id": 1}) for text in DOCUMENTS[3:] * 2]
    (folder / "3.jsonl").write_text("\n\n".join(lines) + "\n", encoding="utf-8")
    return TextFiles(sorted(folder.iterdir()), Bytes())


def packed() -> list[int]:
    """All tokens of a pass in order."""
    return [token for text in [*DOCUMENTS, DOCUMENTS[3]] for token in (*text.encode(), 256)]


def feed(text: TextFiles, rows: range = range(4), **options: Any) -> TextFeed:
    return TextFeed(text, 5, 4, rows, **options)


def test_windows_are_the_packed_documents(tmp_path: Path) -> None:
    tokens, batches = torch.tensor(packed()), list(feed(written(tmp_path)))
    assert len(batches) == (len(tokens) - 1) // 20
    for number, (x_BT, y_BT) in enumerate(batches):
        assert torch.equal(x_BT.flatten(), tokens[20 * number : 20 * number + 20])
        assert torch.equal(y_BT.flatten(), tokens[20 * number + 1 : 20 * number + 21])


def test_a_last_uneven_batch_is_there_where_it_is_wanted(tmp_path: Path) -> None:
    rows = [len(x_BT) for x_BT, _ in feed(written(tmp_path), whole=False)]
    assert sum(rows) == (len(packed()) - 1) // 5 and rows[-1] < 4


def test_processes_share_every_batch(tmp_path: Path) -> None:
    text = written(tmp_path)
    for whole, *parts in zip(feed(text), feed(text, range(2)), feed(text, range(2, 4)), strict=True):
        assert torch.equal(whole[0], torch.cat([part[0] for part in parts]))


@pytest.mark.parametrize("taken", [1, 7])
def test_a_pass_goes_on_after_its_place(taken: int, tmp_path: Path) -> None:
    text = written(tmp_path)
    whole = [x_BT for x_BT, _ in feed(text, shuffle=True)]
    before = feed(text, shuffle=True)
    source = iter(before)
    for _ in range(taken):
        next(source)
    after = feed(text, shuffle=True)
    after.load_state_dict(before.state_dict())
    assert torch.equal(torch.cat([x_BT for x_BT, _ in after]), torch.cat(whole[taken:]))
    after.set_epoch(1)
    again = [x_BT for x_BT, _ in after]
    assert len(again) == len(whole) and not torch.equal(torch.cat(again), torch.cat(whole))


def test_what_is_no_text_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\n\xff\n")
    with pytest.raises(RecipeError, match="a.txt, byte 5: not UTF-8"):
        list(feed(TextFiles([tmp_path / "a.txt"], Bytes())))
    (tmp_path / "a.jsonl").write_text('{"txt": 1}\n', encoding="utf-8")
    with pytest.raises(RecipeError, match='a.jsonl, byte 0: no record with a "text"'):
        list(feed(TextFiles([tmp_path / "a.jsonl"], Bytes())))
    with pytest.raises(RecipeError, match="the tokenizer gives token 256, the model's vocabulary is 200"):
        list(feed(TextFiles(written(tmp_path / "b").files, Bytes(), 200)))


def test_a_tokenizer_of_hugging_face_is_read_from_its_folder(tmp_path: Path) -> None:
    inner = tokenizers.Tokenizer(tokenizers.models.WordLevel({"words": 0, "more": 1, "<end>": 2, "?": 3}, unk_token="?"))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>", unk_token="?").save_pretrained(tmp_path / "words")
    tokenizer = tokenizer_of(str(tmp_path / "words"), "[data] tokenizer")
    assert tokenizer.decode(tokenizer.encode("more words")) == "more words"
    for name, text in (("a", "words more\nmore other\n"), ("b", "words\n")):
        (tmp_path / f"{name}.txt").write_text(text, encoding="utf-8")
    ((x_BT, y_BT),) = TextFeed(TextFiles([tmp_path / "a.txt", tmp_path / "b.txt"], tokenizer), 3, 2, [0, 1])
    assert torch.cat([x_BT.flatten(), y_BT[-1, -1:]]).tolist() == [0, 1, 1, 3, 2, 0, 2]


@pytest.mark.slow
@pytest.mark.multidevice(num=8)
def test_a_run_over_text_is_that_of_a_loop_by_hand(tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"{number}.txt").write_text(f"{number} and so on\n" * 30, encoding="utf-8")
    sizes = {**GPT2, **NO_DROPOUT, "vocab_size": 257}
    found = tables(
        tmp_path,
        model={"config": "GPT2Config", "arguments": sizes},
        data={"kind": "text", "paths": [str(tmp_path)], "tokenizer": "bytes", "seq": SEQ, "batch": BATCH, "shuffle": False},
        optimizer={"accumulate": 2},
        evaluation={"every": 6, "paths": [str(tmp_path / "0.txt")]},
    )
    Run(recipe_of(found)).train()
    tokens = torch.tensor([token for number in range(3) for token in (*(f"{number} and so on\n" * 30).encode(), 256)])
    windows = [(tokens[s : s + SEQ], tokens[s + 1 : s + SEQ + 1]) for s in range(0, len(tokens) - SEQ, SEQ)]
    batches = [windows[s : s + BATCH] for s in range(0, len(windows) - BATCH + 1, BATCH)]
    endless = (batch for _ in range(6) for batch in batches)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    pairs = ((torch.stack([x for x, _ in batch]), torch.stack([y for _, y in batch])) for batch in endless)
    rtol, atol = TOLERANCE[torch.float32]
    torch.testing.assert_close(list(records(tmp_path / "run").values()), by_hand(found, model, pairs), rtol=rtol, atol=atol)
    held_out = torch.tensor([*("0 and so on\n" * 30).encode(), 256])
    count = (len(held_out) - 1) // SEQ * SEQ
    logits = model.eval()(held_out[:count].view(-1, SEQ)).logits.flatten(0, 1)
    loss = torch.nn.functional.cross_entropy(logits, held_out[1 : count + 1]).item()
    torch.testing.assert_close(records(tmp_path / "run", "evaluation_loss")[6], loss, rtol=rtol, atol=atol)
