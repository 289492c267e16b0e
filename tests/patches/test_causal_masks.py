"""Transformer layers in a compiled function take masks whose values only the program will know, and give what they give on the CPU."""

from typing import Any

import torch
from torch import nn

import spmd
from tests.oracle import assert_same
from tests.waits import waiting

LENGTH = 5
CAUSAL = nn.Transformer.generate_square_subsequent_mask(LENGTH)


class Caches(nn.Module):
    """Makes its mask in its first call, as PyTorch's example of a language model does."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True), 1)
        self.mask: torch.Tensor | None = None

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, ...]:
        if self.mask is None:
            self.mask = torch.log(torch.tril(torch.ones(LENGTH, LENGTH))).to(x.device)
        seen = self.encoder(x, mask=mask)
        return seen, self.encoder(x, mask=self.mask), self.decoder(x, seen, tgt_mask=mask, memory_mask=self.mask)


def test_masks_as_arguments_and_cached_by_the_model() -> None:
    other = CAUSAL.clone()
    other[0, 3] = 0.0  # no longer causal: the same program
    x = torch.randn(2, LENGTH, 8, generator=torch.Generator().manual_seed(1))

    def run(device: str, wrap: Any) -> list[Any]:
        model = Caches().to(device)
        step = wrap(lambda x, mask: model(x, mask))
        return [step(x.to(device), mask.to(device)) for mask in (CAUSAL, CAUSAL, other)]

    compiled: list[spmd.Step[Any, Any]] = []

    def keep(fn: Any) -> spmd.Step[Any, Any]:
        compiled.append(spmd.compile(fn))
        return compiled[-1]

    assert_same(run("jax", keep), run("cpu", lambda fn: fn))
    assert compiled[0].num_traces == 2  # without and with the model's mask


def test_a_mask_with_a_gradient_is_looked_at_in_each_call() -> None:
    model = Caches().to("jax")
    mask = CAUSAL.to("jax").requires_grad_()
    step = spmd.compile(lambda x: model.encoder(x, mask=mask))
    with waiting(step):
        assert_same(step(torch.ones(2, LENGTH, 8).to("jax")), model.encoder(torch.ones(2, LENGTH, 8).to("jax"), mask=mask))
    assert step._program.sides
