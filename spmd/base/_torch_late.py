"""Private names of torch in modules that take a second to import. Functions import them when they are needed.

All other private names are in `_torch`. A missing name raises an error with the supported versions.
"""

from __future__ import annotations

import functools
import sys
import types
from collections.abc import Callable, Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any, NamedTuple

from spmd.base._torch import missing
from spmd.base._warning_registries import ignored


class PlanParts(NamedTuple):
    """Functions that torch.distributed.checkpoint's default planner uses."""

    dedup_save_plans: Callable[..., Any]
    flatten_state_dict: Callable[..., Any]
    set_element: Callable[..., Any]


def plan_parts() -> PlanParts:
    """The functions that torch.distributed.checkpoint's default planner uses."""
    return PlanParts(
        *(
            _named(f"torch.distributed.checkpoint.{module}", name)
            for module, name in (
                ("_dedup_save_plans", "dedup_save_plans"),
                ("_nested_dict", "flatten_state_dict"),
                ("_traverse", "set_element"),
            )
        )
    )


def fsspec_filesystem() -> Any:
    """The module of torch.distributed.checkpoint's readers and writers over fsspec."""
    return _module("torch.distributed.checkpoint._fsspec_filesystem")


def dtensor_spec() -> Any:
    """The module of `DTensorSpec` and `TensorMeta`."""
    return _module("torch.distributed.tensor._dtensor_spec")


def joint_graphs() -> Any:
    """functorch.compile: traces functions and their gradients to graphs."""
    return _module("functorch.compile")


class DeviceInterfaces(NamedTuple):
    """Dynamo's registry of device interfaces.

    Attributes:
        base: the base class of the interfaces.
        registered: the interfaces, by device type.
        register: registers an interface.
    """

    base: Any
    registered: dict[str, type]
    register: Callable[[str, type], None]


def device_interfaces() -> DeviceInterfaces:
    """Dynamo's registry of device interfaces."""
    module = "torch._dynamo.device_interface"
    return DeviceInterfaces(*(_named(module, name) for name in ("DeviceInterface", "device_interfaces", "register_interface_for_device")))


def dynamo_backend(name: str) -> Callable[[Any, Any], Any]:
    """The function that `torch.compile(backend=name)` calls with each graph and its example inputs."""
    return _named("torch._dynamo.backends.registry", "lookup_backend")(name)


@contextmanager
def without_dynamo() -> Generator[None]:
    """While active, functions under torch.compile run eagerly, and Dynamo ignores this thread's frames. Imports nothing."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    eval_frame = _module("torch._C._dynamo.eval_frame")
    before = eval_frame.set_eval_frame(None)  # first, because set_stance must not be called in a frame that Dynamo evaluates
    try:
        # the global hooks are those that a trace of this package sets
        text = "Using `torch.compile\\(module\\)` when there are global hooks"
        with _named("torch._dynamo", "set_stance")("force_eager"), ignored(text):
            yield
    finally:
        eval_frame.set_eval_frame(before)


class CompileArguments(NamedTuple):
    """The arguments of a call of torch.compile."""

    backend: Any
    options: dict[str, Any]
    fullgraph: bool
    dynamic: bool | None


def compile_arguments(context: Any) -> CompileArguments:
    """The arguments of a call of torch.compile.

    Args:
        context: the context that the call returned, with which functions are compiled.
    """
    backend = _named("torch._dynamo.eval_frame", "innermost_backend")(context.callback)
    options: dict[str, Any] = getattr(backend, "kwargs", {}).get("options", {})
    fullgraph, dynamic = getattr(context, "fullgraph", False), getattr(context, "_dynamic", None)
    return CompileArguments(getattr(backend, "compiler_fn", backend), options, fullgraph, dynamic)


def stance() -> str:
    """The present stance of `torch.compiler.set_stance`. Imports Dynamo."""
    return _named("torch._dynamo.eval_frame", "_stance").stance


def skip_in_dynamo(package: str) -> None:
    """Make Dynamo skip all functions of a package from now on."""
    _named("torch._dynamo.trace_rules", "add")(package)


def only_inlined_by_dynamo(code: types.CodeType) -> None:
    """Make Dynamo skip calls of a function that it meets outside of a graph, with all that they call. In a graph it is inlined."""
    skip = _named("torch._C._dynamo.eval_frame", "_FrameAction").SKIP
    strategy = _named("torch._C._dynamo.eval_frame", "_FrameExecStrategy")(skip, skip)
    _named("torch._C._dynamo.eval_frame", "set_code_exec_strategy")(code, strategy)


@functools.cache
def activation_checkpoint() -> Any:
    """The operator for torch.utils.checkpoint in a Dynamo graph."""
    return _named("torch._higher_order_ops.wrap", "tag_activation_checkpoint")


def _module(name: str) -> Any:
    try:
        return import_module(name)
    except ImportError as error:
        raise missing(f"{name} ({error})") from error


def _named(module: str, name: str) -> Any:
    found = getattr(_module(module), name, None)
    if found is None:
        raise missing(f"{module}.{name}")
    return found


__all__ = [
    "CompileArguments",
    "DeviceInterfaces",
    "PlanParts",
    "activation_checkpoint",
    "compile_arguments",
    "device_interfaces",
    "dtensor_spec",
    "dynamo_backend",
    "fsspec_filesystem",
    "joint_graphs",
    "plan_parts",
    "skip_in_dynamo",
    "stance",
    "without_dynamo",
]
