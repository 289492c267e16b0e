"""Attributes that Python code gives to tensors: those of arguments are read and written as in plain PyTorch, results have them."""

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn

import spmd


class Boxes(torch.Tensor):
    """A tensor that knows the size of its image."""


def tensor(device: str, **attributes: Any) -> torch.Tensor:
    made = torch.arange(1.0, 4.0).to(device)
    vars(made).update(attributes)
    return made


def view(device: str, **attributes: Any) -> torch.Tensor:
    made = torch.arange(5.0).to(device)[1:4]
    vars(made).update(attributes)
    return made


def boxes(device: str, **attributes: Any) -> torch.Tensor:
    made = tensor(device).as_subclass(Boxes)
    vars(made).update(attributes)
    return made


def shown(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return type(value).__name__, value.detach().as_subclass(torch.Tensor).tolist()
    return [shown(v) for v in value] if isinstance(value, (tuple, list)) else value


def reads(x: torch.Tensor) -> Any:
    return x.sum() * getattr(x, "scale", 0.5) + (3 if hasattr(x, "flag") else 0)


def reads_inside(x: Any) -> Any:
    return x.sum() * x.sizes[0] + x.held["n"]


def counts(x: Any) -> Any:
    x.count = getattr(x, "count", 0) + 1
    x.total = x.sum() * x.count
    return x * 2


def removes(x: Any) -> Any:
    if hasattr(x, "scale"):
        del x.scale
    return x + 1


HELD = {"n": 1}
ROWS: dict[str, tuple[Callable[..., Any], list[dict[str, Any]]]] = {
    "read": (reads, [{"scale": 1.0}, {"scale": 2.0}, {}, {"scale": -0.0}, {"scale": 0.0}, {"flag": None}, {"scale": 1.0}, {"unread": 4}]),
    "read inside": (reads_inside, [{"sizes": (2, 3), "held": HELD}, {"sizes": (4, 3), "held": HELD}, {"sizes": (2, 3), "held": {"n": 5}}]),
    "written": (counts, [{}, {}, {"count": 4}, {"count": 4}, {}]),
    "removed": (removes, [{"scale": 1}, {"scale": 2}, {}, {"scale": 1}]),
}


@pytest.mark.parametrize("make", [tensor, view, boxes])
@pytest.mark.parametrize("name", ROWS)
def test_attributes_of_an_argument_are_the_callers(name: str, make: Callable[..., Any]) -> None:
    fn, rows = ROWS[name]

    def called(run: Any, device: str) -> list[Any]:
        found: list[Any] = []
        for attributes in rows:
            x = make(device, **attributes)
            result = run([{"x": x}, torch.ones((), device=device)])
            found.append((shown(result), {k: shown(v) for k, v in vars(x).items()}))
        return found

    def step(given: Any) -> Any:
        return fn(given[0]["x"]) * given[1]

    assert called(spmd.compile(step), "jax") == called(step, "cpu")


def test_attributes_of_an_argument_on_the_host_are_the_callers() -> None:
    step = spmd.compile(lambda x, host: x * host.scale)
    for scale in (2.0, 3.0, 2.0):
        assert step(torch.ones(2, device="jax"), tensor("cpu", scale=scale)).tolist() == [scale, scale]


def test_attributes_that_are_not_read_cost_no_trace() -> None:
    step = spmd.compile(lambda x: x * 2)
    for i in range(3):
        step(tensor("jax", index=i))
    assert step.num_traces == 1


KINDS: dict[str, Callable[[torch.Tensor], Any]] = {
    "a parameter": lambda x: nn.Parameter(x.detach() * 2),
    "a frozen parameter": lambda x: nn.Parameter(x.detach() * 2, requires_grad=False),
    "a leaf": lambda x: torch.ones(3, device=x.device).requires_grad_(),
    "a subclass": lambda x: (x.detach() * 2).as_subclass(Boxes),
    "a parameter and its memory": lambda x: (lambda y: (y, nn.Parameter(y)))(x.detach() * 2),
    "a detached argument": lambda x: x.detach(),
    "a view of a detached argument": lambda x: x.detach()[1:],
}


@pytest.mark.parametrize("name", KINDS)
def test_a_result_is_of_the_kind_that_the_function_made(name: str) -> None:
    def kinds(run: Any, device: str) -> list[Any]:
        results = run(tensor(device).requires_grad_())
        return [(shown(r), r.requires_grad, r.is_leaf) for r in (results if isinstance(results, tuple) else [results])]

    step = spmd.compile(KINDS[name])
    assert kinds(step, "jax") == kinds(step, "jax") == kinds(KINDS[name], "cpu")


def test_a_result_has_the_attributes_that_it_was_given() -> None:
    def step(x: torch.Tensor) -> Any:
        made: Any = (x * 2).as_subclass(Boxes)
        made.size_of_image = 4, 5
        return made

    compiled = spmd.compile(step)
    for _ in range(2):
        assert compiled(tensor("jax")).size_of_image == (4, 5)


def test_a_parameter_made_in_the_first_call_is_trained_by_the_next() -> None:
    def losses(device: str, wrap: Callable[[Any], Any]) -> list[float]:
        model: Any = nn.Module()

        def step(x: torch.Tensor) -> torch.Tensor:
            if not hasattr(model, "weight"):
                model.weight = nn.Parameter(torch.ones(3, device=x.device))
            loss = (x * model.weight).sum()
            grad = torch.autograd.grad(loss, model.weight)[0]
            with torch.no_grad():
                model.weight -= 0.1 * grad
            return loss

        run = wrap(step)
        found = [run(tensor(device)).item() for _ in range(3)]
        (model.weight * 2).sum().backward()
        return [*found, *model.weight.grad.tolist(), len(list(model.parameters()))]

    assert losses("jax", spmd.compile) == pytest.approx(losses("cpu", lambda fn: fn))


def test_all_attributes_of_a_tensor_are_read_and_kept() -> None:
    """Also those that are added after the trace."""
    held, x = tensor("jax", a=1), tensor("jax", c=1)
    step = spmd.compile(lambda x: (sorted(vars(x)), dict(x.__dict__), sorted(vars(held)), x * 2))
    assert step(x)[:3] == (["c"], {"c": 1}, ["a"])
    x.d, held.b = 2, 2  # type: ignore[attr-defined]
    assert step(x)[:3] == (["c", "d"], {"c": 1, "d": 2}, ["a", "b"])
    assert vars(x) == {"c": 1, "d": 2}
    assert step(tensor("jax"))[:3] == ([], {}, ["a", "b"])


def test_an_argument_as_a_plain_tensor_is_returned_as_one() -> None:
    step = spmd.compile(lambda x: (x.as_subclass(torch.Tensor), x.as_subclass(torch.Tensor)[:2], x[:2], x.detach()))
    for _ in range(2):
        assert list(map(type, step(boxes("jax")))) == [torch.Tensor, torch.Tensor, Boxes, Boxes]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, weight: x * x._version,
        lambda x, weight: x * weight._version,
        lambda x, weight: x + 1 if x.is_inference() else x,
        lambda x, weight: x + 1 if x._base is None else x,
        lambda x, weight: x + 1 if x._is_view() else x,
        lambda x, weight: x + 1 if x.is_conj() else x,
        lambda x, weight: x + 1 if x.is_neg() else x,
        lambda x, weight: x + 1 if torch.is_conj(x) else x,
        lambda x, weight: x + 1 if torch.Tensor.is_inference(x) else x,
        lambda x, weight: x * operator.attrgetter("_version")(x),
    ],
    ids=["version", "version of state", "is_inference", "base", "is_view", "is_conj", "is_neg", "function", "unbound", "attrgetter"],
)
def test_what_later_calls_would_answer_otherwise_is_refused(fn: Callable[..., torch.Tensor]) -> None:
    weight = nn.Parameter(torch.ones(3).to("jax"))
    with pytest.raises(spmd.TraceError, match=r"a compiled function reads \._?(version|is_|base)"):
        spmd.compile(lambda x: fn(x, weight))(torch.ones(3).to("jax"))


def test_the_writes_to_a_new_tensor_are_counted() -> None:
    def fn(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        y.add_(1)
        return y * y._version if y._base is None and not y.is_inference() else y

    assert spmd.compile(fn)(torch.ones(3).to("jax")).tolist() == fn(torch.ones(3)).tolist()


REPLACED: dict[str, tuple[Any, Any]] = {
    "abs": (lambda x: x.abs(), lambda x: x * 3),
    "norm": (lambda x: x.norm(), lambda x: x * 4),
    "__add__": (lambda x: x + 1, lambda x, other: x * 5),
    "__neg__": (lambda x: -x, lambda x: x * 6),
    "mT": (lambda x: x.mT, property(lambda x: x * 7)),
}


@pytest.mark.parametrize("kind", [torch.Tensor, nn.Parameter])
@pytest.mark.parametrize("name", REPLACED)
def test_what_a_program_replaces_in_the_class_of_tensors_is_used(name: str, kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, other = REPLACED[name]
    x = torch.tensor([[1.0, -2.0]])
    step = spmd.compile(fn)

    ours, torchs = (nn.Parameter(x.to("jax")), nn.Parameter(x)) if kind is nn.Parameter else (x.to("jax"), x)
    for value in (None, other, None):
        with monkeypatch.context() as changed:
            if value is not None:
                changed.setattr(kind, name, value)
            found, expected = step(ours).detach(), fn(torchs).detach()
        torch.testing.assert_close(found.cpu(), expected)
    assert step.num_traces == 2
