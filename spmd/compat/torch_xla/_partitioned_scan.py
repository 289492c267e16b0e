"""`torch_xla.experimental.scan`: `spmd.scan`, and a scan whose forward and backward pass a `partition_fn` determines.

By default (`spmd.scan`) the backward pass saves what it needs. With another partitioner or `is_fn_pure=True`, AOTAutograd traces `fn` once,
the partitioner splits the joint graph in two, and each part is scanned.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from spmd.base._errors import SpmdError, message
from spmd.base._torch import pytree
from spmd.base._torch_late import joint_graphs
from spmd.device._once_differentiable import once_differentiable
from spmd.program.flow import _scan

Passes = tuple[Callable[..., Any], Callable[..., Any], Callable[..., Any]]
# Keys hold the id of a partitioner, and values the partitioner: while it is there no other one gets its id.
# function -> {(partitioner, structure, shapes): it, and the function's passes}, for functions with `is_fn_pure`
_SCAN_COMPUTATION_CACHE: WeakKeyDictionary[Any, dict[Any, tuple[Any, Passes]]] = WeakKeyDictionary()
# layer -> {partitioner: it, and a function of the layer's values}
_ONE_LAYER_CACHE: WeakKeyDictionary[nn.Module, dict[int, tuple[Any, Callable[..., Any]]]] = WeakKeyDictionary()


class ScanError(SpmdError, ValueError):
    """The arguments of a scan do not fit each other."""


def default_partition(*args: Any, **kwargs: Any) -> Any:
    """`functorch.compile.default_partition`: saves everything that the backward pass needs."""
    return joint_graphs().default_partition(*args, **kwargs)


def scan(
    fn: Callable[[Any, Any], tuple[Any, Any]], init: Any, xs: Any, partition_fn: Any = default_partition, is_fn_pure: bool = False
) -> tuple[Any, Any]:
    """`for x in xs: carry, y = fn(carry, x)`, returning the last carry and the stacked ys; see `spmd.scan`.

    Args:
        fn: (carry, x) -> (new carry, y).
        init: the first carry.
        xs: a container of tensors with the same first dim.
        partition_fn: splits the joint graph, like `functorch.compile.min_cut_rematerialization_partition`.
        is_fn_pure: trace `fn` only once per partitioner, structure and shapes.

    Raises:
        ScanError: `fn` is not callable, or first dims differ (a ValueError).
    """
    if not callable(fn):
        raise ScanError(message(f"scan needs a function, but got {fn!r}", fix="def fn(carry, x): return carry, y"))
    lengths = {len(x) for x in pytree.tree_leaves(xs)}
    if len(lengths) != 1:
        raise ScanError(message("scan needs tensors with the same first dim", f"sizes: {sorted(lengths)}", fix="stack them alike"))
    if not is_fn_pure and _is_default(partition_fn):
        return _scan.scan(fn, init, xs)
    passes = value_and_grad_partitioned(fn, init, xs, partition_fn, is_fn_pure)
    flat_init, carry_tree = pytree.tree_flatten(init)
    flat_xs, xs_tree = pytree.tree_flatten(xs)
    found: dict[str, Any] = {}
    flat = _Partitioned.apply(passes, carry_tree, xs_tree, len(flat_init), found, *flat_init, *flat_xs)
    return found["unflatten"](flat)


def _is_default(partition_fn: Any) -> bool:
    return partition_fn is None or getattr(partition_fn, "__name__", "") == "default_partition"


def value_and_grad_partitioned(
    fn: Callable[..., Any], init: Any, xs: Any, partition_fn: Any = default_partition, is_fn_pure: bool = True
) -> Passes:
    """`fn`, one iteration of a scan, as three functions of containers.

    Returns:
        forward: (carry, x) -> (new carry, (y, activations that are not slices of xs)).
        alias_input: (stacked activations, xs) -> all activations.
        backward: (gradient of the new carry, (gradient of y, activations)) -> (gradient of the carry, of x).
    """
    aot = joint_graphs()

    def like(v: torch.Tensor, requires_grad: bool) -> torch.Tensor:
        return torch.empty_like(v.detach(), requires_grad=requires_grad and v.is_floating_point())

    carry = pytree.tree_map(lambda v: like(v, True), init)  # a gradient may flow between iterations
    x = pytree.tree_map(lambda v: like(v[0], v.requires_grad), xs)
    flat, tree = pytree.tree_flatten((carry, x))
    key = (id(partition_fn), str(tree), *((tuple(t.shape), t.dtype, t.requires_grad) for t in flat))
    if is_fn_pure and key in _SCAN_COMPUTATION_CACHE.get(fn, {}):
        return _SCAN_COMPUTATION_CACHE[fn][key][1]

    def unaliased(*args: Any) -> Any:
        given = {id(leaf) for leaf in pytree.tree_leaves(args)}
        return pytree.tree_map(lambda v: v.clone() if id(v) in given else v, fn(*args))

    graphs: list[Any] = []

    def keep(graph: Any, _: Any) -> Any:
        graphs.append(graph)
        return aot.make_boxed_func(graph)

    with torch.enable_grad():
        made = aot.aot_function(unaliased, keep, keep, partition_fn=partition_fn)(carry, x)
        results, _ = tree_flatten_none(made)
        flowing = [r for r in results if r.requires_grad]
        if flowing:
            torch.autograd.backward(flowing, [torch.ones_like(r) for r in flowing])
    passes = _passes(graphs, flat, tree, made, [r.requires_grad for r in results])
    if is_fn_pure:
        _SCAN_COMPUTATION_CACHE.setdefault(fn, {})[key] = partition_fn, passes
    return passes


def _passes(graphs: Sequence[Any], flat: Sequence[torch.Tensor], tree: Any, made: Any, has_gradient: Sequence[bool]) -> Passes:
    """The two graphs as functions of containers. An activation that is an input of the iteration is not stacked again."""
    forward_graph, backward_graph = graphs[0], graphs[1] if len(graphs) > 1 else None
    leaves, results_tree = pytree.tree_flatten(made)
    count, num_carry = len(leaves), len(pytree.tree_leaves(made[0]))
    with torch.no_grad():
        kept = list(forward_graph(*flat))[count:]
    position = {id(t): i - num_carry for i, t in enumerate(flat) if i >= num_carry}
    aliases = {i: position[id(t)] for i, t in enumerate(kept) if id(t) in position}

    def forward(carry: Any, x: Any) -> Any:
        out = list(forward_graph(*pytree.tree_leaves((carry, x))))
        new, y = pytree.tree_unflatten(out[:count], results_tree)
        return new, (y, tuple(t for i, t in enumerate(out[count:]) if i not in aliases))

    def alias_input(partial: Any, xs: Any) -> tuple[Any, ...]:
        computed, given = iter(partial), pytree.tree_leaves(xs)
        return tuple(given[aliases[i]] if i in aliases else next(computed) for i in range(len(kept)))

    def backward(grad_carry: Any, slices: Any) -> Any:
        grad_y, activations = slices
        flowing = [g for g, takes in zip(tree_flatten_none((grad_carry, grad_y))[0], has_gradient, strict=True) if takes]
        if backward_graph is None:
            return pytree.tree_unflatten([torch.zeros_like(t) for t in flat], tree)
        grads = iter(backward_graph(*activations, *flowing))
        return pytree.tree_unflatten([next(grads) for _ in flat], tree)

    return forward, alias_input, backward


@once_differentiable("scan with a partition_fn", fix="for x in xs: carry, y = fn(carry, x)   # a Python loop has all derivatives")
class _Partitioned(torch.autograd.Function):
    """Both scans as a node on autograd's tape."""

    @staticmethod
    def forward(ctx: Any, passes: Passes, carry_tree: Any, xs_tree: Any, num_carry: int, found: Any, *flat: torch.Tensor) -> Any:
        run, alias_input, _ = passes
        init = pytree.tree_unflatten([t.detach() for t in flat[:num_carry]], carry_tree)
        xs = pytree.tree_unflatten(list(flat[num_carry:]), xs_tree)
        carry, (ys, partial) = _scan.scan(run, init, pytree.tree_map(lambda t: t.detach(), xs))
        results, found["unflatten"] = tree_flatten_none((carry, ys))
        ctx.save_for_backward(*alias_input(partial or (), xs))
        ctx.passes, ctx.found = passes, found
        ctx.num_inputs, ctx.num_carry = len(flat), num_carry
        ctx.mark_non_differentiable(*(r for r in results if not r.is_floating_point()))
        return tuple(results)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        flipped = [g.flip(0) for g in grads[ctx.num_carry :]]
        kept = [t.detach().flip(0) for t in ctx.saved_tensors]
        shape = ctx.found["unflatten"]

        def one(carry: Any, slices: Any) -> Any:
            of_ys, activations = slices
            grad_carry, grad_y = shape([*pytree.tree_leaves(carry), *of_ys])
            new, of_x = ctx.passes[2](grad_carry, (grad_y, activations))
            return pytree.tree_leaves(new), pytree.tree_map(lambda g: g, of_x)

        carry, of_xs = _scan.scan(one, list(grads[: ctx.num_carry]), (flipped, kept))
        flat_xs = [None if g is None else g.flip(0) for g in pytree.tree_leaves(of_xs)]
        return (*[None] * 5, *carry, *flat_xs)


def tree_flatten_none(tree: Any) -> tuple[list[Any], Callable[[Sequence[Any]], Any]]:
    """The leaves that are not None, and a function that puts new values in their places."""
    leaves, spec = pytree.tree_flatten(tree)

    def unflatten(values: Sequence[Any]) -> Any:
        rest: Iterator[Any] = iter(values)
        return pytree.tree_unflatten([None if leaf is None else next(rest) for leaf in leaves], spec)

    return [leaf for leaf in leaves if leaf is not None], unflatten


def scan_layers(layers: Any, input_data: Any, partition_fn: Any = default_partition, is_layer_pure: bool = False) -> Any:
    """`torch.nn.Sequential(*layers)(input_data)` for layers of equal structure; see `spmd.scan_layers`, and `scan` for the options.

    Raises:
        ScanError: two layers have different parameters or shapes (a ValueError).
    """
    listed = _scan.modules_of(layers)
    if not listed:
        return input_data
    _require_alike(listed)
    if not is_layer_pure and _is_default(partition_fn):
        return _scan.scan_layers(listed, input_data)
    state = [dict([*layer.named_parameters(), *layer.named_buffers()]) for layer in listed]
    stacked = {name: torch.stack([values[name] for values in state]) for name in state[0]}
    return scan(_one_layer(listed[0], partition_fn, is_layer_pure), input_data, stacked, partition_fn, is_layer_pure)[0]


def _one_layer(layer: nn.Module, partition_fn: Any, is_pure: bool) -> Callable[..., Any]:
    if is_pure and id(partition_fn) in _ONE_LAYER_CACHE.get(layer, {}):
        return _ONE_LAYER_CACHE[layer][id(partition_fn)][1]
    example = _shell(layer)

    def one_layer(carry: Any, values: dict[str, torch.Tensor]) -> tuple[Any, None]:
        return torch.func.functional_call(example, values, carry), None

    if is_pure:
        _ONE_LAYER_CACHE.setdefault(layer, {})[id(partition_fn)] = partition_fn, one_layer
    return one_layer


def _shell(layer: nn.Module) -> nn.Module:
    """A copy of the module without data: every parameter and buffer is a meta tensor of its shape."""
    memo: dict[int, Any] = {}
    for tensor in (*layer.parameters(), *layer.buffers()):
        empty = torch.empty_like(tensor.detach().as_subclass(torch.Tensor), device="meta")
        memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
    return copy.deepcopy(layer, memo)


def _require_alike(layers: Sequence[nn.Module]) -> None:
    first, *others = [{n: tuple(t.shape) for n, t in (*m.named_parameters(), *m.named_buffers())} for m in layers]
    for index, found in enumerate(others, 1):
        if found.keys() != first.keys():
            names = ", ".join(sorted(found.keys() ^ first.keys()))
            fix = "scan layers of equal structure, and call the others separately"
            raise ScanError(message(f"Layer {index} has mismatched keys", f"only in one of them: {names}", fix=fix))
        name = next((n for n in first if first[n] != found[n]), None)
        if name is not None:
            what = f"Shape mismatch for '{name}' in layer {index}"
            raise ScanError(message(what, f"{first[name]} and {found[name]}", fix="scan layers of equal structure"))
