"""`scan` and `scan_layers`: a loop over the first dim of tensors, or over equal layers, compiled once for any length.

    h = spmd.scan_layers(model.layers, h)          # == torch.nn.Sequential(*model.layers)(h)

Outside a compiled function they run that loop. Inside, the body of `scan` is traced once: its forward pass becomes one `jax.lax.scan`,
and its backward pass, from PyTorch's autograd, becomes a reverse one. Layers are traced one by one, and the program is then rewritten with
loops (`spmd/program/roll`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import torch
from torch import nn

from spmd.base._convert import exact_dtypes
from spmd.base._errors import SpmdError, called_at, message, shown
from spmd.base._torch import pytree
from spmd.base._wrong_arguments import require_function
from spmd.device._once_differentiable import once_differentiable
from spmd.device._random_stream import advanced, default_stream
from spmd.device._storage import load, recording, wrap
from spmd.program.flow._joint import captured_by, trace_joint
from spmd.program.flow._round import words_now
from spmd.program.reads import ABSENT, PLAIN, Varying


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, partition_fn: Any = None, is_fn_pure: bool = False
) -> tuple[Any, Any]:
    """Run `for x in xs: carry, y = fn(carry, x)`, and return the last carry and the stacked ys.

    Args:
        fn: (carry, x) -> (new carry, y), any containers of tensors. The carry keeps its structure, shapes and dtypes. `fn` may use
            tensors from the enclosing scope, which get gradients too, but must not write to them.
        init: initial carry.
        xs: a container of tensors of shape [n, ...].
        partition_fn: accepted for compatibility with torch_xla. Residuals are kept; use `torch.utils.checkpoint` in `fn`
            to recompute them instead.
        is_fn_pure: accepted for compatibility with torch_xla.

    Returns:
        (carry, ys) with the leaves of ys stacked along a new first dim of size n; None leaves stay None.

    Raises:
        SpmdError: `fn` is not a function or returns no pair, xs contains no tensor or has a leaf without a first dim, first dims differ in
            size, or the carry changes its structure, shapes or dtypes.
        TraceError: inside a compiled function, `fn` writes in place to a tensor from outside.
    """
    require_function(fn, "spmd.scan", "spmd.scan(fn, init, xs)")
    flat_xs, xs_tree = pytree.tree_flatten(xs)
    length = _common_length(flat_xs)
    if length == 0 or recording.get() is None:
        return _loop(fn, init, flat_xs, xs_tree, length)
    return _Scanned(fn, init, flat_xs, xs_tree, length)()


def _common_length(flat_xs: Sequence[Any]) -> int:
    """Size of the first dim of all tensors in xs.

    Raises:
        SpmdError: the sizes differ, there is no tensor, or a leaf is not a tensor with a first dim.
    """
    if not flat_xs:
        raise SpmdError(message("xs of spmd.scan contains no tensor", fix="spmd.scan(fn, init, torch.arange(n, device='jax'))"))
    for x in flat_xs:
        if not isinstance(x, torch.Tensor) or x.dim() == 0:
            found = "a 0-dim tensor" if isinstance(x, torch.Tensor) else f"a {type(x).__name__}"
            what = f"xs of spmd.scan contains {found}, where a tensor with a first dim to iterate over is expected"
            raise SpmdError(message(what, fix="use the value inside fn: lambda carry, x: fn(carry, (x, value))"))
    lengths = {x.shape[0] for x in flat_xs}
    if len(lengths) > 1:
        what = "the first dims of the tensors in xs of spmd.scan have different sizes"
        raise SpmdError(message(what, f"sizes: {sorted(lengths)}", fix=f"slice each tensor to the same length: x[:{min(lengths)}]"))
    return lengths.pop()


def scan_layers(layers: Iterable[nn.Module], input_data: Any, *args: Any, **kwargs: Any) -> Any:
    """Run `for layer in layers: input_data = layer(input_data, *args, **kwargs)` as one loop of the compiled function.

    A compiled function that calls it is rolled whatever its size, unless it is compiled with `roll=False` (docs/depth.md). Hooks, dropout,
    buffers, caches, checkpointing and precision behave as in a Python loop over the layers. Layers that cannot be one loop raise an error.
    Frozen layers before the first one with a gradient are a loop of their own.

    Args:
        layers: modules with the same parameters, shapes and settings. Ints and floats among their attributes (`layer_idx`, a layer scale)
            may differ, if they are used as numbers and decide nothing.
        input_data: input of the first layer. The result of each layer is the input of the next one; a tuple is passed as several arguments.
        args, kwargs: further arguments of every layer: masks, positions, a cache.

    Returns:
        The result of the last layer; `input_data` if there are no layers.

    Raises:
        SpmdError: `layers` does not consist of modules, or two layers have different parameters, shapes or settings or, in a compiled
            function, different operations.
    """
    listed = modules_of(layers)
    if not listed:
        return input_data
    _require_alike([dict([*layer.named_parameters(), *layer.named_buffers()]) for layer in listed])
    _require_same_settings(listed)
    results: list[Any] = []
    for layer in listed:
        input_data = layer(*input_data, *args, **kwargs) if isinstance(input_data, tuple) else layer(input_data, *args, **kwargs)
        results.append(input_data)
    recorder = recording.get()
    if recorder is not None:
        recorder.ran_layers(results, [frozenset(n for n, p in layer.named_parameters() if p.requires_grad) for layer in listed])
    return input_data


def modules_of(layers: Any) -> list[nn.Module]:
    """The layers as a list.

    Raises:
        SpmdError: one of them is not a module, or they are the values of a mapping.
    """
    fix = "spmd.scan_layers(model.layers, x), with a list or ModuleList of modules"
    if isinstance(layers, Mapping | nn.ModuleDict):
        fix = "spmd.scan_layers(layers.values(), x)"
    elif isinstance(layers, Iterable) and not isinstance(layers, str):
        listed = list(layers)
        wrong = next((index for index, layer in enumerate(listed) if not isinstance(layer, nn.Module)), None)
        if wrong is None:
            return listed
        raise SpmdError(message(f"scan_layers takes a list of modules, and item {wrong} is {shown(listed[wrong])}", *called_at(), fix=fix))
    elif isinstance(layers, nn.Module):
        fix = "x = layer(x) for one layer, spmd.scan_layers(model.layers, x) for the layers of a model"
    raise SpmdError(message(f"scan_layers takes a list of modules, got {shown(layers)}", *called_at(), fix=fix))


def _require_alike(state: Sequence[dict[str, torch.Tensor]]) -> None:
    shapes = {name: tuple(tensor.shape) for name, tensor in state[0].items()}
    for index, values in enumerate(state):
        found = {name: tuple(tensor.shape) for name, tensor in values.items()}
        if found != shapes:
            names = sorted(name for name in found.keys() | shapes.keys() if found.get(name) != shapes.get(name))
            raise SpmdError(
                message(
                    f"scan_layers: layers 0 and {index} differ in: {', '.join(names)}",
                    *(f"{name}: {shapes.get(name, 'missing')} and {found.get(name, 'missing')}" for name in names),
                    fix="scan only layers with the same structure, and call the others separately",
                )
            )


def _require_same_settings(layers: Sequence[nn.Module]) -> None:
    """Require equal settings: with another `p`, `training` or activation a layer would have other operations than the others."""
    first = _settings(layers[0]) if layers else {}
    for index, layer in enumerate(layers):
        theirs = _settings(layer)
        name = next((n for n in (*first, *theirs) if first.get(n, ABSENT) != theirs.get(n, ABSENT)), None)
        if name is not None:
            raise SpmdError(
                message(
                    f"scan_layers: layers 0 and {index} differ in: {name}",
                    f"{first.get(name, ABSENT)!r} in layer 0, {theirs.get(name, ABSENT)!r} in layer {index}",
                    fix="scan only layers with the same settings, and call the others separately",
                )
            )


def _settings(layer: nn.Module) -> dict[str, Any]:
    """Class and plain attributes of every module of a layer, by name."""
    found: dict[str, Any] = {}
    for name, module in layer.named_modules():
        title = name or "the layer"
        found[title] = type(module)
        values = {k: v.concrete() if isinstance(v, Varying) else v for k, v in module.__dict__.items()}
        found.update((f"{title}.{k}", v) for k, v in values.items() if isinstance(v, PLAIN) and _must_agree(k, v))
    return found


def _must_agree(name: str, value: Any) -> bool:
    """Whether an attribute must be equal in all layers. A number (an index, a scale) is an input of each iteration."""
    return type(value) not in (int, float) and name != "_is_full_backward_hook"


def _loop(fn: Callable[[Any, Any], tuple[Any, Any]], carry: Any, flat_xs: list[torch.Tensor], xs_tree: Any, length: int) -> tuple[Any, Any]:
    ys: list[Any] = []
    for i in range(length):
        flat_carry, tree = pytree.tree_flatten(carry)
        carry, y = _checked(fn(carry, pytree.tree_unflatten([x[i] for x in flat_xs], xs_tree)), flat_carry, tree)
        ys.append(y)
    return carry, pytree.tree_map(lambda *slices: None if slices[0] is None else torch.stack(slices), *ys) if ys else None


def _checked(result: Any, flat_carry: list[Any], carry_tree: Any) -> tuple[Any, Any]:
    """The result of an iteration, which got the carry `flat_carry`.

    Raises:
        SpmdError: it is not a pair, or its carry has another structure, shape or dtype.
    """
    if not isinstance(result, tuple | list) or len(result) != 2:
        got = f"{len(result)} values" if isinstance(result, tuple | list) else shown(result)
        raise SpmdError(message("the function of spmd.scan returns a pair, (carry, y)", f"got {got}", fix="return carry, None"))
    new, y = result
    flat, tree = pytree.tree_flatten(new)
    before, after = ([_kind(leaf) for leaf in leaves] for leaves in (flat_carry, flat))
    if tree != carry_tree or before != after:
        raise SpmdError(
            message(
                "the carry of a scan changed",
                f"from {', '.join(before)}",
                f"to {', '.join(after)}" if before != after else "to the same leaves in other containers",
                fix="return a carry like the one given",
            )
        )
    return new, y


def _kind(leaf: Any) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


class _Scanned:
    """One `scan` inside a trace."""

    def __init__(
        self, fn: Callable[[Any, Any], tuple[Any, Any]], init: Any, flat_xs: list[torch.Tensor], xs_tree: Any, length: int
    ) -> None:
        self.flat_init, self.carry_tree = pytree.tree_flatten(init)
        self.flat_xs, self.length = flat_xs, length
        self.num_carry = len(self.flat_init)

        def one(*tensors: torch.Tensor) -> Any:
            carry = pytree.tree_unflatten(list(tensors[: self.num_carry]), self.carry_tree)
            result = fn(carry, pytree.tree_unflatten(list(tensors[self.num_carry :]), xs_tree))
            new, y = _checked(result, self.flat_init, self.carry_tree)
            return pytree.tree_leaves(new), y

        wanted = [torch.is_grad_enabled() and t.is_floating_point() for t in self.flat_init]  # a gradient may flow between iterations
        wanted += [torch.is_grad_enabled() and t.requires_grad for t in flat_xs]
        captured = captured_by(fn) if torch.is_grad_enabled() else []
        with exact_dtypes():
            examples = [*self.flat_init, *(wrap(load(x)[0]) for x in flat_xs)]
        self.words = words_now()
        self.joint = trace_joint(one, examples, wanted, captured, self.words)

    def __call__(self) -> tuple[Any, Any]:
        joint = self.joint
        flat = list(_Passes.apply(self, *self.flat_init, *self.flat_xs, *joint.captured))
        default_stream.draws += joint.draws * self.length
        results = iter(flat)
        carry, ys = pytree.tree_unflatten([next(results) if leaf is None else leaf[0] for leaf in joint.leaves], joint.tree)
        return pytree.tree_unflatten(carry, self.carry_tree), ys

    def forward(self, consts: list[Any], init: list[Any], xs: list[Any], captured: list[Any]) -> tuple[list[Any], list[Any]]:
        """(last carry and stacked ys, stacked residuals)."""
        joint = self.joint

        def body(state: Any, x: Any) -> Any:
            carry, words = state
            outputs, residuals = joint.run_forward(consts, [*carry, *x, *captured], words)
            return (outputs[: self.num_carry], advanced(words, joint.draws)), (outputs[self.num_carry :], residuals)

        (carry, _), (ys, residuals) = jax.lax.scan(body, (init, self.words), xs, length=self.length)
        return [*carry, *ys], residuals

    def backward(self, residuals: list[Any], cotangents: list[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Gradients of the initial carry, of xs and of the captured tensors; None for those without a gradient."""
        joint, count = self.joint, self.num_carry
        num_args = count + len(self.flat_xs)
        carried = [i for i in range(count) if i in joint.gradient_of]
        shared = [i for i in joint.gradient_of if i >= num_args]

        def body(state: Any, slices: Any) -> Any:
            of_carry, of_shared = state
            residual, of_ys = slices
            flowing = [g for g, takes in zip([*of_carry, *of_ys], joint.has_gradient, strict=True) if takes]
            grads = dict(zip(joint.gradient_of, joint.run_backward(residual, flowing), strict=True))
            new = [grads.get(i, zero) for i, zero in enumerate(of_carry)]
            total = [old + grads[i] for i, old in zip(shared, of_shared, strict=True)]
            return (new, total), [grads[i] for i in joint.gradient_of if count <= i < num_args]

        zeros = [jnp.zeros(t.shape, load(t).dtype) for t in joint.captured]
        (first, total), of_xs = jax.lax.scan(
            body, (cotangents[:count], zeros), (residuals, cotangents[count:]), length=self.length, reverse=True
        )
        in_order = iter(of_xs)
        xs = [next(in_order) if i in joint.gradient_of else None for i in range(count, num_args)]
        return [g if i in carried else None for i, g in enumerate(first)], xs, total


@once_differentiable("scan or scan_layers", fix="for x in xs: carry, y = fn(carry, x)   # a Python loop has all derivatives")
class _Passes(torch.autograd.Function):
    """Both scans as an autograd function."""

    @staticmethod
    def forward(ctx: Any, scanned: _Scanned, *tensors: torch.Tensor) -> Any:
        joint, count = scanned.joint, scanned.num_carry
        with exact_dtypes():
            arrays = [load(t) for t in tensors]
            split = count + len(scanned.flat_xs)
            outputs, residuals = scanned.forward(joint.outer_values(), arrays[:count], arrays[count:split], arrays[split:])
        ctx.scanned, ctx.tensors = scanned, tensors
        return joint.results(ctx, outputs, residuals)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        scanned: _Scanned = ctx.scanned
        with exact_dtypes():
            first, xs, captured = scanned.backward([load(t) for t in ctx.saved_tensors], [load(g) for g in grads])
        return None, *(None if g is None else wrap(g) for g in (*first, *xs, *captured))
