"""The programs of a model's generation: prefill for each bucket of prompt lengths, and decode for one more token.

They are attached to the model and compiled when first needed. The cache is laid out like the model: heads over the model axis, rows over
the batch axes.
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
from spmd.huggingface._key_value_cache import KeyValueCache, Sizes, empty_cache, filled_cache, tensors_of
from spmd.program._step import Step
from spmd.program._step import compile as compile_step
from spmd.sharding._annotate import mark_sharding
from spmd.sharding._axes import MODEL_AXES, batch_axes

_SMALLEST_BUCKET, _SMALLEST_ROOM = 8, 64
_ATTRIBUTE = "_spmd_generation"


def bucket(length: int, smallest: int = _SMALLEST_BUCKET, limit: int | None = None) -> int:
    """The next power of two, at least `smallest`; or `limit` if that is smaller and still at least `length`."""
    size = max(smallest, 1 << (length - 1).bit_length())
    return size if limit is None or limit < length else min(size, limit)


class NotCompiled(Exception):
    """This generation must fall back to transformers' loop. Caught where generation starts.

    Attributes:
        is_lasting: the model itself cannot be compiled, not only this call.
        is_expected: a documented case, without a warning.
    """

    def __init__(self, reason: str, is_lasting: bool, is_expected: bool = False) -> None:
        super().__init__(reason)
        self.is_lasting, self.is_expected = is_lasting, is_expected


class Programs:
    """The programs of one model.

    Attributes:
        steps: compiled functions, by kind of program and the sizes that it is compiled for.
    """

    def __init__(self, model: nn.Module | None) -> None:
        self.model: Any = model
        self.steps: dict[Any, Step[Any, Any]] = {}

    def __reduce__(self) -> Any:  # a copied or loaded model compiles its own programs
        return Programs, (None,)

    @property
    def num_executables(self) -> int:
        return sum(step.num_executables for step in self.steps.values())

    def run(self, key: Any, make: Callable[[], Callable[..., Any]], *args: Any) -> Any:
        """Call the program with this key. `make` creates its function, a method of the model that runs without gradients, as in `generate`.

        Raises:
            NotCompiled: the function cannot be compiled.
        """
        if key not in self.steps:
            self.steps[key] = compile_step(MethodType(make(), self.model))  # as a method, so that a trace finds the model's modules
        step = self.steps[key]
        try:
            return step(*args)
        except JaxRuntimeError:
            raise
        except Exception as error:  # also the model's own errors about tensors without values
            was_program = step.num_traces > 0  # a hook or autocast in this call only: the next may compile
            if not was_program:
                del self.steps[key]
            raise NotCompiled(str(error).partition("\n")[0], is_lasting=not was_program) from error

    def sizes(self, batch: int, max_length: int, copies: int) -> Sizes:
        """Sizes with room for `max_length` tokens; those of an existing program for the same rows are preferred.

        Raises:
            NotCompiled: the model has too few positions. How it handles that is up to the model.
        """
        if self.positions is not None and max_length > self.positions:
            raise NotCompiled(f"{max_length} tokens, of a model of {self.positions}", is_lasting=False, is_expected=True)
        made = [sizes.slots for _, sizes, *_ in self.steps if (sizes.batch, sizes.copies) == (batch, copies) and sizes.slots >= max_length]
        return Sizes(batch, min(made, default=bucket(max_length, _SMALLEST_ROOM)), copies)

    def prefill(self, cache: KeyValueCache, tokens_BT: Tensor, encoder_tokens_BS: Tensor | None = None) -> None:
        """Fill `cache` with a prompt except for its last token, from which decoding starts.

        Args:
            cache: the cache to fill; its `given` is still on the host.
            tokens_BT: int64 ids of the prompt on the host.
            encoder_tokens_BS: ids for the encoder, if the model has one.
        """
        length = tokens_BT.shape[1]
        padded = min(bucket(length, limit=self.positions), cache.sizes.slots)
        cache.given = {name: self.put(tensor) for name, tensor in cache.given.items()}
        inputs = [self.put(_padded(tokens_BT, padded))]
        if encoder_tokens_BS is not None:
            inputs.append(self.put(_padded(encoder_tokens_BS, cache.given["encoder_mask"].shape[1])))
        key = ("prompt", cache.sizes, padded, cache.shapes)
        cache.layers, states = self.run(key, lambda: self._prompt(cache.sizes), dict(cache.given), *inputs)
        cache.given |= states
        cache.num_tokens = length - 1

    def decode(self, cache: KeyValueCache, tokens_B: Tensor, rows_B: Tensor | None = None) -> Tensor:
        """float32 [B, V] logits on the host after one more token per row. `rows_B`: reorders the cache's rows first, for beams."""
        key = ("token", cache.sizes, rows_B is None, cache.shapes)
        rows = [] if rows_B is None else [self.put(rows_B)]
        slot = torch.tensor(cache.num_tokens)
        scores_BV = self.run(
            key,
            lambda: self._token(cache.sizes),
            dict(cache.given),
            cache.layers,
            self.put(tokens_B[:, None].long()),
            self.put(slot),
            *rows,
        )
        cache.num_tokens += 1
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
            return scores_BV if mesh is None else mark_sharding(scores_BV, mesh, (None, None))  # replicated, so every host has all of it

        return take_token

    def _reordered(self, tensor_BHLD: Tensor, rows_B: Tensor, sizes: Sizes) -> Tensor:
        """The cache with each row replaced by that of another beam of the same prompt."""
        mesh, num_prompts = self.mesh, sizes.batch // sizes.copies
        if mesh is None or _rows(mesh, num_prompts) != _rows(mesh, sizes.batch):
            return tensor_BHLD.index_select(0, rows_B)
        # The beams of a prompt are on one device, but the partitioner would gather all rows for an index.
        beams = tensor_BHLD.unflatten(0, (num_prompts, sizes.copies))
        chosen = (rows_B % sizes.copies).view(num_prompts, sizes.copies, 1, 1, 1)
        found = beams[:, :1].expand_as(beams)
        for i in range(1, sizes.copies):
            found = torch.where(chosen == i, beams[:, i : i + 1], found)
        return found.flatten(0, 1)

    @property
    def positions(self) -> int | None:
        """Maximum number of positions of the model; None if its configuration has none."""
        return getattr(self.model.config.get_text_config(decoder=True), "max_position_embeddings", None)

    @property
    def mesh(self) -> Mesh | None:
        """The mesh of the model's parameters; None if no parameter is marked."""
        found = (annotation_of(parameter) for parameter in self.model.parameters())
        return next((annotation.mesh for annotation in found if annotation is not None), None)

    def put_whole(self, tensor: Tensor) -> Tensor:
        """Replicate a host tensor over the devices."""
        return tensor.contiguous().to("jax")

    def put(self, tensor: Tensor) -> Tensor:
        """Upload a host tensor to the devices, its rows split over the batch axes."""
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
    """float32 [B, V] logits after one more token, inside a trace; writes `layers` in place."""
    cache = filled_cache(model, layers, slot)
    return forward(model, given, cache, tokens_B1, slot, next_sequence_length=1).logits[:, -1].float()


def forward(model: Any, given: dict[str, Tensor], cache: Any, tokens_BT: Tensor, slots: Any, **how: Any) -> Any:
    """Run the model over tokens that go to `slots`: a slice from 0 on, or a single slot."""
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
    """The batch axes that divide the rows, as many as possible."""
    found: list[str] = []
    for axis in batch_axes(mesh):
        if num_rows % mesh.size(axis) == 0:
            found.append(axis)
            num_rows //= mesh.size(axis)
    return tuple(found) or None


def _padded(tokens_BT: Tensor, length: int) -> Tensor:
    return nn.functional.pad(tokens_BT.long(), (0, length - tokens_BT.shape[1]))


def programs_of(model: nn.Module) -> Programs:
    """The programs of a model, stored on the model."""
    found = vars(model).get(_ATTRIBUTE)
    if found is None or found.model is not model:
        found = vars(model)[_ATTRIBUTE] = Programs(model)
    return found


__all__ = ["NotCompiled", "Programs", "bucket", "programs_of", "scores"]
