"""What a language model goes on with after some prompts, now and then during training.

One compiled program gives the logits of a window that holds the prompts and what was drawn so far; what comes after a position cannot
change its logits, so the window's end may hold anything. Tokens are drawn on the host from a generator of their own: samples change no
random number of the training.
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
    """Draws texts from a model.

    Args:
        table: prompts, how many tokens, how likely the unlikely.
        tokenizer: of the prompts and of what is drawn.
        model: returns logits [B, T, V] of tokens [B, T], of which none depends on later tokens.
        mesh: where it lies.
        longest: tokens that the model was trained on at a time.
        seed: of what is drawn, with the step.

    Raises:
        RecipeError: prompts and what is drawn are longer than `longest`.
    """

    def __init__(self, table: Samples, tokenizer: Tokenizer, model: nn.Module, mesh: Mesh, longest: int, seed: int) -> None:
        self.table, self.model, self.mesh, self.seed = table, model, mesh, seed
        self.tokenizer = tokenizer
        self.prompts = [self.tokenizer.encode(prompt) for prompt in table.prompts]
        if not self.prompts or not all(self.prompts):
            raise RecipeError(message("[samples] prompts contain no prompt", fix='prompts = ["Once upon a time"]'))
        self.window = max(map(len, self.prompts)) + table.tokens
        if self.window > longest:
            what = f"[samples] prompts of up to {self.window - table.tokens} tokens and {table.tokens} more are {self.window}"
            raise RecipeError(message(what, f"the model is trained on {longest} at a time", fix="fewer [samples] tokens"))
        self.logits = spmd.compile(torch.no_grad()(self._logits))

    def _logits(self, tokens_BT: Tensor, positions_B: Tensor) -> Tensor:
        logits_BTV = logits_of(self.model(tokens_BT))
        rows_B = torch.arange(len(positions_B), device=positions_B.device)
        return spmd.mark_sharding(logits_BTV[rows_B, positions_B], self.mesh, (None, None))  # whole on every host

    def draw(self, step: int, clock: Clock) -> list[str]:
        """What comes after each prompt, with the prompt."""
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
