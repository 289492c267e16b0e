"""`from_pretrained` and `save_pretrained` on device "jax": device_map, dtypes, tied weights, layouts, files."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import torch

import spmd
import spmd.huggingface
from tests.grids import grid
from tests.later import transformers
from tests.oracle import array_of

pytestmark = pytest.mark.filterwarnings("ignore:.*:UserWarning:transformers", "ignore:.*:FutureWarning:transformers")
TOKENS = torch.randint(4, 97, (2, 8), generator=torch.Generator().manual_seed(1))
FILE_BYTES = 24_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Any]]:
    """A Llama with tied weights, in several files; and the model on the CPU."""
    transformers.logging.disable_progress_bar()
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        tie_word_embeddings=True,
    )
    host = transformers.LlamaForCausalLM(config).eval()
    folder = tmp_path_factory.mktemp("llama")
    host.save_pretrained(folder, max_shard_size=FILE_BYTES)
    assert len(list(folder.glob("*.safetensors"))) > 2
    yield folder, host
    transformers.logging.enable_progress_bar()


def load(folder: Path, **options: Any) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def require_same_logits(model: Any, host: Any, **tolerance: float) -> None:
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS.to("jax")).logits.cpu().float(), host(TOKENS).logits, **tolerance)


@pytest.mark.parametrize("device_map", ["jax", {"": "jax"}, {"": torch.device("jax")}, torch.device("jax"), 0])
def test_a_device_map_puts_all_of_a_model_on_the_device(saved: tuple[Path, Any], device_map: Any) -> None:
    folder, host = saved
    model = load(folder, device_map=device_map)
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}  # rotary tables, which no file has, too
    assert {t.device.type for t in tensors.values()} == {"jax"}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    require_same_logits(model, host)


def test_a_default_device_is_one_too(saved: tuple[Path, Any]) -> None:
    with torch.device("jax"):
        model = load(saved[0])
    require_same_logits(model, saved[1])


@pytest.mark.parametrize("options", [{"low_cpu_mem_usage": True}, {"dtype": torch.bfloat16}, {"torch_dtype": torch.bfloat16}])
def test_options_mean_what_they_mean_on_the_cpu(saved: tuple[Path, Any], options: dict[str, Any]) -> None:
    folder, _ = saved
    model, host = load(folder, device_map="jax", **options), load(folder, **options)
    assert model.dtype == host.dtype
    for (name, found), wanted in zip(model.state_dict().items(), host.state_dict().values(), strict=True):
        assert torch.equal(found.cpu(), wanted), name


def test_layers_that_a_map_leaves_on_the_cpu_run_on_the_device_when_their_turn_comes(saved: tuple[Path, Any]) -> None:
    folder, host = saved
    places = ("model.embed_tokens", "lm_head", "model.norm", "model.rotary_emb", "model.layers.0")
    model = load(folder, device_map={**dict.fromkeys(places, "jax"), "model.layers.1": "cpu"})
    require_same_logits(model, host)


@pytest.mark.parametrize("device_map", ["auto", "balanced", "sequential", "jax", {"": "jax"}])
def test_under_train_on_a_model_arrives_laid_out_and_no_device_is_sent_more_than_its_shards(
    saved: tuple[Path, Any], device_map: Any
) -> None:
    folder, host = saved
    m = grid()
    with spmd.huggingface.train_on(m, rules="megatron"):
        before = spmd.metrics.counters().get("upload_bytes", 0)
        model = load(folder, device_map=device_map)
        sent = spmd.metrics.counters().get("upload_bytes", 0) - before
        weights = list(model.parameters())
        assert all(isinstance(p, spmd.XLAShardedTensor) for p in weights)
        held = sum(shard.data.nbytes for p in weights for shard in array_of(p).addressable_shards)
        assert 0 < sent <= held + 10_000  # rotary tables are on every device
        require_same_logits(model, host)


def test_a_plan_that_divides_a_model_among_processes_is_refused(saved: tuple[Path, Any]) -> None:
    with spmd.huggingface.train_on(grid()), pytest.raises(spmd.SpmdError, match=r'train_on\(mesh, rules="auto"\)'):
        load(saved[0], tp_plan="auto")


def test_without_train_on_auto_means_the_cpu_and_the_device_says_the_way(saved: tuple[Path, Any]) -> None:
    model = load(saved[0], device_map="auto")
    with pytest.raises(RuntimeError, match=r"found one of shape \(97, 32\) on cpu[^$]*fix: move it with .to\('jax'\)"):
        model(TOKENS.to("jax"))


@pytest.mark.parametrize("rules", ["megatron", "fsdp"])
def test_save_pretrained_of_a_sharded_model_writes_the_files_of_the_cpus(saved: tuple[Path, Any], tmp_path: Path, rules: str) -> None:
    folder, host = saved
    model = load(folder, device_map="jax")
    spmd.shard_module(model, grid(), rules)
    model.save_pretrained(tmp_path / "jax", max_shard_size=FILE_BYTES)
    load(folder).save_pretrained(tmp_path / "cpu", max_shard_size=FILE_BYTES)
    files = sorted(p.name for p in (tmp_path / "cpu").iterdir())
    assert sorted(p.name for p in (tmp_path / "jax").iterdir()) == files
    for name in files:
        assert (tmp_path / "jax" / name).read_bytes() == (tmp_path / "cpu" / name).read_bytes(), name
    require_same_logits(load(tmp_path / "jax", device_map="jax"), host)


def test_save_pretrained_holds_one_files_tensors_on_the_host_at_a_time(
    saved: tuple[Path, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from spmd.device import _copy

    model = load(saved[0], device_map="jax")
    spmd.shard_module(model, grid(), "megatron")
    alive: dict[int, int] = {}
    most = [0]

    def to_host(tensor: torch.Tensor) -> torch.Tensor:
        found = fetch(tensor)
        gc.collect(1)  # what was made lately; all of it would be a million objects each time
        alive[id(found)] = found.nbytes
        weakref.finalize(found, alive.pop, id(found), None)
        most[0] = max(most[0], sum(alive.values()))
        return found

    fetch = _copy.to_host
    monkeypatch.setattr(_copy, "to_host", to_host)
    model.save_pretrained(tmp_path, max_shard_size=FILE_BYTES)
    sizes = [sum(a.nbytes for a in safetensors.numpy.load_file(p).values()) for p in tmp_path.glob("*.safetensors")]
    assert 0 < most[0] <= max(sizes) < sum(sizes) / 2
    assert np.isclose(sum(sizes), sum(p.nbytes for p in model.parameters()))
