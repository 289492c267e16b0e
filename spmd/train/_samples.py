"""Sample texts that a language model generates from prompts during training.

One compiled program computes the logits of a window of fixed length, which contains each prompt and the tokens drawn so far. The
attention is causal, so the unused end of the window may contain anything. Tokens are drawn on the host from a generator of their
own, so samples do not change the random numbers of the training.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

import spmd
from mesh import Mesh
from spmd.base._errors import message
from spmd.train._clock import Clock
from spmd.train._recipe import RecipeError, Samples
from spmd.train._tokenizers import Tokenizer
from spmd.train._update import logits_of


class Sampler:
    """Samples texts from a model.

    Args:
        table: the recipe's table [samples]: prompts, number of tokens, temperature.
        tokenizer: encodes the prompts and decodes the result.
        model: a causal model: tokens int64[B, T] -> logits [B, T, V].
        mesh: the mesh of the model.
        longest: length of the sequences that the model is trained on, in tokens.
        seed: seed of the draws, together with the step.

    Raises:
        RecipeError: there is no prompt, or a prompt and its new tokens are longer than `longest`.
    """

    def __init__(self, table: Samples, tokenizer: Tokenizer, model: nn.Module, mesh: Mesh, longest: int, seed: int) -> None:
        self.table, self.model, self.mesh, self.seed = table, model, mesh, seed
        self.tokenizer = tokenizer
        self.prompts = [self.tokenizer.encode(prompt) for prompt in table.prompts]
        if not self.prompts or not all(self.prompts):
            raise RecipeError(message("[samples] prompts contain no prompt", fix='prompts = ["Once upon a time"]'))
        self.window = max(map(len, self.prompts)) + table.tokens
        if self.window > longest:
            prompt = self.window - table.tokens
            what = f"[samples] prompts of up to {prompt} tokens and {table.tokens} new tokens need {self.window} positions"
            fix = f"[samples] tokens = {longest - prompt}" if prompt < longest else "shorter [samples] prompts"
            raise RecipeError(message(what, f"the model is trained on sequences of {longest}", fix=fix))
        self.logits = spmd.compile(torch.no_grad()(self._logits))

    def _logits(self, tokens_BT: Tensor, positions_B: Tensor) -> Tensor:
        logits_BTV = logits_of(self.model(tokens_BT))
        rows_B = torch.arange(len(positions_B), device=positions_B.device)
        return spmd.mark_sharding(logits_BTV[rows_B, positions_B], self.mesh, (None, None))  # replicated: every host reads it

    def draw(self, step: int, clock: Clock) -> list[str]:
        """Each prompt with its continuation, as text."""
        generator = torch.Generator().manual_seed(self.seed + step)
        ends = torch.tensor([len(prompt) for prompt in self.prompts])
        tokens_BT = torch.zeros(len(self.prompts), self.window, dtype=torch.int64)
        for row, prompt in zip(tokens_BT, self.prompts, strict=True):
            row[: len(prompt)] = torch.tensor(prompt)
        was_training = self.model.training
        self.model.eval()
        for _ in range(self.table.tokens):
            logits = clock.calling(self.logits, tokens_BT.to("jax"), (ends - 1).to("jax"))[0]
            logits_BV = logits.cpu().as_subclass(Tensor)
            if self.table.temperature:
                drawn_B = torch.multinomial(torch.softmax(logits_BV / self.table.temperature, -1), 1, generator=generator)[:, 0]
            else:
                drawn_B = logits_BV.argmax(-1)
            tokens_BT[torch.arange(len(ends)), ends] = drawn_B
            ends += 1
        self.model.train(was_training)
        return [self.tokenizer.decode(row[:end].tolist()) for row, end in zip(tokens_BT, ends.tolist(), strict=True)]


__all__ = ["Sampler"]
