"""Storages have addresses and sizes as everywhere, with no memory behind them; libraries tell shared weights by them."""

import copy
import io
import itertools
import os
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import spmd
from tests.oracle import assert_same

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64]
WINDOWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "itself": lambda x: x,
    "rows": lambda x: x[1:],
    "column": lambda x: x[:, 2],
    "transposed": lambda x: x.t(),
    "transposed part": lambda x: x.t()[1:, 2:],
    "detached": lambda x: x.detach(),
    "empty part": lambda x: x[2:2],
    "other dtype": lambda x: x.view(torch.uint8) if x.dtype != torch.bool else x,
}


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("window", WINDOWS.values(), ids=WINDOWS)
def test_pointer_and_sizes_of_views_are_relative_to_the_storage_as_on_the_cpu(
    window: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    def described(x: torch.Tensor) -> tuple[Any, ...]:
        view = window(x)
        storage, whole = view.untyped_storage(), x.untyped_storage()
        start = view.data_ptr() - whole.data_ptr() if view.numel() else view.data_ptr()
        sizes = storage.nbytes(), storage.size(), len(storage), view.storage().nbytes(), view.storage().size()
        return start, sizes, storage.data_ptr() == whole.data_ptr() == x.storage().data_ptr(), view.is_set_to(x), x.is_set_to(x[:])

    host = torch.arange(12).reshape(3, 4).to(dtype)
    assert described(host.to("jax")) == described(host)


def test_storages_alive_lie_apart_and_stay_where_they_are() -> None:
    tensors = [torch.empty(n, device="jax") for n in (1, 1000, 7, 100_000)]
    extents = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in tensors)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(extents))
    before = [t.data_ptr() for t in tensors]
    for t in tensors:
        t.add_(1).mul_(2)
    assert [t.data_ptr() for t in tensors] == before
    assert (tensors[0] + 1).data_ptr() not in (0, *before)
    is_alias_of: Any = getattr(torch._C, "_is_alias_of")  # noqa: B009
    assert is_alias_of(tensors[1], tensors[1][3:])
    assert not is_alias_of(tensors[1], tensors[2])


def test_a_storage_that_grows_moves_out_of_the_way() -> None:
    first, second = torch.zeros(4, device="jax"), torch.zeros(4, device="jax")
    assert first.data_ptr() < second.data_ptr()
    first.resize_(10_000)
    extents = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in (first, second))
    assert extents[0][1] <= extents[1][0]


def test_nothing_without_elements_has_an_address() -> None:
    assert torch.empty(0, device="jax").data_ptr() == torch.empty(0).data_ptr() == 0
    assert torch.empty(0, 3, device="jax").untyped_storage().data_ptr() == 0


def test_no_processor_maps_the_addresses() -> None:
    address = torch.zeros(3, device="jax").data_ptr()
    assert address >> 47 != 0, "an address of the user's half on x86-64"
    assert (address & ((1 << 56) - 1)) >> 52 != 0, "arm64 ignores the highest byte"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bytes_of_a_storage_are_copied_to_the_host(dtype: torch.dtype) -> None:
    host = torch.arange(6).reshape(2, 3).to(dtype)
    for x in (host.to("jax"), host.to("jax")[1:]):
        assert bytes(x.untyped_storage().cpu()) == bytes(host.untyped_storage())


@pytest.mark.parametrize("dtype", [None, torch.float64], ids=str)
@pytest.mark.parametrize("device", ["cpu", "jax"])
def test_a_copy_keeps_dense_strides(device: str, dtype: torch.dtype | None) -> None:
    host = torch.arange(24.0).reshape(2, 3, 4)
    for window in (lambda x: x.permute(2, 0, 1), lambda x: x[:, 1], lambda x: x.transpose(0, 2)):
        want, got = window(host).to(dtype=dtype, copy=True), window(host.to("jax")).to(device, dtype=dtype, copy=True)
        assert got.stride() == want.stride()
        assert_same(got, want)


@pytest.mark.parametrize(
    "make",
    [
        lambda d: torch.zeros(2, 0, 3, device=d),
        lambda d: torch.ones(2, 0, 3).to(d) + 1,
        lambda d: torch.eye(0, device=d).diagonal(),
        lambda d: torch.rand(3, 2, device=d).topk(0)[0],
        lambda d: torch.zeros(4, 3, device=d)[:, :0].clone(),
        lambda d: torch.zeros(4, 0, device=d).t().contiguous(),
    ],
)
def test_an_empty_tensor_has_the_cpus_strides(make: Callable[[str], torch.Tensor]) -> None:
    assert make("jax").stride() == make("cpu").stride()


@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated")
def test_sharing_memory_between_processes_is_refused() -> None:
    x = torch.ones(3, device="jax")
    assert not x.is_shared()
    for share in (x.share_memory_, nn.Linear(2, 2).to("jax").share_memory, lambda: ForkingPickler.dumps(x)):
        with pytest.raises(spmd.SpmdError, match=r"cannot be shared between processes(.|\n)*fix: share the values: tensor.cpu\(\)"):
            share()
    assert torch.ones(3).share_memory_().is_shared()


class Views(nn.Module):
    """Two equal linears, a weight that is a view, tied weights and buffers that share a storage."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.c.weight = self.a.weight
        self.turned = nn.Parameter(torch.randn(4, 4).t())
        both = torch.randn(8)
        self.register_buffer("first", both[:4])
        self.register_buffer("second", both[4:])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(self.b(self.a(x))) @ self.turned * self.first + self.second


@pytest.mark.filterwarnings("ignore:No complete tensor found")  # torch's own, on the CPU too
def test_an_exported_program_keeps_every_weight_through_a_file() -> None:
    torch.manual_seed(0)
    model = Views()
    x, device_model = torch.randn(2, 4), copy.deepcopy(model).to("jax")
    file = io.BytesIO()
    torch.export.save(torch.export.export(device_model, (x.to("jax"),)), file)
    file.seek(0)
    again = torch.export.load(file).module()
    assert_same(dict(again.state_dict()), dict(model.state_dict()))
    assert_same(again(x.to("jax")), model(x))


@pytest.mark.parametrize("tied", [True, False])
def test_save_pretrained_writes_the_file_that_the_cpu_writes(tmp_path: Path, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(
        n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied
    )
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config)
    files = []
    for name, device in (("host", "cpu"), ("device", "jax")):
        copy.deepcopy(model).to(device).save_pretrained(tmp_path / name)
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert os.path.getsize(tmp_path / "host" / "model.safetensors") > 1000
