"""All private names of torch that this package uses; no other file but `_torch_late` uses one (tests/base/test_private_names.py).

Any version of torch may remove one. If one is missing, importing this file raises an error with the supported versions, instead of
a failure at the first use. Operators (`torch.ops.aten._copy_from`) are not among them: those that a torch version lacks are skipped
when kernels are registered. `spmd/patches` lists the objects of torch that are replaced, with reasons.
"""

# ruff: noqa: F401  (inside a `try`, ruff reports re-exported names as unused)
# pyright: reportPrivateImportUsage=none, reportAttributeAccessIssue=none, reportUnusedImport=none

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from packaging.version import Version

from mesh._mesh_errors import message

TRIED, UNTRIED = "torch 2.11 to 2.15", "2.16"  # the tested versions, which have all these names, and the first untested one


def is_registered_group(group: Any) -> bool:
    """Whether torch.distributed has finished the creation of a process group."""
    return group in torch.distributed.distributed_c10d._world.pg_map  # pyright: ignore[reportAttributeAccessIssue]


def torch_at_least(version: str) -> bool:
    """Whether the installed torch is this version or later. A pre-release counts as its release."""
    return Version(torch.__version__).release >= Version(version).release


def untried(what: str) -> ImportError:
    """The error for a version of torch that is too old, or too new and incompatible."""
    return _refused(f"is not supported: {what}")


def missing(what: str) -> ImportError:
    """The error for a private name that the installed torch does not have."""
    return _refused(f"has no {what}, a private name that spmd uses")


def _refused(why: str) -> ImportError:
    return ImportError(
        message(f"torch {torch.__version__} {why}", f"tested versions: {TRIED}", fix=f"pip install 'torch>=2.11,<{UNTRIED}'")
    )


if not torch_at_least("2.11"):
    raise untried("it is too old")

try:
    import torch.distributed.device_mesh
    import torch.optim._adafactor
    import torch.optim.optimizer
    import torch.utils._device
    import torch.utils._foreach_utils
    import torch.utils.backend_registration
    from torch._C import DisableTorchFunction as DisableTorchFunction
    from torch._C import DisableTorchFunctionSubclass as DisableTorchFunctionSubclass
    from torch._C import DispatchKey as DispatchKey
    from torch._C import DispatchKeySet as DispatchKeySet
    from torch._C import _after_autograd_keyset as after_autograd_keyset
    from torch._C import _are_functorch_transforms_active as are_functorch_transforms_active
    from torch._C import _AutoDispatchBelowAutograd as AutoDispatchBelowAutograd
    from torch._C import _current_autograd_node as current_autograd_node
    from torch._C import _current_graph_task_id as current_graph_task_id
    from torch._C import _DisableAutocast as DisableAutocast
    from torch._C import _dispatch_get_all_op_names as dispatch_get_all_op_names
    from torch._C import _dispatch_has_kernel_for_dispatch_key as dispatch_has_kernel_for_dispatch_key
    from torch._C import _dispatch_keys as dispatch_keys
    from torch._C import _dispatch_tls_local_exclude_set as excluded_dispatch_keys
    from torch._C import _dispatch_tls_local_include_set as included_dispatch_keys
    from torch._C import _ExcludeDispatchKeyGuard as ExcludeDispatchKeyGuard
    from torch._C import _get_dispatch_stack_at as dispatch_mode_at
    from torch._C import _get_function_stack_at as function_mode_at
    from torch._C import _get_privateuse1_backend_name as get_privateuse1_backend_name
    from torch._C import _get_tracing_state as in_torchscript_trace
    from torch._C import _ImperativeEngine as ImperativeEngine
    from torch._C import _increment_version as increment_version
    from torch._C import _is_multithreading_enabled as is_multithreading_enabled
    from torch._C import _len_torch_dispatch_stack as num_torch_dispatch_modes
    from torch._C import _len_torch_function_stack as num_torch_function_modes
    from torch._C import _set_grad_enabled as set_grad_enabled
    from torch._C import _set_multithreading_enabled as set_multithreading_enabled
    from torch._decomp import decomposition_table as decomposition_table
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack as without_functorch_transforms
    from torch._higher_order_ops import utils as higher_order_utils
    from torch._higher_order_ops.associative_scan import associative_scan as associative_scan
    from torch._higher_order_ops.associative_scan import associative_scan_op as associative_scan_op
    from torch._higher_order_ops.associative_scan import generic_associative_scan as generic_associative_scan
    from torch._higher_order_ops.cond import cond_op as cond_op
    from torch._higher_order_ops.scan import scan_op as scan_op
    from torch._higher_order_ops.while_loop import while_loop_op as while_loop_op
    from torch._library import opaque_object
    from torch._library.custom_ops import OPDEFS as custom_operators
    from torch._ops import HigherOrderOperator as HigherOrderOperator
    from torch._ops import OpOverload as OpOverload
    from torch._ops import OpOverloadPacket as OpOverloadPacket
    from torch._prims_common import ELEMENTWISE_TYPE_PROMOTION_KIND as ELEMENTWISE_TYPE_PROMOTION_KIND
    from torch._prims_common import elementwise_dtypes as elementwise_dtypes
    from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
    from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
    from torch._subclasses.functional_tensor import FunctionalTensor as FunctionalTensor
    from torch._tensor_str import _str as tensor_str
    from torch._utils import get_tensor_metadata as get_tensor_metadata
    from torch._utils import set_tensor_metadata as set_tensor_metadata
    from torch.distributions.constraints import _Symmetric as Symmetric
    from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
    from torch.optim.optimizer import _device_dtype_check_for_fused as device_dtype_check_for_fused
    from torch.optim.optimizer import _global_optimizer_post_hooks as global_optimizer_post_hooks
    from torch.optim.optimizer import _global_optimizer_pre_hooks as global_optimizer_pre_hooks
    from torch.serialization import _package_registry as package_registry
    from torch.utils import _pytree as pytree
    from torch.utils._device import DeviceContext as DeviceContext
    from torch.utils._mode_utils import no_dispatch as no_dispatch
    from torch.utils._python_dispatch import _disable_current_modes as disable_current_modes
    from torch.utils._pytree import TreeSpec as TreeSpec
    from torch.utils.backend_registration import _DummyDeviceGuard as DummyDeviceGuard
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup_privateuseone_for_python_backend
    from torch.utils.checkpoint import _CheckpointFrame as CheckpointFrame

    storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id
    work_of_future: Callable[..., Any] = torch._C._distributed_c10d._create_work_from_future
    UninitializedTensorMixin: type = getattr(torch.nn.parameter, "UninitializedTensorMixin")  # noqa: B009 (its stubs lack it)
    LinAlgError: type[RuntimeError] = torch._C._LinAlgError
    is_functorch_wrapped_tensor: Callable[[torch.Tensor], bool] = torch._C._functorch.is_functorch_wrapped_tensor
    get_unwrapped: Callable[[torch.Tensor], torch.Tensor] = torch._C._functorch.get_unwrapped
    make_wrapper_subclass: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
    disabled_torch_function: Any = torch._C._disabled_torch_function_impl
    set_conj: Callable[[torch.Tensor, bool], None] = torch._C._set_conj
    set_neg: Callable[[torch.Tensor, bool], None] = torch._C._set_neg
    has_meta_kernels: Callable[[], bool] = torch._C._meta_in_tls_dispatch_include
    use_meta_kernels: Callable[[bool], None] = torch._C._set_meta_in_tls_dispatch_include
    storage_use_count: Callable[[int], int] = torch._C._storage_Use_Count
    create_empty_tensor: Callable[..., torch.Tensor] = torch._C._acc.create_empty_tensor
    top_saved_tensors_default_hooks: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
    pop_saved_tensors_default_hooks: Callable[[], None] = torch._C._autograd._pop_saved_tensors_default_hooks
    push_saved_tensors_default_hooks: Callable[[Any, Any], None] = torch._C._autograd._push_saved_tensors_default_hooks
    register_constant_type: Callable[[type], None] = (
        partial(opaque_object.register_custom_class, typ="constant")
        if torch_at_least("2.14")
        else partial(opaque_object.register_opaque_type, typ="value")
    )
    disable_dynamo: Callable[..., Any] = torch._disable_dynamo  # torch.compiler.disable imports Dynamo, which takes seconds
except (ImportError, AttributeError) as error:
    raise missing(str(error)) from error

try:  # used by torch.compile's own guards: up to Python 3.11 it reads the dict's version tag, from 3.12 on it watches the dict
    from torch._C._dynamo.guards import dict_version as _dict_version  # pyright: ignore[reportMissingModuleSource]
except ImportError:  # guards then compare the values
    _dict_version = None
dict_version: Callable[[dict[Any, Any]], int] | None = _dict_version


def print_options() -> dict[str, Any]:
    """What `torch.set_printoptions` has set: the attributes themselves, which may be written to."""
    return vars(torch._tensor_str.PRINT_OPTS)


def current_device_mesh() -> Any:
    """The DeviceMesh of the innermost `with` block. Outside of such a block torch raises its own error."""
    return torch.distributed.device_mesh._mesh_resources.get_current_mesh()


@contextmanager
def without_saved_tensors_hooks() -> Generator[None]:
    """While active, no saved-tensors hook of the user (of a checkpoint, of offloading) sees the tensors that autograd saves."""
    hooks: list[Any] = []
    while (top := top_saved_tensors_default_hooks(False)) is not None:
        hooks.append(top)
        pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_tensors_default_hooks(pack, unpack)


def hooks_of_leaf(leaf: torch.Tensor) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """The hooks of a leaf tensor, in order: those that get its gradient, and those that run after the accumulation."""
    before, after = leaf._backward_hooks, leaf._post_accumulate_grad_hooks
    return tuple(before.values()) if before else (), tuple(after.values()) if after else ()


def graph_break(msg: str) -> None:
    """End the graph that Dynamo is capturing. Dynamo is imported here and not earlier, since the import takes seconds."""
    torch._dynamo.graph_break(msg=msg)


# Private attributes of torch's objects that are used: a function that makes such an object, and the names.
_ATTRIBUTES: Mapping[str, tuple[Callable[[], object], tuple[str, ...]]] = {
    "nn.Module": (
        torch.nn.Module,
        (
            *("_parameters", "_buffers", "_modules", "_apply"),
            *("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_is_full_backward_hook"),
        ),
    ),
    "Tensor": (lambda: torch.zeros(()), ("_base", "_backward_hooks", "_post_accumulate_grad_hooks")),
    "UntypedStorage": (lambda: torch.UntypedStorage(0), ("_cdata",)),
    "Node": (lambda: torch.ones((), requires_grad=True).exp().grad_fn, ("_sequence_nr",)),
    "OpOverload": (lambda: torch.ops.aten.add.Tensor, ("_schema",)),
    "DeviceMesh": (
        lambda: torch.distributed.device_mesh.DeviceMesh("cpu", [0], _init_backend=False, _rank=0),
        ("_get_root_mesh", "_layout", "_rank_map"),
    ),
}
for _kind, (_make, _names) in _ATTRIBUTES.items():
    _made = _make()
    for _name in _names:
        if not hasattr(_made, _name):
            raise missing(f"{_kind}.{_name}")
