"""The programs by which a model generates: one takes in a prompt, for each bucket of lengths, and one goes on by a token.

They belong to the model, and are made when they are first needed. What is cached lies as the model lies: heads over the axis of the
model, rows over those of the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from jax.errors import JaxRuntimeError
from torch import Tensor, nn
from transformers.modeling_outputs import BaseModelOutput

from mesh import Mesh
from spmd.device._layout import annotation_of
from spmd.huggingface._kept_tokens import Kept, Sizes, empty_cache, filled_cache, tensors_of
from spmd.program._step import Step
from spmd.program._step import compile as compile_step
from spmd.sharding._annotate import mark_sharding
from spmd.sharding._axes import MODEL_AXES, batch_axes

_SMALLEST_BUCKET, _SMALLEST_ROOM = 8, 64
_ATTRIBUTE = "_spmd_generation"


def bucket(length: int, smallest: int = _SMALLEST_BUCKET, limit: int | None = None) -> int:
    """The next power of two, or `limit` where that is less and still enough."""
    size = max(smallest, 1 << (length - 1).bit_length())
    return size if limit is None or limit < length else min(size, limit)


class Left(Exception):
    """This generation is transformers' own: caught where it began.

    Attributes:
        is_lasting: the model is no program; otherwise it is this call.
        is_expected: as documented, and nobody is told.
    """

    def __init__(self, reason: str, is_lasting: bool, is_expected: bool = False) -> None:
        super().__init__(reason)
        self.is_lasting, self.is_expected = is_lasting, is_expected


class Programs:
    """Those of one model.

    Attributes:
        steps: compiled functions by what they do and the sizes that they do it for.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.model: Any = model
        self.steps: dict[Any, Step[Any, Any]] = {}

    def __reduce__(self) -> Any:  # of a copy, or a file, of the model: its own are made anew
        return Programs, (None,)

    @property
    def num_executables(self) -> int:
        return sum(step.num_executables for step in self.steps.values())

    def run(self, key: Any, make: Callable[[], Callable[..., Any]], *args: Any) -> Any:
        """Call the program under a key; `make` makes it as a method of the model, which runs without gradients as `generate` does.

        Raises:
            Left: it is no program.
        """
        if key not in self.steps:
            self.steps[key] = compile_step(MethodType(make(), self.model))  # a trace finds the modules of its object
        step = self.steps[key]
        try:
            return step(*args)
        except JaxRuntimeError:
            raise
        except Exception as error:  # also what the model's own code says of tensors that have no values yet
            was_program = step.num_traces > 0  # a hook, or autocast around this call: the next may be a program again
            if not was_program:
                del self.steps[key]
            raise Left(str(error).partition("\n")[0], is_lasting=not was_program) from error

    def sizes(self, batch: int, max_length: int, copies: int) -> Sizes:
        """Room for `max_length` tokens; programs for these rows that have it already are taken.

        Raises:
            Left: the model has no such positions; what it makes of them is for it to say.
        """
        if self.positions is not None and max_length > self.positions:
            raise Left(f"{max_length} tokens, of a model of {self.positions}", is_lasting=False, is_expected=True)
        made = [sizes.slots for _, sizes, *_ in self.steps if (sizes.batch, sizes.copies) == (batch, copies) and sizes.slots >= max_length]
        return Sizes(batch, min(made, default=bucket(max_length, _SMALLEST_ROOM)), copies)

    def take_in(self, kept: Kept, tokens_BT: Tensor, encoder_tokens_BS: Tensor | None = None) -> None:
        """Fill `kept` with a prompt, of which the last token is not counted: it is the first to go on from.

        Args:
            kept: with what is given, on the host.
            tokens_BT: the prompt on the host.
            encoder_tokens_BS: what an encoder reads.
        """
        length = tokens_BT.shape[1]
        padded = min(bucket(length, limit=self.positions), kept.sizes.slots)
        kept.given = {name: self.put(tensor) for name, tensor in kept.given.items()}
        inputs = [self.put(_padded(tokens_BT, padded))]
        if encoder_tokens_BS is not None:
            inputs.append(self.put(_padded(encoder_tokens_BS, kept.given["encoder_mask"].shape[1])))
        key = ("prompt", kept.sizes, padded, kept.shapes)
        kept.layers, states = self.run(key, lambda: self._prompt(kept.sizes), dict(kept.given), *inputs)
        kept.given |= states
        kept.num_tokens = length - 1

    def next_scores(self, kept: Kept, tokens_B: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """float32 [B, V] on the host: the logits after a token for each row; `rows_B`: the rows of before from which they go on."""
        key = ("token", kept.sizes, rows_B is None, kept.shapes)
        rows = [] if rows_B is None else [self.put(rows_B)]
        slot = torch.tensor(kept.num_tokens)
        scores_BV = self.run(
            key, lambda: self._token(kept.sizes), dict(kept.given), kept.layers, self.put(tokens_B[:, None].long()), self.put(slot), *rows
        )
        kept.num_tokens += 1
        return scores_BV.cpu().as_subclass(Tensor)

    def _prompt(self, sizes: Sizes) -> Callable[..., Any]:
        def take_prompt(model: Any, given: dict[str, Tensor], tokens_BT: Tensor, encoder_tokens_BS: Tensor | None = None) -> Any:
            states: dict[str, Tensor] = {}
            if encoder_tokens_BS is not None:
                mask_BS = given["encoder_mask"][:: sizes.copies]
                found = model.get_encoder()(input_ids=encoder_tokens_BS[:: sizes.copies], attention_mask=mask_BS, return_dict=True)
                states["encoder_states"] = found.last_hidden_state.repeat_interleave(sizes.copies, 0)
            cache = empty_cache(model, sizes)
            forward(model, given | states, cache, tokens_BT, slice(tokens_BT.shape[1]), is_first_iteration=True)
            return [self._laid_out(tensor) for tensor in tensors_of(cache)], states

        return take_prompt

    def _token(self, sizes: Sizes) -> Callable[..., Any]:
        def take_token(
            model: Any, given: dict[str, Tensor], layers: list[Tensor], tokens_B1: Tensor, slot: Tensor, rows_B: Tensor | None = None
        ) -> Tensor:
            if rows_B is not None:
                for tensor in layers:
                    tensor.copy_(self._reordered(tensor, rows_B, sizes))
            scores_BV, mesh = scores(model, given, layers, tokens_B1, slot), self.mesh
            return scores_BV if mesh is None else mark_sharding(scores_BV, mesh, (None, None))  # whole on every host

        return take_token

    def _reordered(self, tensor_BHLD: Tensor, rows_B: Tensor, sizes: Sizes) -> Tensor:
        """Each row is that of another beam of the same prompt."""
        mesh, num_prompts = self.mesh, sizes.batch // sizes.copies
        if mesh is None or _rows(mesh, num_prompts) != _rows(mesh, sizes.batch):
            return tensor_BHLD.index_select(0, rows_B)
        # The beams of a prompt lie on one device, but the partitioner gathers all rows for an index.
        beams = tensor_BHLD.unflatten(0, (num_prompts, sizes.copies))
        chosen = (rows_B % sizes.copies).view(num_prompts, sizes.copies, 1, 1, 1)
        found = beams[:, :1].expand_as(beams)
        for i in range(1, sizes.copies):
            found = torch.where(chosen == i, beams[:, i : i + 1], found)
        return found.flatten(0, 1)

    @property
    def positions(self) -> int | None:
        """How many the model has."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def mesh(self) -> Mesh | None:
        """Where the model lies."""
        found = (annotation_of(parameter) for parameter in self.model.parameters())
        return next((annotation.mesh for annotation in found if annotation is not None), None)

    def put_whole(self, tensor: Tensor) -> Tensor:
        """A host tensor on every device."""
        return tensor.contiguous().to("jax")

    def put(self, tensor: Tensor) -> Tensor:
        """A host tensor on the devices, its rows over the axes of the batch."""
        tensor, mesh = tensor.contiguous().to("jax"), self.mesh
        if mesh is None or tensor.dim() == 0:
            return tensor
        return mark_sharding(tensor, mesh, (_rows(mesh, tensor.shape[0]), *[None] * (tensor.dim() - 1)))

    def _laid_out(self, tensor_BHLD: Tensor) -> Tensor:
        mesh = self.mesh
        if mesh is None:
            return tensor_BHLD
        batch, num_heads = tensor_BHLD.shape[:2]
        heads = next((a for a in mesh.axis_names if a in MODEL_AXES and num_heads % mesh.size(a) == 0), None)
        return mark_sharding(tensor_BHLD, mesh, (_rows(mesh, batch), heads, None, None))


def scores(model: Any, given: dict[str, Tensor], layers: list[Tensor], tokens_B1: Tensor, slot: Tensor) -> Tensor:
    """float32 [B, V] after one token more, in a trace; `layers` are written in place."""
    cache = filled_cache(model, layers, slot)
    return forward(model, given, cache, tokens_B1, slot, next_sequence_length=1).logits[:, -1].float()


def forward(model: Any, given: dict[str, Tensor], cache: Any, tokens_BT: Tensor, slots: Any, **how: Any) -> Any:
    """The model over tokens that go to `slots`, which are a slice from 0 on or one slot."""
    named: dict[str, Any] = {"past_key_values": cache, "use_cache": True, "logits_to_keep": 1}
    if not model._supports_logits_to_keep():
        del named["logits_to_keep"]
    if "mask" in given:
        named["attention_mask"] = given["mask"][:, slots] if isinstance(slots, slice) else given["mask"]
    if "positions" in given:
        positions_BL = given["positions"]
        named["position_ids"] = positions_BL[:, slots] if isinstance(slots, slice) else positions_BL.index_select(1, slots[None])
    if "encoder_mask" in given:
        named["attention_mask"] = given["encoder_mask"]
        named["encoder_outputs"] = BaseModelOutput(last_hidden_state=given["encoder_states"])  # pyright: ignore[reportArgumentType]
    return model(**model.prepare_inputs_for_generation(tokens_BT, **how, **named), return_dict=True)


def _rows(mesh: Mesh, num_rows: int) -> tuple[str, ...] | None:
    """The axes of the batch, as many as divide the rows."""
    found: list[str] = []
    for axis in batch_axes(mesh):
        if num_rows % mesh.size(axis) == 0:
            found.append(axis)
            num_rows //= mesh.size(axis)
    return tuple(found) or None


def _padded(tokens_BT: Tensor, length: int) -> Tensor:
    return nn.functional.pad(tokens_BT.long(), (0, length - tokens_BT.shape[1]))


def programs_of(model: nn.Module) -> Programs:
    """The programs of a model, which keeps them."""
    found = vars(model).get(_ATTRIBUTE)
    if found is None or found.model is not model:
        found = vars(model)[_ATTRIBUTE] = Programs(model)
    return found


__all__ = ["Left", "Programs", "bucket", "programs_of", "scores"]
