"""Unmodified Hugging Face models, a small one of each kind of language model; `make models` runs all of them, and timm's."""

import copy
import json
from collections.abc import Iterator
from importlib.util import find_spec

import pytest
import torch

import spmd
from benchmarks import models, zoo, zoo_timm, zoo_vision

pytestmark = [
    pytest.mark.skipif(
        find_spec("transformers") is None, reason="the models come from transformers, which the extras `hf` and `dev` install"
    ),
    pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers"),
]

NAMES = ("T5", *(pytest.param(name, marks=pytest.mark.slow) for name in ("GPT-2", "Qwen3-MoE", "Mamba")))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", NAMES)
def test_an_unmodified_model_gives_what_cpu_torch_gives_eager_compiled_and_trained(name: str) -> None:
    found = models.check(zoo.ARCHITECTURES[name])
    assert {column: found[column] for column in models.COLUMNS} == dict.fromkeys(models.COLUMNS, "pass"), found


@pytest.mark.parametrize("kind", ["DynamicCache", "StaticCache"])
def test_a_compiled_model_fills_the_callers_cache(kind: str) -> None:
    import transformers

    host = models.build(zoo.ARCHITECTURES["LLaMA"]).eval()
    device = copy.deepcopy(host).to("jax")
    forward = spmd.compile(lambda tokens, cache: device(input_ids=tokens, past_key_values=cache))
    tokens = zoo.ids(8)
    options = {"config": host.config, **({"max_cache_len": 16} if kind == "StaticCache" else {})}
    cache, host_cache = (getattr(transformers, kind)(**options) for _ in range(2))
    with torch.no_grad():
        for part in (tokens[:, :5], tokens[:, 5:6], tokens[:, 6:7], tokens[:, 7:]):
            found = forward(part.to("jax"), cache)
            wanted = host(input_ids=part, past_key_values=host_cache)
            assert found.past_key_values is cache
            torch.testing.assert_close(found.logits.cpu(), wanted.logits)
    assert int(cache.get_seq_length()) == 8
    if kind == "StaticCache":  # of fixed shapes: one program for the prompt, one for a token into a filled cache
        assert forward.num_traces == 2


def test_the_table_holds_every_architecture_of_both_libraries_once() -> None:
    assert len(zoo.ARCHITECTURES) >= 60 and len(zoo_timm.ARCHITECTURES) >= 30
    assert len(models.ZOO) == len(zoo.ARCHITECTURES) + len(zoo_vision.ARCHITECTURES) + len(zoo_timm.ARCHITECTURES)
    assert list(json.loads(models.RESULTS.read_text(encoding="utf-8"))) == list(models.ZOO)


def test_the_table_holds_every_kind() -> None:
    kinds = {row.kind for row in zoo.ARCHITECTURES.values()}
    assert kinds >= {"decoder", "encoder", "encoder-decoder", "vision", "audio", "mixture of experts", "state space"}


def wrong(want: models.Named, name: str, value: torch.Tensor) -> models.Named:
    return {**want, name: value}


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("large", torch.tensor([1.0, 2.001]), "large differs by 1.0e-03"),
        ("small", torch.tensor([0.0, 8e-6]), "small differs by"),  # within atol, and wrong altogether
        ("large", torch.tensor([1.0, 2.0], dtype=torch.float64), "not torch.float32"),
        ("more", torch.tensor(1.0), "only on one side"),
    ],
)
def test_a_wrong_value_is_a_mismatch(name: str, value: torch.Tensor, said: str) -> None:
    want = {"large": torch.tensor([1.0, 2.0]), "small": torch.tensor([8e-6, 0.0])}
    comparison = models.Comparison(lambda: want)
    comparison.require("same", dict(want), want)
    with pytest.raises(models.Mismatch, match=said):
        comparison.require("step", wrong(want, name, value), want)
    assert comparison.notes == []


def test_a_table_names_the_reason_of_each_failure() -> None:
    passes = dict.fromkeys(models.COLUMNS, "pass")
    text = models.table({"GPT-2": passes, "BERT": {**passes, "compiled": "TraceError: why"}})
    assert "1 of 2 architectures" in text
    assert "| GPT-2 | `GPT2LMHeadModel` | decoder | pass | pass | pass |" in text
    assert "- BERT, compiled: TraceError: why" in text


@pytest.mark.parametrize(
    ("error", "wide_error", "expected"),
    [
        (models.Inexact("off"), None, "pass in float64"),
        (models.Inexact("off"), models.Inexact("still off"), "off"),
        (models.Mismatch("another dtype"), None, "another dtype"),
    ],
)
def test_float64_is_asked_only_where_float32_differs_by_value(
    error: Exception, wide_error: Exception | None, expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Subject:
        def __init__(self, row: zoo.Architecture, dtype: torch.dtype = torch.float32) -> None:
            self.error = error if dtype == torch.float32 else wide_error
            self.notes: list[str] = []

        def column(self, name: str) -> None:
            if self.error is not None:
                raise self.error

    monkeypatch.setattr(models, "Subject", Subject)
    found = models.check(zoo.ARCHITECTURES["GPT-2"], ("eager",))
    assert found["eager"] == expected
    assert found.get("float32") == ("off" if expected == "pass in float64" else None)
    assert ("1 of 1" in models.table({"GPT-2": dict.fromkeys(models.COLUMNS, "pass") | found})) == (expected == "pass in float64")


def test_rounding_excuses_nothing_in_float64() -> None:
    want = {"x": torch.ones(3, dtype=torch.float64)}
    models.Comparison(None).require("step", {"x": want["x"] * (1 + 1e-9)}, want)
    with pytest.raises(models.Inexact, match="differs by 1.0e-06"):
        models.Comparison(None).require("step", {"x": want["x"] * (1 + 1e-6)}, want)
