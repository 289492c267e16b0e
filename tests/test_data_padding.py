"""`shard_loader(pad_to=...)`: batches of any sizes arrive in the few shapes of the buckets; the values are those of the loader."""

import json
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mesh
import spmd
from tests.grids import line
from tests.oracle import assert_same, twins

SEQ = spmd.Dim("seq", max=32)
TEXT: dict[str, Any] = {"input_ids": {1: SEQ}, "attention_mask": {1: "seq"}, "labels": {1: "seq"}}
FILL = {"labels": -100, "input_ids": 7}


def text(rows: int, length: int) -> dict[str, torch.Tensor]:
    """As a collator of Hugging Face's makes them, padded to the longest of the batch."""
    ids = torch.arange(rows * length).view(rows, length) % 5
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids.clone()}


def shapes(batches: Any, key: str) -> list[tuple[int, ...]]:
    return [tuple(batch[key].shape) for batch in batches]


def test_lengths_come_in_buckets_with_what_each_key_is_filled_with() -> None:
    batches = list(spmd.shard_loader([text(8, 5), text(8, 8), text(8, 20), text(8, 32)], line(), ("data", None), pad_to=TEXT, fill=FILL))
    for key in TEXT:
        assert shapes(batches, key) == [(8, 8), (8, 8), (8, 32), (8, 32)]
    for key, fill in (("input_ids", 7), ("labels", -100), ("attention_mask", 0)):
        found, want = batches[0][key].cpu(), text(8, 5)[key]
        assert found.dtype == want.dtype
        assert torch.equal(found[:, :5], want) and found[:, 5:].eq(fill).all()


@pytest.mark.parametrize("kind", [torch.as_tensor, np.asarray], ids=["torch", "numpy"])
def test_the_last_short_batch_is_padded_to_a_bucket_too(kind: Callable[[Any], Any], num_devices: int) -> None:
    rows = {"x": {0: spmd.Dim("batch", max=64), 1: spmd.Dim("seq", max=6, buckets=(4, 6))}, "y": {0: "batch"}}
    data = [{"x": kind(np.ones((n, t), np.float32)), "y": kind(np.arange(n))} for n, t in ((40, 3), (33, 5), (3, 4))]
    batches = list(spmd.shard_loader(data, line(), ("data", None), pad_to=rows, fill={"y": -1}))
    assert shapes(batches, "x") == [(64, 4), (64, 6), (8, 4)]
    assert batches[-1]["y"].cpu().tolist() == [0, 1, 2, -1, -1, -1, -1, -1]
    assert all(batch["x"].sum().item() == data[i]["x"].sum() for i, batch in enumerate(batches))


def test_buckets_are_multiples_of_what_the_mesh_divides(mesh_4x2: mesh.Mesh) -> None:
    dims = {0: {0: spmd.Dim("batch", max=30, buckets=(6, 30)), 1: spmd.Dim("seq", max=9, buckets=(3, 9))}}
    (found,), (other,) = spmd.shard_loader([(torch.ones(5, 3),), (torch.ones(7, 4),)], mesh_4x2, ("data", "model"), pad_to=dims)
    assert (tuple(found.shape), tuple(other.shape)) == ((8, 4), (32, 10))


def test_a_model_that_masks_meets_few_shapes_and_learns_the_same() -> None:
    host, device = twins(lambda: torch.nn.Embedding(5, 5))

    def stepping(model: torch.nn.Module) -> Callable[..., torch.Tensor]:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

        def step(input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.cross_entropy(model(input_ids).flatten(0, 1), labels.flatten(), ignore_index=-100)
            loss.backward()
            optimizer.step()
            return loss

        return step

    data = [{k: v for k, v in text(8, n).items() if k != "attention_mask"} for n in (3, 5, 7, 9, 16, 11)]
    dims = {"input_ids": {1: SEQ}, "labels": {1: "seq"}}
    step, expected = spmd.compile(stepping(device)), stepping(host)
    for batch, plain in zip(spmd.shard_loader(data, line(), ("data", None), pad_to=dims, fill={"labels": -100}), data, strict=True):
        assert_same(step(**batch), expected(**plain))
    assert step.num_traces == 2


class Peers:
    """Two processes, of which this test is the first; the other has so many rows of these sizes."""

    index, size = 0, 2

    def __init__(self, rows: int, **sizes: int) -> None:
        self.rows, self.sizes = rows, sizes

    def exchange(self, name: str, text: str) -> list[str]:
        return [text, f"{self.rows}|0||{json.dumps(self.sizes)}"]


def test_processes_agree_on_the_longest() -> None:
    options: dict[str, Any] = {"prefetch": 0, "gang": Peers(8, seq=17), "feeds": "batch", "check": False}
    batch = next(iter(spmd.shard_loader([text(8, 5)], line(), ("data", None), pad_to=TEXT, **options)))
    assert tuple(batch["labels"].shape) == (8, 32)


def test_a_process_without_a_batch_feeds_padding(mesh_4x2: mesh.Mesh) -> None:
    rows, peers = {"input_ids": {0: spmd.Dim("batch", max=8), 1: SEQ}}, Peers(8, seq=20, batch=8)
    options: dict[str, Any] = {"prefetch": 0, "gang": peers, "feeds": "batch", "check": False}
    batches = iter(spmd.shard_loader([{"input_ids": text(8, 20)["input_ids"]}], mesh_4x2, (None,), pad_to=rows, fill=9, **options))
    assert tuple(next(batches)["input_ids"].shape) == (8, 32)
    peers.rows, peers.sizes = 3, {"seq": 4, "batch": 3}
    last = next(batches)["input_ids"]
    assert tuple(last.shape) == (8, 8) and last.cpu().eq(9).all()


X = {"x": {1: SEQ}}
NO_OPTION: dict[str, tuple[dict[str, Any], str]] = {
    "nothing": ({"pad_to": {}}, r"pad_to is \{\}, which names no dim"),
    "a number": ({"pad_to": {"x": {1: 512}}}, r"pad_to has 512 where a dim is expected(?s:.*)fix: pad_to="),
    "an unknown name": ({"pad_to": {"x": {1: "seq"}}}, r"pad_to names a dim 'seq' that is not defined"),
    "a fill alone": ({"fill": 0}, "has fill=0 but no pad_to"),
    "a fill of nothing": ({"pad_to": X, "fill": {"labels": -100}}, r"fill names 'labels', which pad_to does not have"),
    "a fill that is no number": ({"pad_to": X, "fill": {"x": "[PAD]"}}, r"fill\['x'\] is '\[PAD\]', not a number"),
}


@pytest.mark.parametrize(("options", "words"), NO_OPTION.values(), ids=NO_OPTION)
def test_options_that_mean_nothing_are_refused_at_once(options: dict[str, Any], words: str) -> None:
    with pytest.raises(spmd.SpmdError, match=words):
        spmd.shard_loader([], line(), (), **options)


NO_BATCH: dict[str, tuple[Any, dict[str, Any], str]] = {
    "too long": (
        text(8, 33),
        {"pad_to": TEXT},
        r"dim 'seq' has size 33, which is not between 1 and 32(?s:.*)dim 1 of batch\['input_ids'\]",
    ),
    "two lengths": ({**text(8, 5), "labels": torch.ones(8, 6)}, {"pad_to": TEXT}, r"'seq' has two sizes(?s:.*)batch\['labels'\] is 6"),
    "no such key": ({"input_ids": torch.ones(8, 5)}, {"pad_to": TEXT}, r"pad_to names 'attention_mask' of batch, which does not exist"),
    "no such dim": ({"x": torch.ones(8)}, {"pad_to": X}, r"pad_to names dim 1 of batch\['x'\], which has 1 dims"),
    "not a dim of an array": (
        {"x": torch.ones(8)},
        {"pad_to": {"x": SEQ}},
        r"pad_to has Dim(?s:.*) for batch\['x'\], where a mapping from its dims is expected",
    ),
    "a fill of another dtype": (
        {"x": np.ones((8, 5), np.uint8)},
        {"pad_to": X, "fill": -100},
        r"fill of batch\['x'\] is -100, which uint8 cannot represent",
    ),
    "a fill beyond a dtype": (
        {"x": torch.ones(8, 5, dtype=torch.float16)},
        {"pad_to": X, "fill": -1e9},
        r"fill of batch\['x'\] is -1000000000.0, which torch.float16 cannot represent",
    ),
}


@pytest.mark.parametrize(("batch", "options", "words"), NO_BATCH.values(), ids=NO_BATCH)
def test_batches_that_do_not_fit_are_named(batch: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(spmd.SpmdError, match=words):
        list(spmd.shard_loader([batch], line(), (), **options))
