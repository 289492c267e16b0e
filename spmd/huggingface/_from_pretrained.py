"""Replaces parts of transformers' `from_pretrained` while a training is active: "auto" means the mesh, and loaded models are laid out.

Weights for device 'jax' stay on the host until they are used, so each device receives only its shards.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from importlib import import_module
from typing import Any

from spmd.base._errors import SpmdError, message
from spmd.patches._table import current, replaced
from spmd.rules._training_layouts import Layouts

_MODULE = "transformers.modeling_utils"
_DEVICE_MAP = f"{_MODULE}.check_and_set_device_map"
_FROM_PRETRAINED = f"{_MODULE}.PreTrainedModel.from_pretrained"
_AUTOMATIC = ("auto", "balanced", "balanced_low_0", "sequential")


@contextmanager
def placing(layouts: Layouts) -> Generator[None]:
    """While active, models that `from_pretrained` loads to device 'jax' are laid out over the mesh of `layouts`."""
    import_module(_MODULE)
    with ExitStack() as stack:
        stack.enter_context(replaced(_DEVICE_MAP, _device_map()))
        stack.enter_context(replaced(_FROM_PRETRAINED, _from_pretrained(layouts)))
        yield


def _device_map() -> Any:
    check: Any = current(_DEVICE_MAP)

    def checked(device_map: Any) -> Any:
        """transformers' check. The mesh counts as one device, with the memory of all its devices."""
        return check("jax" if isinstance(device_map, str) and device_map in _AUTOMATIC else device_map)

    return checked


def _from_pretrained(layouts: Layouts) -> Any:
    load: Any = current(_FROM_PRETRAINED).__func__

    def from_pretrained(cls: Any, *args: Any, **options: Any) -> Any:
        for name in ("tp_plan", "tp_size", "distributed_config"):
            if options.get(name) is not None:
                raise _of_processes(name, options[name])
        found = load(cls, *args, **options)
        model = found[0] if isinstance(found, tuple) else found  # or (model, loading info)
        places = {t.device.type for t in (*model.parameters(), *model.buffers())}
        if places == {"jax"}:
            layouts.lay_out_model(model)
        return found

    return classmethod(from_pretrained)


def _of_processes(name: str, value: Any) -> SpmdError:
    return SpmdError(
        message(
            f"from_pretrained({name}={value!r}) divides a model among processes, but this single process has the whole mesh",
            fix='leave the argument out; train_on(mesh, rules="auto") uses the plan of the model',
        )
    )


__all__ = ["placing"]
