"""Compiled programs read back: collectives, FLOPs, memory. Oracles: the program's own algebra, and XLA run on ones."""

import importlib.util
import json
import linecache
import os
import re
import subprocess
import sys
from collections.abc import Callable
from io import StringIO
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from rich.console import Console

import spmd
from spmd.program.xla._hlo import Collective, CollectiveReport, collectives, flops, instruction_count
from spmd.program.xla._memory_report import MemoryReport, memory

P = PartitionSpec
NAMES, SIZES = ("data", "model"), (4, 2)
ALL, ROWS, COLUMNS = (tuple(range(8)),), ((0, 1), (2, 3), (4, 5), (6, 7)), ((0, 2, 4, 6), (1, 3, 5, 7))
eight_devices = pytest.mark.multidevice(num=8)


@pytest.fixture
def jax_mesh() -> jax.sharding.Mesh:
    return jax.make_mesh(SIZES, NAMES, axis_types=(AxisType.Auto, AxisType.Auto))


def array(mesh: jax.sharding.Mesh | None, shape: tuple[int, ...], *spec: object, dtype: object = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)) if mesh else None)


def compiled_text(fn: Callable[..., object], *args: jax.ShapeDtypeStruct, **options: object) -> str:
    return jax.jit(fn, **options).lower(*args).compile().as_text()


def report_of(fn: Callable[..., object], *args: jax.ShapeDtypeStruct, **options: object) -> CollectiveReport:
    return collectives(compiled_text(fn, *args, **options), NAMES, SIZES)


def megatron(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    return jax.nn.gelu(x @ up) @ down


def megatron_arrays(mesh: jax.sharding.Mesh, *lead: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    x = array(mesh, (32, 16), "data", None)
    unsharded = (None,) * len(lead)
    return x, array(mesh, (*lead, 16, 64), *unsharded, None, "model"), array(mesh, (*lead, 64, 16), *unsharded, "model", None)


MEGATRON_FLOPS = 2 * (2 * 8 * 16 * 32)  # per device: batch 32/4, hidden 64/2, two matmuls


@eight_devices
def test_megatron_forward_is_one_all_reduce_over_model(jax_mesh: jax.sharding.Mesh) -> None:
    report = report_of(megatron, *megatron_arrays(jax_mesh))
    assert report.by_axis() == {("all-reduce", ("model",)): 1}
    (found,) = report
    assert (found.dtype, found.shapes, found.num_bytes, found.groups) == ("f32", ((8, 16),), 8 * 16 * 4, ROWS)
    assert "dot_general" in found.op_name
    file, _, line = found.source.rpartition(":")
    assert "@ down" in linecache.getline(file, int(line))


@eight_devices
def test_data_parallel_gradients_are_reduced_over_data(jax_mesh: jax.sharding.Mesh) -> None:
    x, up, down = megatron_arrays(jax_mesh)
    step = jax.grad(lambda up, down, x: jnp.mean(megatron(x, up, down) ** 2), argnums=(0, 1))
    report = report_of(step, up, down, x)
    assert report.by_axis() == {("all-reduce", ("model",)): 1, ("all-reduce", ("data",)): 1}
    gradients = next(item for item in report if item.axes == ("data",))  # one instruction over a tuple
    assert sorted(gradients.shapes) == [(16, 32), (32, 16)]
    assert gradients.num_bytes == 2 * 16 * 32 * 4
    assert report.num_bytes == 2 * 16 * 32 * 4 + 8 * 16 * 4


@eight_devices
def test_all_gather_counts_the_bytes_of_its_result(jax_mesh: jax.sharding.Mesh) -> None:
    report = report_of(lambda x: x * 2, array(jax_mesh, (32, 16), "data", None), out_shardings=NamedSharding(jax_mesh, P()))
    (found,) = report
    assert (found.kind, found.axes, found.shapes, found.num_bytes) == ("all-gather", ("data",), ((32, 16),), 32 * 16 * 4)


@eight_devices
@pytest.mark.parametrize(
    ("fn", "kind", "axes"),
    [
        (lambda x: lax.psum(x, "model"), "all-reduce", ("model",)),
        (lambda x: lax.psum(x, ("data", "model")), "all-reduce", ("data", "model")),
        (lambda x: lax.psum_scatter(x, "model", tiled=True), "reduce-scatter", ("model",)),
        (lambda x: lax.all_gather(x, "data", tiled=True), "all-gather", ("data",)),
        (lambda x: lax.ppermute(x, "data", [(i, (i + 1) % 4) for i in range(4)]), "collective-permute", ("data",)),
        (lambda x: lax.ppermute(x, "model", [(0, 1)]), "collective-permute", ("model",)),
        (lambda x: lax.all_to_all(x, "data", 1, 0, tiled=True), "all-to-all", ("data",)),
    ],
)
def test_manual_collective_is_found_with_its_axes(jax_mesh: jax.sharding.Mesh, fn: Callable[..., object], kind: str, axes: object) -> None:
    mapped = jax.shard_map(fn, mesh=jax_mesh, in_specs=P("data", "model"), out_specs=P("data", "model"), check_vma=False)
    (found,) = report_of(mapped, array(jax_mesh, (32, 16), "data", "model"))
    num_bytes = 8 * 8 * 4 * (4 if kind == "all-gather" else 1)
    assert (found.kind, found.axes, found.count, found.num_bytes) == (kind, axes, 1, num_bytes)


@eight_devices
@pytest.mark.parametrize("has_note", [True, False], ids=["trip count noted", "trip count from the comparison"])
@pytest.mark.parametrize("num_inner", [1, 5])
def test_loops_multiply_by_their_trip_counts(jax_mesh: jax.sharding.Mesh, num_inner: int, has_note: bool) -> None:
    def layer(x: jax.Array, w: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return lax.fori_loop(0, num_inner, lambda _, x: megatron(x, *w), x), None

    text = compiled_text(lambda x, *w: lax.scan(layer, x, w)[0], *megatron_arrays(jax_mesh, 12))
    assert '"known_trip_count":{"n":"12"}' in text
    text = text if has_note else text.replace("known_trip_count", "forgotten")
    report = collectives(text, NAMES, SIZES)
    assert report.by_axis() == {("all-reduce", ("model",)): 12 * num_inner}
    assert (len(report), report.num_bytes, report.count_is_lower_bound) == (1, 12 * num_inner * 8 * 16 * 4, False)
    assert flops(text) == 12 * num_inner * MEGATRON_FLOPS


@eight_devices
def test_loop_without_a_readable_trip_count_is_a_lower_bound(jax_mesh: jax.sharding.Mesh) -> None:
    loop = jax.shard_map(
        lambda x: lax.while_loop(lambda x: lax.psum(x.sum(), NAMES) > 1, lambda x: x * 0.5, x),
        mesh=jax_mesh,
        in_specs=P("data", "model"),
        out_specs=P("data", "model"),
    )
    report = report_of(loop, array(jax_mesh, (32, 16), "data", "model"))
    assert report.by_axis() == {("all-reduce", ("data", "model")): 1}
    assert report.count_is_lower_bound
    assert ">=1" in str(report)


@eight_devices
def test_every_branch_of_a_conditional_counts(jax_mesh: jax.sharding.Mesh) -> None:
    branch = jax.shard_map(
        lambda p, x: lax.cond(p[0] > 0, lambda x: lax.psum(x, "model"), lambda x: lax.psum(x * 2, "model"), x),
        mesh=jax_mesh,
        in_specs=(P(), P("data", "model")),
        out_specs=P("data"),
    )
    report = report_of(branch, array(jax_mesh, (1,)), array(jax_mesh, (32, 16), "data", "model"))
    assert report.by_axis() == {("all-reduce", ("model",)): 2}


@pytest.mark.parametrize(
    ("left", "right", "expected"),
    [
        ((64, 32), (32, 16), 2 * 64 * 32 * 16),
        ((64, 32), (32,), 2 * 64 * 32),
        ((4, 64, 32), (4, 32, 16), 2 * 4 * 64 * 32 * 16),
        ((512, 512), (512, 512), 2 * 512**3),
    ],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_flops_of_a_matmul_are_exact(left: tuple[int, ...], right: tuple[int, ...], expected: int, dtype: object) -> None:
    assert flops(compiled_text(jnp.matmul, array(None, left, dtype=dtype), array(None, right, dtype=dtype))) == expected


@pytest.mark.parametrize(
    ("image", "kernel", "options"),
    [
        ((8, 3, 16, 16), (8, 3, 3, 3), {"padding": "SAME"}),
        ((2, 3, 17, 16), (8, 3, 3, 5), {"padding": "VALID", "window_strides": (2, 3)}),
        ((2, 8, 16, 16), (16, 2, 3, 3), {"padding": "SAME", "feature_group_count": 4}),
        ((2, 3, 16), (8, 3, 3), {"padding": [(2, 1)], "rhs_dilation": (2,), "window_strides": (1,)}),
        ((2, 3, 16), (8, 3, 4), {"padding": [(2, 2)], "lhs_dilation": (3,), "window_strides": (2,)}),
        ((8, 3, 16, 16), (8, 3, 3, 3), {"padding": "SAME", "batch_group_count": 4}),
    ],
)
def test_flops_of_a_convolution_are_exact(image: tuple[int, ...], kernel: tuple[int, ...], options: dict[str, object]) -> None:
    strides = (1,) * (len(image) - 2)

    def convolve(x: jax.Array, w: jax.Array) -> jax.Array:
        return lax.conv_general_dilated(x, w, **{"window_strides": strides, **options})

    num_products = int(convolve(jnp.ones(image), jnp.ones(kernel)).sum())  # of ones, each product that meets an element adds one
    assert flops(compiled_text(convolve, array(None, image), array(None, kernel))) == 2 * num_products


def test_pointwise_work_is_no_flops() -> None:
    assert flops(compiled_text(lambda x: jnp.tanh(x) * 2, array(None, (64, 64)))) == 0


def program(body: str, before: str = "", shape: str = "f32[8,8]{1,0}") -> str:
    """A compiled program of eight partitions around some instructions."""
    lines = "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())
    return f"""HloModule test, is_scheduled=true, num_partitions=8

%add (x: f32[], y: f32[]) -> f32[] {{
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %sum = f32[] add(%x, %y)
}}
{before}
ENTRY %main (p: f32[8,8]) -> f32[8,8] {{
  %p = {shape} parameter(0), metadata={{op_name="x"}}
{lines}
}}
"""


@pytest.mark.parametrize(
    ("spelling", "axes", "groups"),
    [
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model",), ROWS),
        ("{{0,2,4,6},{1,3,5,7}}", ("data",), COLUMNS),
        ("{{6,0,4,2},{1,7,3,5}}", ("data",), ((6, 0, 4, 2), (1, 7, 3, 5))),
        ("{}", ("data", "model"), ALL),
        ("{{0,1,2,3,4,5,6,7}}", ("data", "model"), ALL),
        ("[4,2]<=[8]", ("model",), ROWS),
        ("[1,8]<=[8]", ("data", "model"), ALL),
        ("[2,4]<=[4,2]T(1,0)", ("data",), COLUMNS),
        ("[4,2]<=[2,2,2]T(1,2,0)", (), ((0, 4), (1, 5), (2, 6), (3, 7))),
        ("[2,4]<=[8]", (), ((0, 1, 2, 3), (4, 5, 6, 7))),
        ("{{0,1},{2,3}}", (), ((0, 1), (2, 3))),
        ("{{0,1,2},{3,4,5,6,7}}", (), ((0, 1, 2), (3, 4, 5, 6, 7))),
        ("mesh['axis_0'=4,'axis_1'=1,'axis_2'=2] {'axis_0'}", ("data",), COLUMNS),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_1'}", ("model",), ROWS),
        ("mesh['axis_0'=4,'axis_1'=2] {'axis_0','axis_1'}", ("data", "model"), ALL),
        ("mesh['axis_0'=8] {'axis_0':(4)2}", ("model",), ROWS),
        ("mesh['axis_0'=8] {'axis_0':(1)2,'axis_0':(2)2}", ("data",), COLUMNS),
        ("mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}", ("data",), COLUMNS),
        ("mesh['a'=2,'b'=4], device_ids=(0,2,4,6,1,3,5,7) {'a'}", ("model",), ROWS),
    ],
)
def test_every_spelling_of_groups_is_read(spelling: str, axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...]) -> None:
    text = program(f"ROOT %r = f32[8,8]{{1,0}} all-reduce(%p), channel_id=1, replica_groups={spelling}, to_apply=%add")
    (found,) = collectives(text, NAMES, SIZES)
    assert (found.axes, found.groups) == (axes, groups)
    (found,) = collectives(text)
    assert (found.axes, found.groups) == ((), groups)


@eight_devices
@pytest.mark.parametrize("order", [("data", "model"), ("model", "data")])
def test_groups_that_jax_prints_for_two_axes_are_read(jax_mesh: jax.sharding.Mesh, order: tuple[str, ...]) -> None:
    x = array(jax_mesh, (32, 16), order)
    report = report_of(lambda x: x * 2, x, out_shardings=NamedSharding(jax_mesh, P()))
    assert report.by_axis() == {("all-gather", ("data", "model")): 1}


@pytest.mark.parametrize(
    ("pairs", "axes"),
    [
        ("{{0,2},{2,0}}", ("data",)),
        ("{{0,1},{3,2}}", ("model",)),
        ("{{0,0},{1,1},{2,4}}", ("data",)),
        ("{{0,3}}", ("data", "model")),
        ("{}", ()),
    ],
)
def test_axes_of_a_permute_are_those_along_which_data_moves(pairs: str, axes: tuple[str, ...]) -> None:
    text = program(f"ROOT %r = f32[8,8]{{1,0}} collective-permute(%p), channel_id=1, source_target_pairs={pairs}")
    (found,) = collectives(text, NAMES, SIZES)
    assert found.axes == axes


ASYNC_WRAPPED = """
%async_computation (a: f32[8,8]) -> f32[4,8] {
  %a = f32[8,8]{1,0} parameter(0)
  ROOT %rs = f32[4,8]{1,0} reduce-scatter(%a), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}, dimensions={0}, to_apply=%add
}
"""
ALL_REDUCE_SCATTER = """
%all-reduce-scatter.1 (input: f32[8,8]) -> f32[2,8] {
  %input = f32[8,8]{1,0} parameter(0)
  %inner = f32[8,8]{1,0} all-reduce(%input), channel_id=5, replica_groups={{0,2,4,6},{1,3,5,7}}, to_apply=%add
  %c = u32[] constant(0)
  ROOT %slice = f32[2,8]{1,0} dynamic-slice(%inner, %c, %c), dynamic_slice_sizes={2,8}
}
"""


FORMS = {
    "all-reduce": """
        %s = f32[8,8]{1,0} all-reduce-start(%p), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
        ROOT %d = f32[8,8]{1,0} all-reduce-done(%s)""",
    "all-gather": """
        %s = (f32[8,8]{1,0}, f32[32,8]{1,0}, u32[], u32[]) all-gather-start(%p), channel_id=1, replica_groups=[2,4]<=[4,2]T(1,0)
        ROOT %d = f32[32,8]{1,0} all-gather-done(%s)""",
    "variadic all-gather": """
        %q = bf16[4]{0} parameter(1)
        %s = ((f32[8,8]{1,0}, bf16[4]{0}), (f32[16,8]{1,0}, bf16[8]{0})) all-gather-start(%p, %q), replica_groups=[4,2]<=[8]
        ROOT %d = (f32[16,8]{1,0}, bf16[8]{0}) all-gather-done(%s)""",
    "permute": """
        %s = (f32[8,8]{1,0}, f32[8,8]{1,0}, u32[]{:S(2)}) collective-permute-start(%p), source_target_pairs={{0,1},{1,0}}
        ROOT %d = f32[8,8]{1,0} collective-permute-done(%s)""",
    "async wrapper": """
        %s = ((f32[8,8]{1,0}), f32[4,8]{1,0}, u32[]) async-start(%p), calls=%async_computation
        %u = ((f32[8,8]{1,0}), f32[4,8]{1,0}, u32[]) async-update(%s), calls=%async_computation
        ROOT %d = f32[4,8]{1,0} async-done(%u), calls=%async_computation""",
    "async sugar": """
        %s = ((f32[8,8]{1,0}), f32[4,8]{1,0}) reduce-scatter-start(%p), replica_groups=[4,2]<=[8], to_apply=%add
        ROOT %d = f32[4,8]{1,0} reduce-scatter-done(%s)""",
    "tpu reduce-scatter": "ROOT %f = f32[2,8]{1,0} fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1",
    "tiled tuple": """
        %q = bf16[8,8]{1,0:T(8,128)(2,1)S(1)} copy(%p)
        %mask = pred[3]{0} parameter(1)
        %bits = s4[3]{0} parameter(2)
        %r = (bf16[8,8]{1,0:T(8,128)(2,1)S(1)}, pred[3]{0}, /*index=2*/s4[3]{0}) all-reduce(%q, %mask, /*index=2*/%bits), to_apply=%add""",
    "ragged": """
        %o = s64[8]{0} parameter(1)
        ROOT %r = f32[8,8]{1,0} ragged-all-to-all(%p, %p, %o, %o, %o, %o), replica_groups={{0,1,2,3,4,5,6,7}}""",
    "broadcast": "ROOT %r = f32[8,8]{1,0} collective-broadcast(%p), channel_id=1, replica_groups={{0,1},{2,3},{4,5},{6,7}}",
}


@pytest.mark.parametrize(
    ("form", "kind", "axes", "dtype", "shapes", "num_bytes"),
    [
        ("all-reduce", "all-reduce", ("model",), "f32", ((8, 8),), 256),
        ("all-gather", "all-gather", ("data",), "f32", ((32, 8),), 1024),
        ("variadic all-gather", "all-gather", ("model",), "f32+bf16", ((16, 8), (8,)), 528),
        ("permute", "collective-permute", ("model",), "f32", ((8, 8),), 256),
        ("async wrapper", "reduce-scatter", ("model",), "f32", ((8, 8),), 256),
        ("async sugar", "reduce-scatter", ("model",), "f32", ((8, 8),), 256),
        ("tpu reduce-scatter", "reduce-scatter", ("data",), "f32", ((8, 8),), 256),
        ("tiled tuple", "all-reduce", ("data", "model"), "bf16+pred+s4", ((8, 8), (3,), (3,)), 128 + 3 + 2),
        ("ragged", "ragged-all-to-all", ("data", "model"), "f32", ((8, 8),), 256),
        ("broadcast", "collective-broadcast", ("model",), "f32", ((8, 8),), 256),
    ],
)
def test_every_form_of_a_collective_is_one(form: str, kind: str, axes: object, dtype: str, shapes: object, num_bytes: int) -> None:
    (found,) = collectives(program(FORMS[form], ASYNC_WRAPPED + ALL_REDUCE_SCATTER), NAMES, SIZES)
    assert (found.kind, found.axes, found.dtype, found.shapes, found.num_bytes) == (kind, axes, dtype, shapes, num_bytes)
    assert found.count == 1


def test_op_name_comes_from_the_fusion_where_the_collective_has_none() -> None:
    call = 'fusion(%p), kind=kCustom, calls=%all-reduce-scatter.1, metadata={op_name="jit(f)/transpose(jvp())/dot_general"}'
    (found,) = collectives(program(f"ROOT %f = f32[2,8]{{1,0}} {call}", ALL_REDUCE_SCATTER), NAMES, SIZES)
    assert found.op_name == "jit(f)/transpose(jvp())/dot_general"


def test_chain_of_fusions_around_one_tpu_collective_counts_once() -> None:
    gather = (
        'all-gather(%a{0}), channel_id=9, replica_groups=[4,2]<=[8], dimensions={{0}}, frontend_attributes={{chain_id="0"}}, '
        'backend_config={{"async_collective_fusion_config":{{"flag_start":"2"}}}}'
    )
    before = "".join(
        f"""
%part.{index} (a{index}: f32[8,8]) -> f32[16,8] {{
  %a{index} = f32[8,8]{{1,0}} parameter(0)
  %ag.{index} = f32[16,8]{{1,0}} {gather.format(index)}
  ROOT %call.{index} = f32[16,8]{{1,0}} custom-call(%ag.{index}), custom_call_target="AsyncCollective{suffix}"
}}
"""
        for index, suffix in enumerate(("Start", "Step", "Done"))
    )
    calls = "\n".join(f"%f{index} = f32[16,8]{{1,0}} fusion(%p), kind=kCustom, calls=%part.{index}" for index in range(3))
    assert collectives(program(calls, before), NAMES, SIZES).by_axis() == {("all-gather", ("model",)): 1}
    alone = program(calls, before.replace("AsyncCollectiveStart", "Other"))
    assert collectives(alone, NAMES, SIZES).by_axis() == {("all-gather", ("model",)): 3}


def test_computation_called_twice_counts_twice() -> None:
    calls = "%c0 = f32[4,8]{1,0} call(%p), to_apply=%async_computation\nROOT %c1 = f32[4,8]{1,0} call(%p), to_apply=%async_computation"
    (found,) = collectives(program(calls, ASYNC_WRAPPED), NAMES, SIZES)
    assert found.count == 2


LOOP = """
%body (state: (s32[], f32[8,8])) -> (s32[], f32[8,8]) {{
  %state = (s32[], f32[8,8]{{1,0}}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %v = f32[8,8]{{1,0}} get-tuple-element(%state), index=1
  %step = s32[] constant({step})
  %next = s32[] {operation}(%i, %step)
  %r = f32[8,8]{{1,0}} all-reduce(%v), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %out = (s32[], f32[8,8]{{1,0}}) tuple(%next, %r)
}}

%condition (state.1: (s32[], f32[8,8])) -> pred[] {{
  %state.1 = (s32[], f32[8,8]{{1,0}}) parameter(0)
  %j = s32[] get-tuple-element(%state.1), index=0
  %bound = s32[] constant({bound})
  ROOT %compare = pred[] compare({compared}), direction={direction}
}}
"""


@pytest.mark.parametrize(
    ("start", "operation", "step", "direction", "bound", "trips"),
    [
        (0, "add", 1, "LT", 12, 12),
        (2, "add", 1, "LT", 12, 10),
        (0, "add", 5, "LT", 12, 3),
        (0, "add", 4, "LE", 12, 4),
        (11, "add", -1, "GE", 0, 12),
        (12, "subtract", 3, "GT", 0, 4),
        (20, "add", 1, "LT", 12, 0),
        (0, "add", -1, "LT", 12, None),
        (0, "multiply", 2, "LT", 12, None),
        (0, "add", 1, "NE", 12, None),
    ],
)
@pytest.mark.parametrize("is_swapped", [False, True])
def test_trip_count_is_read_from_the_comparison(
    start: int, operation: str, step: int, direction: str, bound: int, trips: int | None, is_swapped: bool
) -> None:
    compared = "%bound, %j" if is_swapped else "%j, %bound"
    direction = direction.translate(str.maketrans("LG", "GL")) if is_swapped else direction
    before = LOOP.format(step=step, operation=operation, bound=bound, compared=compared, direction=direction)
    body = f"""%start = s32[] constant({start})
    %copied = s32[] copy(%start)
    %init = (s32[], f32[8,8]{{1,0}}) tuple(%copied, %p)
    ROOT %loop = (s32[], f32[8,8]{{1,0}}) while(%init), condition=%condition, body=%body"""
    (found,) = collectives(program(body, before), NAMES, SIZES)
    assert (found.count, found.count_is_lower_bound) == (1 if trips is None else trips, trips is None)


WORDS = """
%body (state: (u32[], u32[], f32[8,8])) -> (u32[], u32[], f32[8,8]) {
  %state = (u32[], u32[], f32[8,8]{1,0}) parameter(0)
  %low = u32[] get-tuple-element(%state), index=0
  %high = u32[] get-tuple-element(%state), index=1
  %v = f32[8,8]{1,0} get-tuple-element(%state), index=2
  %one = u32[] constant(1)
  %next = u32[] add(%low, %one)
  %r = f32[8,8]{1,0} all-reduce(%v), channel_id=1, replica_groups=[4,2]<=[8], to_apply=%add
  ROOT %out = (u32[], u32[], f32[8,8]{1,0}) tuple(%next, %high, %r)
}

%condition (state.1: (u32[], u32[], f32[8,8])) -> pred[] {
  %state.1 = (u32[], u32[], f32[8,8]{1,0}) parameter(0)
  %j = u32[] get-tuple-element(%state.1), index=0
  %k = u32[] get-tuple-element(%state.1), index=1
  %none = u32[] constant(0)
  %bound = u32[] constant(12)
  %sign = s32[] bitcast-convert(%k)
  %zero = s32[] constant(0)
  %is_high = pred[] compare(%k, %none), direction=EQ
  %is_low = pred[] compare(%j, %bound), direction=LT
  %both = pred[] and(%is_high, %is_low)
  %is_negative = pred[] compare(%sign, %zero), direction=LT
  ROOT %compare = pred[] or(%is_negative, %both)
}
"""


def test_trip_count_of_a_64_bit_counter_in_two_words() -> None:
    """As XLA:TPU writes it."""
    body = """%start = u32[] constant(0)
    %init = (u32[], u32[], f32[8,8]{1,0}) tuple(%start, %start, %p)
    ROOT %loop = (u32[], u32[], f32[8,8]{1,0}) while(%init), condition=%condition, body=%body"""
    (found,) = collectives(program(body, WORDS), NAMES, SIZES)
    assert (found.count, found.count_is_lower_bound) == (12, False)


@pytest.mark.parametrize(
    ("shapes", "call", "expected"),
    [
        (("f32[4,6]", "f32[6,10]", "f32[4,10]"), 'custom_call_target="__onednn$matmul"', 2 * 4 * 6 * 10),
        (("f32[3,4,6]", "f32[3,6,10]", "f32[3,4,10]"), 'custom_call_target="__onednn$matmul"', 2 * 3 * 4 * 6 * 10),
        (("f32[3,4,6]", "f32[6,10]", "f32[3,4,10]"), 'custom_call_target="__onednn$matmul"', 2 * 3 * 4 * 6 * 10),
        (
            ("f32[3,6]", "f32[3,6,10]", "(f32[3,10], s8[4096])"),
            'custom_call_target="__cublas$gemm", backend_config={"gemm_backend_config":{"lhs_contracting_dimensions":["1"]}}',
            2 * 3 * 6 * 10,
        ),
        (("f32[4,6]", "f32[6,10]", "f32[4,10]"), 'custom_call_target="Sharding"', 0),
    ],
)
def test_matmuls_of_libraries_are_counted(shapes: tuple[str, str, str], call: str, expected: int) -> None:
    left, right, result = shapes
    text = program(f"%q = {right} parameter(1)\nROOT %r = {result} custom-call(%p, %q), {call}", shape=left)
    assert flops(text) == expected


def test_instruction_count_counts_every_computation() -> None:
    assert instruction_count(program("ROOT %n = f32[8,8]{1,0} negate(%p)")) == 3 + 2


@eight_devices
def test_memory_is_per_device_and_donation_is_an_alias(jax_mesh: jax.sharding.Mesh) -> None:
    x = array(jax_mesh, (32, 16), "data", "model")
    compiled = jax.jit(lambda x: x + 1, donate_argnums=0).lower(x).compile()
    report = memory(compiled)
    assert (report.argument_bytes, report.output_bytes, report.alias_bytes) == (256, 256, 256)
    assert report.peak_bytes == compiled.memory_analysis().peak_memory_in_bytes >= 256


def analysed(**more: int) -> SimpleNamespace:
    """What a compiler may say of a program on a device that is no CPU."""
    sizes = {"argument": 100, "output": 40, "temp": 7, "alias": 30, "generated_code": 1}
    analysis = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()}, **more)
    return SimpleNamespace(memory_analysis=lambda: analysis, input_shardings=(), output_shardings=())


def test_peak_falls_back_to_the_sum_of_the_parts() -> None:
    assert memory(analysed()).peak_bytes == 117
    assert memory(analysed(peak_memory_in_bytes=112)).peak_bytes == 112
    with pytest.raises(ValueError, match="gives no memory analysis"):
        memory(SimpleNamespace(memory_analysis=lambda: None))


def test_memory_is_shown_with_units() -> None:
    assert str(MemoryReport(3 << 20, 1536, 0, 512, 1, 3 << 30)).splitlines() == [
        "3 GiB of memory on each device, at the peak:",
        "       3 MiB  arguments: state and batch",
        "     1.5 KiB  outputs (512 B in donated arguments)",
        "         0 B  temporaries",
        "         1 B  the program itself",
    ]


def example_report() -> CollectiveReport:
    ring = ((0, 1), (1, 0))
    return CollectiveReport(
        (
            Collective("all-reduce", ("model",), 12, 1024, "bf16", ((16, 32),), ROWS),
            Collective("all-reduce", ("model",), 12, 2048, "bf16", ((32, 32),), ROWS),
            Collective("all-gather", ("data",), 1, 3 * 2**20, "f32", ((1024, 768),), COLUMNS, "jit(f)/dot", "model.py:12"),
            Collective("collective-permute", (), 2, 100, "f32", ((25,),), ring, count_is_lower_bound=True),
        )
    )


def test_report_is_a_value() -> None:
    report = example_report()
    assert report == example_report()
    assert report != CollectiveReport(report.collectives[1:])
    assert (len(report), [item.count for item in report]) == (4, [12, 12, 1, 2])
    assert report.counts() == {"all-reduce": 24, "all-gather": 1, "collective-permute": 2}
    assert report.by_axis() == {("all-reduce", ("model",)): 24, ("all-gather", ("data",)): 1, ("collective-permute", ()): 2}
    assert report.num_bytes == 12 * 3072 + 3 * 2**20 + 200
    with pytest.raises(AttributeError):
        report.collectives = ()


def test_report_prints_one_line_per_kind_axes_and_dtype() -> None:
    assert str(example_report()).splitlines() == [
        "kind                axes        dtype  count      bytes",
        "all-gather          data        f32        1      3 MiB",
        "all-reduce          model       bf16      24     36 KiB",
        "collective-permute  (2 groups)  f32      >=2      200 B",
        "total                                   >=27  3.035 MiB",
    ]


def test_rich_table_holds_the_same_cells() -> None:
    console = Console(width=100, file=StringIO())
    console.print(example_report())
    for cell in re.split(r"\s{2,}", str(example_report()).replace("\n", "  ")):
        assert cell in console.file.getvalue()


def test_report_survives_json() -> None:
    data = json.loads(json.dumps(example_report().to_dict()))
    assert data["counts"] == example_report().counts()
    assert data["collectives"][2]["source"] == "model.py:12"
    assert [item["groups"] for item in data["collectives"]] == [[], [], [], [[0, 1], [1, 0]]]


def test_text_that_is_no_compiled_program_is_refused() -> None:
    lowered = jax.jit(lambda x: x + 1).lower(array(None, (2,))).as_text()
    for read in (collectives, flops, instruction_count):
        with pytest.raises(
            ValueError, match=r"not the text of a compiled program(.|\n)*module @jit(.|\n)*fix: pass .*compile\(\)\.as_text\(\)"
        ):
            read(lowered)


def test_axis_names_without_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"differ in length\n.*1 names \('data',\), 0 sizes \(\)\n.*fix"):
        collectives(program(""), ("data",))


TPU_PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

devices = topologies.get_topology_desc("v5e:2x4", platform="tpu").devices
mesh = Mesh(np.array(devices).reshape(4, 2), ("data", "model"))

def array(shape, *spec):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec)))

def layer(x, w):
    return lax.fori_loop(0, 3, lambda _, x: jax.nn.gelu(x @ w[0]) @ w[1], x), None

w = array((5, 512, 2048), None, None, "model"), array((5, 2048, 512), None, "model", None)
step = jax.jit(lambda x, w: lax.scan(layer, x, w)[0])
print(step.lower(array((1024, 512), "data", None), w).compile().as_text())
"""


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu, the XLA:TPU compiler, is not installed")
def test_tpu_program_compiled_ahead_of_time_is_read_alike() -> None:
    environment = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "TPU_ACCELERATOR_TYPE": "v5litepod-4"}
    environment |= {"TPU_WORKER_HOSTNAMES": "localhost", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    command, environment = [sys.executable, "-c", TPU_PROGRAM], os.environ | environment
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = collectives(done.stdout, NAMES, SIZES)
    assert report.by_axis() == {("all-reduce", ("model",)): 15}
    assert report.num_bytes == 15 * np.prod((256, 512)) * 2
    assert not report.count_is_lower_bound
    assert flops(done.stdout) == 15 * 2 * (2 * 256 * 512 * 1024)


def test_the_peak_on_a_cpu_has_temporaries_and_is_that_of_jax_by_hand() -> None:
    """XLA:CPU's `peak_memory_in_bytes` leaves out what the program allocates for the whole call."""

    def three_products(w, x, tanh):  # type: ignore[no-untyped-def]
        first = tanh(x @ w)
        second = tanh(first @ w)
        return (first @ second.T) @ second

    w, x = torch.ones(200, 200, device="jax"), torch.ones(1000, 200, device="jax")
    ours = spmd.compile(lambda w, x: three_products(w, x, torch.tanh)).program(w, x).memory()
    compiled = jax.jit(lambda w, x: three_products(w, x, jnp.tanh)).lower(jnp.ones((200, 200)), jnp.ones((1000, 200))).compile()
    theirs = compiled.memory_analysis()
    assert theirs.temp_size_in_bytes >= 4 * 1000 * 1000  # first @ second.T
    in_all = theirs.argument_size_in_bytes + theirs.output_size_in_bytes + theirs.temp_size_in_bytes - theirs.alias_size_in_bytes
    assert memory(compiled).peak_bytes == in_all > theirs.peak_memory_in_bytes
    assert ours.peak_bytes == pytest.approx(in_all, rel=0.01)
