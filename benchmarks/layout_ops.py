"""The operations for trials with random layouts. Each draws its sizes and creates its inputs and the function to compare."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

FLOATS = ("float32", "float64", "bfloat16")
EXACT = ("float32", "float64")  # decompositions and transforms, which torch does not support in narrower dtypes
NUMBERS = (*FLOATS, "int64", "int32")
SIZES = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)


class Draw:
    """The random choices of one trial, and random CPU tensors."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = torch.float32

    def one(self, *choices: Any) -> Any:
        return self.rng.choice(choices)

    def size(self, low: int = 1) -> int:
        return self.rng.choice([n for n in SIZES if n >= low])

    def shape(self, rank: int, low: int = 1) -> tuple[int, ...]:
        return tuple(self.size(low) for _ in range(rank))

    def dim(self, rank: int) -> int:
        return self.rng.randrange(-rank, rank)

    def normal(self, *shape: int) -> torch.Tensor:
        """Normally distributed numbers, or small integers for an integer dtype."""
        if not self.dtype.is_floating_point:
            return torch.randint(-9, 10, shape, generator=self.generator).to(self.dtype)
        return torch.randn(shape, generator=self.generator, dtype=torch.float64).to(self.dtype)

    def positive(self, *shape: int) -> torch.Tensor:
        return self.normal(*shape).abs() + (1 if not self.dtype.is_floating_point else 0.5)

    def distinct(self, *shape: int) -> torch.Tensor:
        """Distinct numbers, so that their order is unique. bfloat16 has only 256 distinct ones in this range; more use float32."""
        count = torch.Size(shape).numel()
        if count > 256 and self.dtype == torch.bfloat16:
            self.dtype = torch.float32
        return (torch.randperm(count, generator=self.generator).reshape(shape) - count // 2).to(self.dtype)

    def indices(self, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=self.generator)

    def mask(self, *shape: int) -> torch.Tensor:
        return torch.rand(shape, generator=self.generator) < 0.5

    def regular(self, *batch: int, size: int) -> torch.Tensor:
        """Random matrices that are far from singular."""
        return self.normal(*batch, size, size) + 2 * size * torch.eye(size, dtype=self.dtype)

    def definite(self, *batch: int, size: int) -> torch.Tensor:
        a = self.normal(*batch, size, size)
        return a @ a.mT + size * torch.eye(size, dtype=self.dtype)


@dataclass
class Case:
    """The computation of one trial: `fn(*inputs)` returns one or several tensors."""

    fn: Callable[..., Any]
    inputs: list[torch.Tensor]


@dataclass(frozen=True)
class Op:
    """One operation.

    Attributes:
        make: draws a case.
        dtypes: names of the dtypes that it supports.
        has_gradient: whether it is differentiable.
        is_compilable: False if the shape of its result depends on values.
    """

    name: str
    make: Callable[[Draw], Case]
    dtypes: tuple[str, ...]
    has_gradient: bool
    is_compilable: bool


OPS: dict[str, Op] = {}


def op(
    dtypes: tuple[str, ...] = FLOATS, gradient: bool = True, compilable: bool = True
) -> Callable[[Callable[[Draw], Case]], Callable[[Draw], Case]]:
    """Register the decorated function in `OPS` under its name."""

    def enter(make: Callable[[Draw], Case]) -> Callable[[Draw], Case]:
        name = make.__name__.strip("_")
        OPS[name] = Op(name, make, dtypes, gradient, compilable)
        return make

    return enter


def _convolution(d: Draw, rank: int, transposed: bool) -> Case:
    groups, stride, dilation = d.one(1, 1, 2), d.one(1, 1, 2, 3), d.one(1, 1, 2)
    kernel = [d.one(1, 2, 3, 4, 5, 8) if rank < 3 else d.one(1, 2, 3) for _ in range(rank)]
    given, made = groups * d.one(1, 2, 3, 4, 8), groups * d.one(1, 2, 3, 4, 8)
    sizes = [
        max(d.one(8, 9, 12, 16, 17), dilation * (k - 1) + 1) if rank < 3 else max(d.one(4, 6, 8), dilation * (k - 1) + 1) for k in kernel
    ]
    x = d.normal(d.one(1, 2, 4, 5, 8), given, *sizes)
    name = f"conv_transpose{rank}d" if transposed else f"conv{rank}d"
    weight = d.normal(given, made // groups, *kernel) if transposed else d.normal(made, given // groups, *kernel)
    options = {"stride": stride, "padding": d.one(0, 1, 2), "dilation": dilation, "groups": groups}
    if transposed and stride > 1:
        options["output_padding"] = d.one(0, 1)
    return Case(lambda x, w, b: getattr(F, name)(x, w, b, **options), [x, weight, d.normal(made)])


for _rank in (1, 2, 3):
    for _name, _transposed in ((f"conv{_rank}d", False), (f"conv_transpose{_rank}d", True)):
        OPS[_name] = Op(_name, lambda d, r=_rank, t=_transposed: _convolution(d, r, t), FLOATS, True, True)


@op()
def unfold(d: Draw) -> Case:
    k, stride = d.one(1, 2, 3), d.one(1, 2)
    return Case(lambda x: F.unfold(x, k, padding=1, stride=stride), [d.normal(d.size(), d.size(), *d.shape(2, 4))])


@op()
def fold(d: Draw) -> Case:
    height, width = d.shape(2, 4)
    columns = (height - 1) * (width - 1)
    return Case(lambda x: F.fold(x, (height, width), 2), [d.normal(d.size(), 4 * d.size(), columns)])


@op()
def tensor_unfold(d: Draw) -> Case:
    x, dim = d.normal(*d.shape(3, 4)), d.dim(3)
    size, step = d.one(1, 2, 3), d.one(1, 2, 3)
    return Case(lambda x: x.unfold(dim, size, step), [x])


@op()
def max_pool2d(d: Draw) -> Case:
    k, s, p = d.one(2, 3), d.one(1, 2, 3), d.one(0, 1)
    return Case(lambda x: F.max_pool2d(x, k, s, p, return_indices=True), [d.distinct(d.one(1, 2, 4), d.one(1, 2, 4), *d.shape(2, 5))])


@op()
def max_pool1d_dilated(d: Draw) -> Case:
    return Case(lambda x: F.max_pool1d(x, 3, 2, 1, dilation=2), [d.distinct(d.size(), d.one(1, 2, 4), d.size(7))])


@op()
def avg_pool2d(d: Draw) -> Case:
    k, s, p, whole = d.one(2, 3, 4), d.one(1, 2, 3), d.one(0, 1), d.one(True, False)
    return Case(lambda x: F.avg_pool2d(x, k, s, p, ceil_mode=whole), [d.normal(d.size(), d.size(), *d.shape(2, 5))])


@op(EXACT)
def avg_pool3d(d: Draw) -> Case:
    return Case(lambda x: F.avg_pool3d(x, 2, 2), [d.normal(d.size(), d.one(1, 3, 8), *d.shape(3, 4))])


@op()
def adaptive_avg_pool2d(d: Draw) -> Case:
    out = (d.one(1, 2, 3), d.one(1, 2, 5))
    return Case(lambda x: F.adaptive_avg_pool2d(x, out), [d.normal(d.size(), d.size(), *d.shape(2, 5))])


@op()
def adaptive_max_pool2d(d: Draw) -> Case:
    out = (d.one(1, 2, 3), d.one(1, 2, 5))
    return Case(lambda x: F.adaptive_max_pool2d(x, out), [d.distinct(d.one(1, 2, 4), d.one(1, 2, 4), *d.shape(2, 5))])


@op()
def lp_pool2d(d: Draw) -> Case:
    return Case(lambda x: F.lp_pool2d(x, 3, 2), [d.positive(d.size(), d.size(), *d.shape(2, 5))])


@op(EXACT)
def interpolate(d: Draw) -> Case:
    mode, size = d.one("nearest", "bilinear", "bicubic", "area"), d.shape(2)
    return Case(lambda x: F.interpolate(x, size, mode=mode), [d.normal(d.size(), d.size(), *d.shape(2, 2))])


@op(EXACT)
def grid_sample(d: Draw) -> Case:
    n, mode = d.size(), d.one("bilinear", "nearest")
    return Case(
        lambda x, g: F.grid_sample(x, torch.tanh(g), mode=mode, align_corners=False),
        [d.normal(n, d.size(), *d.shape(2, 2)), d.normal(n, *d.shape(2), 2)],
    )


@op()
def pixel_shuffle(d: Draw) -> Case:
    return Case(lambda x: F.pixel_shuffle(x, 2), [d.normal(d.size(), 4 * d.one(1, 2, 3, 4), *d.shape(2))])


@op()
def pad(d: Draw) -> Case:
    mode = d.one("constant", "reflect", "replicate", "circular")
    amounts = [d.one(0, 1, 2) for _ in range(4)]
    return Case(lambda x: F.pad(x, amounts, mode=mode), [d.normal(d.size(), d.size(), *d.shape(2, 3))])


@op(EXACT)
def fft(d: Draw) -> Case:
    name, x = d.one("fft", "ifft", "rfft", "hfft", "ihfft"), d.normal(*d.shape(3, 2))
    dim, norm = d.dim(3), d.one("ortho", "forward", "backward")
    return Case(lambda x: _as_real(getattr(torch.fft, name)(x, dim=dim, norm=norm)), [x])


@op(EXACT)
def irfft(d: Draw) -> Case:
    dim = d.dim(3)
    return Case(lambda a, b: torch.fft.irfft(torch.complex(a, b), dim=dim), [d.normal(*(s := d.shape(3, 3))), d.normal(*s)])


@op(EXACT)
def fft2(d: Draw) -> Case:
    name, dims = d.one("fft2", "rfft2", "ifft2"), d.one((-2, -1), (0, 2), (1, 0), (0, 1))
    return Case(lambda x: _as_real(getattr(torch.fft, name)(x, dim=dims)), [d.normal(*d.shape(3, 2))])


@op(EXACT)
def stft(d: Draw) -> Case:
    return Case(lambda x: _as_real(torch.stft(x, 8, 3, window=torch.ones(8, device=x.device, dtype=x.dtype), return_complex=True)),
                [d.normal(d.size(), d.one(16, 24, 33))])  # fmt: skip


def _as_real(x: torch.Tensor) -> torch.Tensor:
    return torch.view_as_real(x.resolve_conj()) if x.is_complex() else x


@op(NUMBERS)
def cumsum(d: Draw) -> Case:
    name, dim = d.one("cumsum", "cumprod"), d.dim(3)
    return Case(lambda x: getattr(torch, name)(x, dim), [d.positive(*d.shape(3))])


@op()
def cummax(d: Draw) -> Case:
    name, dim = d.one("cummax", "cummin", "logcumsumexp"), d.dim(3)
    return Case(lambda x: getattr(torch, name)(x, dim), [d.distinct(*d.shape(2), d.one(3, 4)) / 16])


@op(NUMBERS)
def sort(d: Draw) -> Case:
    dim, falling = d.dim(2), d.one(True, False)
    return Case(lambda x: torch.sort(x, dim, falling), [d.distinct(*d.shape(2))])


@op(NUMBERS)
def topk(d: Draw) -> Case:
    k, dim, largest = d.one(1, 2, 3), d.dim(2), d.one(True, False)
    return Case(lambda x: torch.topk(x, k, dim, largest), [d.distinct(*d.shape(2, 3))])


@op(NUMBERS)
def kthvalue(d: Draw) -> Case:
    name, dim = d.one("kthvalue", "median"), d.dim(2)
    args = (1, dim) if name == "kthvalue" else (dim,)
    return Case(lambda x: getattr(torch, name)(x, *args), [d.distinct(*d.shape(2))])


@op(NUMBERS, gradient=False)
def argmax(d: Draw) -> Case:
    name, dim = d.one("argmax", "argmin", "argsort"), d.dim(3)
    return Case(lambda x: getattr(torch, name)(x, dim), [d.distinct(*d.shape(3))])


@op(EXACT)
def quantile(d: Draw) -> Case:
    dim = d.dim(2)
    return Case(lambda x: torch.quantile(x, 0.3, dim), [d.distinct(*d.shape(2))])


@op(("int64", "int32"), gradient=False)
def searchsorted(d: Draw) -> Case:
    return Case(lambda s, x: torch.searchsorted(torch.sort(s).values, x), [d.distinct(d.size()), d.normal(*d.shape(2))])


@op(("int64",), gradient=False)
def bincount(d: Draw) -> Case:
    return Case(lambda x: torch.bincount(x.abs(), minlength=12), [d.normal(d.size())])


@op(("int64", "int32", "float32"), gradient=False, compilable=False)
def unique(d: Draw) -> Case:
    return Case(lambda x: torch.unique(x.round(), return_inverse=True, return_counts=True), [d.normal(*d.shape(2))])


@op(NUMBERS, gradient=False, compilable=False)
def nonzero(d: Draw) -> Case:
    return Case(lambda x: (torch.nonzero(x > 0), x[x > 0]), [d.normal(*d.shape(2))])


@op(NUMBERS)
def gather(d: Draw) -> Case:
    shape, dim = d.shape(2), d.one(0, 1)
    return Case(lambda x, i: x.gather(dim, i), [d.normal(*shape), d.indices(shape[dim], *[d.one(n, max(n // 2, 1)) for n in shape])])


@op(NUMBERS)
def scatter_add(d: Draw) -> Case:
    shape, dim, name = d.shape(2), d.one(0, 1), d.one("scatter_add", "sum", "amax", "mean")
    index = d.indices(shape[dim], *shape)

    def fn(x: Any, i: Any, s: Any) -> Any:
        return x.scatter_add(dim, i, s) if name == "scatter_add" else x.scatter_reduce(dim, i, s, name)

    return Case(fn, [d.normal(*shape), index, d.normal(*shape)])


@op(NUMBERS)
def scatter(d: Draw) -> Case:
    shape, dim = d.shape(2), d.one(0, 1)
    index = torch.argsort(
        torch.rand(shape, generator=d.generator), dim
    )  # each element is written once: with duplicates the result is undefined
    return Case(lambda x, i, s: x.scatter(dim, i, s), [d.normal(*shape), index, d.normal(*shape)])


@op(NUMBERS)
def index_select(d: Draw) -> Case:
    shape, dim = d.shape(3), d.one(0, 1, 2)
    return Case(lambda x, i: x.index_select(dim, i), [d.normal(*shape), d.indices(shape[dim], d.size())])


@op(NUMBERS)
def index_add(d: Draw) -> Case:
    shape, dim = list(d.shape(3)), d.one(0, 1, 2)
    source = [*shape[:dim], d.size(), *shape[dim + 1 :]]
    return Case(lambda x, i, s: x.index_add(dim, i, s), [d.normal(*shape), d.indices(shape[dim], source[dim]), d.normal(*source)])


@op(NUMBERS)
def indexed(d: Draw) -> Case:
    a, b, c = d.shape(3)
    i, j, n = d.indices(a, n := d.size()), d.indices(b, n), n
    kind = d.one("x[i]", "x[i,j]", "x[:,j]", "x[i,:,1::2]", "x[None,i]")
    forms: dict[str, Callable[..., Any]] = {
        "x[i]": lambda x, i, j: x[i],
        "x[i,j]": lambda x, i, j: x[i, j],
        "x[:,j]": lambda x, i, j: x[:, j],
        "x[i,:,1::2]": lambda x, i, j: x[i, :, 1::2],
        "x[None,i]": lambda x, i, j: x[None, i],
    }
    return Case(forms[kind], [d.normal(a, b, c), i, j])


@op(NUMBERS)
def index_put(d: Draw) -> Case:
    a, b, c, n = d.shape(4)
    return Case(
        lambda x, i, j, v: x.index_put((i, j), v, accumulate=True), [d.normal(a, b, c), d.indices(a, n), d.indices(b, n), d.normal(n, c)]
    )


@op(NUMBERS)
def masked(d: Draw) -> Case:
    shape = d.shape(3)
    return Case(lambda x, m, y: torch.where(m, x, y) + x.masked_fill(m, 2), [d.normal(*shape), d.mask(*shape), d.normal(*shape)])


@op(FLOATS)
def embedding(d: Draw) -> Case:
    rows = d.size(3)
    padding = d.one(None, 0, 2)
    return Case(lambda w, i: F.embedding(i, w, padding_idx=padding), [d.normal(rows, d.size()), d.indices(rows, *d.shape(2))])


@op(EXACT)
def embedding_bag(d: Draw) -> Case:
    rows, mode = d.size(3), d.one("sum", "mean", "max")
    return Case(lambda w, i: F.embedding_bag(i, w, mode=mode), [d.normal(rows, d.size()), d.indices(rows, *d.shape(2))])


@op()
def layer_norm(d: Draw) -> Case:
    n = d.size(2)
    return Case(lambda x, w, b: F.layer_norm(x, (n,), w, b), [d.normal(*d.shape(2), n), d.normal(n), d.normal(n)])


@op()
def group_norm(d: Draw) -> Case:
    groups, each = d.one(1, 2, 4), d.one(1, 2, 3)
    c = groups * each
    return Case(lambda x, w, b: F.group_norm(x, groups, w, b), [d.normal(d.size(), c, d.size(3), d.size(2)), d.normal(c), d.normal(c)])


@op(EXACT)
def batch_norm(d: Draw) -> Case:
    c, training = d.size(), d.one(True, False)

    def fn(x: Any, w: Any, b: Any, mean: Any, var: Any) -> Any:
        mean, var = mean.detach().clone(), var.detach().clone()
        return F.batch_norm(x, mean, var, w, b, training=training), mean, var

    return Case(fn, [d.normal(d.size(2), c, d.size(2), d.size()), d.normal(c), d.normal(c), d.normal(c), d.positive(c)])


@op()
def instance_norm(d: Draw) -> Case:
    return Case(F.instance_norm, [d.normal(d.size(), d.size(), d.size(3), d.size(3))])


@op()
def rms_norm(d: Draw) -> Case:
    n = d.size(2)
    return Case(lambda x, w: F.normalize(F.rms_norm(x, (n,), w), dim=0), [d.normal(*d.shape(2), n), d.normal(n)])


@op(EXACT)
def local_response_norm(d: Draw) -> Case:
    return Case(lambda x: F.local_response_norm(x, 3), [d.normal(d.size(), d.size(2), d.size(), d.size())])


@op()
def attention(d: Draw) -> Case:
    b, h, t, s, w = d.one(1, 2, 3, 4, 8), d.one(1, 2, 4, 6, 8), d.size(), d.size(), d.one(2, 4, 8)
    causal = d.one(True, False)
    s = t if causal else s
    return Case(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=causal),
        [d.normal(b, h, t, w), d.normal(b, h, s, w), d.normal(b, h, s, w)],
    )


@op()
def matmul(d: Draw) -> Case:
    b, m, k, n = d.shape(4)
    return Case(torch.matmul, [d.normal(b, m, k), d.normal(*d.one((k, n), (b, k, n), (1, k, n), (k,)))])


@op()
def linear(d: Draw) -> Case:
    m, n = d.shape(2)
    return Case(F.linear, [d.normal(*d.shape(2), m), d.normal(n, m), d.normal(n)])


@op()
def einsum(d: Draw) -> Case:
    a, b, c, e = d.shape(4)
    kind = d.one("abc,ce->abe", "abc,abe->ce", "abc,abe->ace", "abc,abe->bce", "abc,eba->ce", "abc,abe->e")
    second = {"abc,ce->abe": (c, e), "abc,eba->ce": (e, b, a)}.get(kind, (a, b, e))
    return Case(lambda x, y: torch.einsum(kind, x, y), [d.normal(a, b, c), d.normal(*second)])


@op(EXACT)
def cdist(d: Draw) -> Case:
    b, m, n, k = d.shape(4)
    p = d.one(1.0, 2.0, 3.0)
    return Case(lambda x, y: torch.cdist(x, y, p=p), [d.normal(b, m, k), d.normal(b, n, k)])


@op()
def bilinear(d: Draw) -> Case:
    n, i, j, o = d.shape(4)
    return Case(F.bilinear, [d.normal(n, i), d.normal(n, j), d.normal(o, i, j)])


@op()
def cross_entropy(d: Draw) -> Case:
    n, c = d.size(), d.size(2)
    smooth, reduction, rest = d.one(0.0, 0.1), d.one("mean", "sum", "none"), d.one((), (3,), (4, 2))
    ignored = d.one(-100, 1)
    return Case(
        lambda x, y: F.cross_entropy(x, y, label_smoothing=smooth, reduction=reduction, ignore_index=ignored),
        [d.normal(n, c, *rest), d.indices(c, n, *rest).clamp(max=0 if c == 1 else c - 1)],
    )


@op(EXACT)
def losses(d: Draw) -> Case:
    name = d.one("mse_loss", "l1_loss", "smooth_l1_loss", "huber_loss", "binary_cross_entropy_with_logits", "kl_div", "soft_margin_loss")
    return Case(lambda x, y: getattr(F, name)(x, y.tanh() ** 2), [d.normal(*(s := d.shape(3))), d.normal(*s)])


@op(EXACT)
def softmax(d: Draw) -> Case:
    name, dim = d.one("softmax", "log_softmax", "softmin", "logsumexp"), d.dim(3)
    return Case(lambda x: getattr(torch if name == "logsumexp" else F, name)(x, dim), [d.normal(*d.shape(3))])


@op(NUMBERS)
def reduce(d: Draw) -> Case:
    name, dim, keep = d.one("sum", "amax", "amin", "prod"), d.dim(3), d.one(True, False)
    return Case(
        lambda x: getattr(torch, name)(x, dim, keepdim=keep),
        [d.distinct(*d.shape(2), d.one(2, 3)) if name[0] == "a" else d.normal(*d.shape(3))],
    )


@op()
def statistics(d: Draw) -> Case:
    name, dim = d.one("mean", "var", "std", "norm"), d.dim(3)
    x = d.normal(*(n + 1 for n in d.shape(3)))
    return Case(lambda x: getattr(torch, name)(x, dim=dim), [x])


@op(NUMBERS)
def shifted(d: Draw) -> Case:
    name, rank = d.one("roll", "flip", "rot90", "diff", "repeat_interleave", "narrow"), 3
    dim, shape = d.one(0, 1, 2), d.shape(3, 2)
    forms: dict[str, Callable[..., Any]] = {
        "roll": lambda x: x.roll(3, dim),
        "flip": lambda x: x.flip(dim, (dim + 1) % rank),
        "rot90": lambda x: x.rot90(1, (dim, (dim + 1) % rank)),
        "diff": lambda x: x.diff(dim=dim),
        "repeat_interleave": lambda x: x.repeat_interleave(3, dim),
        "narrow": lambda x: x.narrow(dim, 1, shape[dim] - 1),
    }
    return Case(forms[name], [d.normal(*shape)])


@op(NUMBERS)
def shaped(d: Draw) -> Case:
    a, b, c = shape = d.shape(3)
    forms: tuple[Callable[..., Any], ...] = (
        lambda x: x.reshape(-1, c),
        lambda x: x.reshape(a, -1),
        lambda x: x.permute(2, 0, 1).reshape(-1),
        lambda x: x.permute(1, 2, 0).reshape(b * c, a),
        lambda x: x[:, ::2].flatten(),
        lambda x: x.repeat(2, 1, 3),
        lambda x: x.tile(1, 2, 1).transpose(0, 2).contiguous(),
        lambda x: x.unsqueeze(1).expand(a, 5, b, c).reshape(a * 5, b, c),
    )
    return Case(d.one(*forms), [d.normal(*shape)])


@op(NUMBERS)
def joined(d: Draw) -> Case:
    shape, dim, name = list(d.shape(3)), d.one(0, 1, 2), d.one("cat", "stack", "split")
    other = [*shape[:dim], d.size(), *shape[dim + 1 :]] if name != "stack" else shape
    forms: dict[str, Callable[..., Any]] = {
        "cat": lambda x, y: torch.cat((x, y, x), dim),
        "stack": lambda x, y: torch.stack((x, y), dim),
        "split": lambda x, y: (*torch.split(x, 2, dim), *torch.chunk(y, 3, dim)),
    }
    return Case(forms[name], [d.normal(*shape), d.normal(*other)])


@op(NUMBERS)
def triangle(d: Draw) -> Case:
    name, k = d.one("tril", "triu", "diagonal", "diag_embed"), d.one(-1, 0, 1)
    return Case(lambda x: getattr(torch, name)(x, k), [d.normal(*d.shape(3, 2))])


@op(NUMBERS)
def written(d: Draw) -> Case:
    shape, low = d.shape(2, 3), d.one(0, 1)
    kind = d.one("slice", "step", "column", "diagonal", "transposed")

    def fn(x: Any, y: Any) -> Any:
        x = x * 1
        if kind == "slice":
            x[low:-1] += y[low:-1]
        elif kind == "step":
            x[low::2, 1:] = y[low::2, 1:]
        elif kind == "column":
            x[:, low].mul_(y[:, 1])
        elif kind == "diagonal":
            x.diagonal().copy_(y.diagonal())
        else:
            x.t()[low:] = y.t()[low:]
        return x

    return Case(fn, [d.normal(*shape), d.normal(*shape)])


@op(NUMBERS)
def pointwise(d: Draw) -> Case:
    shape = d.shape(3)
    other = tuple(d.one(n, 1) for n in shape)[d.one(0, 1) :]
    name = (
        d.one("add", "mul", "sub", "maximum", "minimum", "atan2", "hypot") if d.dtype.is_floating_point else d.one("add", "mul", "maximum")
    )
    return Case(getattr(torch, name), [d.normal(*shape), d.normal(*other) if other else d.normal()])


@op(EXACT)
def decomposition(d: Draw) -> Case:
    batch, n = d.one((), (2,), (5,), (8,)), d.size()
    name = d.one("cholesky", "inv", "det", "eigvalsh", "svdvals", "matrix_exp", "slogdet")
    fn = {"slogdet": lambda x: torch.linalg.slogdet(x)[1]}.get(name, getattr(torch.linalg, name))
    if name == "matrix_exp":
        return Case(fn, [d.normal(*batch, n, n) / n])
    return Case(lambda x: fn((x + x.mT) / 2), [d.definite(*batch, size=n)])


@op(EXACT)
def factors(d: Draw) -> Case:
    batch, n = d.one((), (2,), (5,), (8,)), d.size(2)
    name = d.one("qr", "eigh", "svd", "lu")

    def fn(x: Any) -> Any:  # compares products, because each factor is unique only up to signs
        if name == "eigh":
            values, vectors = torch.linalg.eigh((x + x.mT) / 2)
            return values, vectors @ torch.diag_embed(values.sin()) @ vectors.mT
        if name == "svd":
            u, s, v = torch.linalg.svd(x, full_matrices=False)
            return s, u @ v
        return torch.linalg.qr(x) if name == "qr" else torch.linalg.lu(x)

    a = d.definite(*batch, size=n) if name == "eigh" else d.regular(*batch, size=n)
    return Case(fn, [a])


@op(EXACT)
def solve(d: Draw) -> Case:
    batch, n, m = d.one((), (2,), (5,), (8,)), d.size(), d.size()
    name = d.one("solve", "solve_triangular", "cholesky_solve", "lstsq")
    forms: dict[str, Callable[..., Any]] = {
        "solve": torch.linalg.solve,
        "solve_triangular": lambda a, b: torch.linalg.solve_triangular(a.triu(), b, upper=True),
        "cholesky_solve": lambda a, b: torch.cholesky_solve(b, a.tril()),
        "lstsq": lambda a, b: torch.linalg.lstsq(a, b).solution,
    }
    return Case(forms[name], [d.regular(*batch, size=n), d.normal(*batch, n, m)])


def _recurrent(d: Draw, kind: str) -> Case:
    t, b, i, h = d.one(2, 3, 5, 8), d.size(), d.size(), d.one(2, 3, 4, 8)
    gates, first = {"lstm": 4, "gru": 3, "rnn_tanh": 1}[kind], d.one(True, False)
    weights = [d.normal(gates * h, i), d.normal(gates * h, h), d.normal(gates * h), d.normal(gates * h)]
    state = [d.normal(1, b, h), *([d.normal(1, b, h)] if kind == "lstm" else [])]

    def fn(x: Any, *rest: Any) -> Any:
        hidden, flat = rest[: len(state)], rest[len(state) :]
        return getattr(torch, kind)(x, hidden if kind == "lstm" else hidden[0], list(flat), True, 1, 0.0, False, False, first)

    return Case(fn, [d.normal(*((b, t, i) if first else (t, b, i))), *state, *weights])


for _kind in ("lstm", "gru", "rnn_tanh"):
    OPS[_kind] = Op(_kind, lambda d, k=_kind: _recurrent(d, k), EXACT, True, True)


@op(EXACT)
def ctc_loss(d: Draw) -> Case:
    t, n, c = d.one(6, 8, 12), d.size(), d.one(3, 4, 8)
    lengths = [t] * n, [2] * n
    return Case(lambda x, y: F.ctc_loss(F.log_softmax(x, -1), y, *lengths), [d.normal(t, n, c), d.indices(c - 1, n, 2) + 1])


__all__ = ["OPS", "Case", "Draw", "Op"]
