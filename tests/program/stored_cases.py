"""Cases of values, functions, modules and optimizers. See `stored_harness`."""

from __future__ import annotations

import collections
import contextvars
import dataclasses
import enum
import functools
import logging
import os
import warnings
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from tests.program.stored_harness import Values, calls, case, inputs, trained

SCALE = 2.0
TABLE = {"scale": 2.0, "names": ["a", "b"]}
ACTIVATION: Any = torch.relu
VARIABLE: contextvars.ContextVar[float] = contextvars.ContextVar("VARIABLE")
COUNTS = {"steps": 0}
LOGGED: list[str] = []
log = logging.getLogger("stored_cases")


class Block(nn.Module):
    factor = 1.0

    def __init__(self, scale: float = 1.0, *, act: Any = torch.tanh) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.linear, self.scale, self.act = nn.Linear(4, 4), scale, act
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.act(self.linear(x)) * self.scale * type(self).factor


class Other(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.scale


@case
def a_global_number(device: str, wrap: Any, changed: bool) -> Values:
    global SCALE
    SCALE = 3.0 if changed else 2.0
    return calls(wrap(lambda x: x * SCALE), device)


@case
def an_item_of_a_dict(device: str, wrap: Any, changed: bool) -> Values:
    TABLE["scale"] = 5.0 if changed else 2.0
    return calls(wrap(lambda x: x * TABLE["scale"] + len(TABLE["names"])), device)


@case
def a_function_in_c(device: str, wrap: Any, changed: bool) -> Values:
    global ACTIVATION
    ACTIVATION = torch.sigmoid if changed else torch.relu
    return calls(wrap(lambda x: ACTIVATION(x)), device)


@case
def a_closure(device: str, wrap: Any, changed: bool) -> Values:
    weights = [1.0, 2.0, 4.0 if changed else 3.0]

    def step(x: torch.Tensor) -> torch.Tensor:
        return sum(x * w for w in weights)  # type: ignore[return-value]

    return calls(wrap(step), device)


def _twice(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def _thrice(x: torch.Tensor) -> torch.Tensor:
    return x * 3


@case
def a_function_in_a_closure(device: str, wrap: Any, changed: bool) -> Values:
    inner = _thrice if changed else _twice
    return calls(wrap(lambda x: inner(x)), device)


@case
def a_decorated_function(device: str, wrap: Any, changed: bool) -> Values:
    @functools.wraps(_twice)
    def decorated(x: torch.Tensor, fn: Any = _thrice if changed else _twice) -> torch.Tensor:
        return fn(x) + 1

    return calls(wrap(lambda x: decorated(x)), device)


@case
def a_partial(device: str, wrap: Any, changed: bool) -> Values:
    inner = functools.partial(torch.clamp, min=-0.1 if changed else -0.3)
    return calls(wrap(lambda x: inner(x)), device)


@case
def a_module(device: str, wrap: Any, changed: bool) -> Values:
    model = Block(2.0 if changed else 1.0).to(device)
    return calls(wrap(lambda x: model(x)), device)


@case
def a_function_of_a_module(device: str, wrap: Any, changed: bool) -> Values:
    model = Block(act=functional.gelu if changed else functional.silu).to(device)
    return calls(wrap(lambda x: model(x)), device)


@case
def the_class_of_a_module(device: str, wrap: Any, changed: bool) -> Values:
    model = (Other if changed else Block)(1.5).to(device)
    return calls(wrap(lambda x: model(x)), device)


@case
def an_attribute_of_a_class(device: str, wrap: Any, changed: bool) -> Values:
    model = Block().to(device)
    Block.factor = 7.0 if changed else 1.0
    try:
        return calls(wrap(lambda x: model(x)), device)
    finally:
        Block.factor = 1.0


@case
def a_replaced_forward(device: str, wrap: Any, changed: bool) -> Values:
    model: Any = Block().to(device)
    if changed:
        model.forward = lambda x: x - 1
    return calls(wrap(lambda x: model(x)), device)


@case
def a_hook(device: str, wrap: Any, changed: bool) -> Values:
    model = Block().to(device)
    if changed:
        model.linear.register_forward_hook(lambda module, args, out: out * 10)
    return calls(wrap(lambda x: model(x)), device)


@case
def the_values_of_parameters(device: str, wrap: Any, changed: bool) -> Values:
    model = Block().to(device)
    if changed:
        with torch.no_grad():
            model.linear.weight.mul_(3)
    return calls(wrap(lambda x: model(x)), device)


@case
def modules_in_another_order(device: str, wrap: Any, changed: bool) -> Values:
    blocks = [Block(1.0), Other(2.0)]
    model = nn.Sequential(*(blocks[::-1] if changed else blocks)).to(device)
    return calls(wrap(lambda x: model(x)), device)


@case
def adamw(device: str, wrap: Any, changed: bool) -> Values:
    model = Block().to(device)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.1 if changed else 0.01), wrap, device)


@case
def weight_decay(device: str, wrap: Any, changed: bool) -> Values:
    model = Block().to(device)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.0 if changed else 0.1), wrap, device)


@case
def amsgrad(device: str, wrap: Any, changed: bool) -> Values:
    model = Block().to(device)
    return trained(model, torch.optim.Adam(model.parameters(), lr=0.1, amsgrad=changed), wrap, device)


@case
def momentum(device: str, wrap: Any, changed: bool) -> Values:
    model = Block().to(device)
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5 if changed else 0.9), wrap, device)


@case
def groups(device: str, wrap: Any, changed: bool) -> Values:
    model = nn.Sequential(Block(), Other()).to(device)
    given = [{"params": model[0].parameters(), "lr": 0.1}, {"params": model[1].parameters()}]
    return trained(model, torch.optim.Adam(given[::-1] if changed else given, lr=0.01), wrap, device)


@case
def a_frozen_parameter(device: str, wrap: Any, changed: bool) -> Values:
    model = nn.Sequential(Block(), Other()).to(device)
    model[0].linear.bias.requires_grad_(not changed)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.1), wrap, device)


@case
def tied_weights(device: str, wrap: Any, changed: bool) -> Values:
    model = nn.Sequential(Block(), Other()).to(device)
    if changed:
        model[1].linear.weight = model[0].linear.weight
    return trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrap, device)


@case
def shared_memory(device: str, wrap: Any, changed: bool) -> Values:
    model = Block().to(device)
    other = model.linear.bias.detach() if changed else torch.zeros(4, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        other.add_(1)
        return model(x)

    return calls(wrap(step), device)


@case
def dropout(device: str, wrap: Any, changed: bool) -> Values:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.0 if changed else 1.0)).to(device)
    model.train(not changed)
    torch.manual_seed(0)
    with torch.no_grad():
        model[0].weight.fill_(0.1)
        model[0].bias.fill_(0.2)
    return calls(wrap(lambda x: model(x)), device)


@case
def batch_norm(device: str, wrap: Any, changed: bool) -> Values:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=0.5 if changed else 0.1)).to(device)
    with torch.no_grad():
        model[0].weight.copy_(torch.arange(16.0).reshape(4, 4))
        model[0].bias.fill_(0.2)
    return [*calls(wrap(lambda x: model(x)), device), *model.buffers()]


@case
def numbers_written(device: str, wrap: Any, changed: bool) -> Values:
    COUNTS["steps"] = 10 if changed else 0

    def step(x: torch.Tensor) -> torch.Tensor:
        COUNTS["last"] = 1
        return x + 1

    return [*calls(wrap(step), device), COUNTS.pop("last"), COUNTS["steps"]]


@case
def an_array_of_numpy(device: str, wrap: Any, changed: bool) -> Values:
    table = np.array([1.0, 2.0, 9.0 if changed else 3.0, 4.0], np.float32)
    return calls(wrap(lambda x: x * torch.from_numpy(table).to(x.device)), device)


@case
def the_environment(device: str, wrap: Any, changed: bool) -> Values:
    os.environ["STORED_CASE"] = "3" if changed else "2"
    return calls(wrap(lambda x: x * float(os.environ["STORED_CASE"])), device)


@case
def a_context_variable(device: str, wrap: Any, changed: bool) -> Values:
    VARIABLE.set(3.0 if changed else 2.0)
    return calls(wrap(lambda x: x * VARIABLE.get()), device)


class Kind(enum.Enum):
    ADD = 1
    MULTIPLY = 2


@dataclasses.dataclass
class Config:
    kind: Kind
    sizes: tuple[int, ...]


Pair = collections.namedtuple("Pair", "low high")


@case
def a_config(device: str, wrap: Any, changed: bool) -> Values:
    config = Config(Kind.MULTIPLY if changed else Kind.ADD, (2, 2))

    def step(x: torch.Tensor) -> torch.Tensor:
        return x * 3 if config.kind is Kind.MULTIPLY else x + config.sizes[0]

    return calls(wrap(step), device)


@case
def a_named_tuple(device: str, wrap: Any, changed: bool) -> Values:
    pair = Pair(-0.1, 0.3 if changed else 0.2)
    return calls(wrap(lambda x: x.clamp(pair.low, pair.high)), device)


@case
def an_argument(device: str, wrap: Any, changed: bool) -> Values:
    step = wrap(lambda x, mode, scale: x * scale if mode == "times" else x + scale)
    return calls(lambda x: step(x, "plus" if changed else "times", 3), device)


@case
def a_dict_of_arguments(device: str, wrap: Any, changed: bool) -> Values:
    step = wrap(lambda batch: {"sum": batch["x"] + batch["y"], "flag": batch["flag"]})
    found = calls(lambda x: step({"x": x, "y": x * 2, "flag": changed}), device)
    return [v for result in found for v in result.values()]


@case
def an_argument_that_is_state(device: str, wrap: Any, changed: bool) -> Values:
    total = torch.zeros(3, 4, device=device)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        total.add_(x)
        return total + y

    compiled = wrap(step)
    return calls(lambda x: compiled(x, total if changed else x), device)


@case
def grad_mode(device: str, wrap: Any, changed: bool) -> Values:
    model = Block().to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x) * 2 if torch.is_grad_enabled() else model(x) * 3

    compiled = wrap(step)
    with torch.set_grad_enabled(not changed):
        return [v.detach() for v in calls(compiled, device)]


@case
def a_log_record(device: str, wrap: Any, changed: bool) -> Values:
    LOGGED.clear()

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            LOGGED.append(record.getMessage())

    handler = Keep()
    log.addHandler(handler)

    @functools.lru_cache
    def once() -> None:
        log.warning("only once: %s", "here")

    def step(x: torch.Tensor) -> torch.Tensor:
        once()
        return x + 1

    try:
        return [*calls(wrap(step), device), list(LOGGED)]
    finally:
        log.removeHandler(handler)


@case
def a_warning(device: str, wrap: Any, changed: bool) -> Values:
    def step(x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.softmax(x)  # warns of the missing dim

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        found = calls(wrap(step), device, 1)
    return [*found, sum("Implicit dimension" in str(w.message) for w in shown)]


@case
def the_order_of_a_set(device: str, wrap: Any, changed: bool) -> Values:
    names = {"alpha", "beta", "gamma", "delta", "epsilon"}
    weights = {name: float(i) for i, name in enumerate(names)}  # another order in each process

    def step(x: torch.Tensor) -> list[torch.Tensor]:
        return [x * weights[name] for name in names]

    return [v for found in calls(wrap(step), device, 1) for v in found]


class Lazy:
    @functools.cached_property
    def scale(self) -> float:
        return 4.0


@case
def a_cached_property(device: str, wrap: Any, changed: bool) -> Values:
    lazy = Lazy()
    if changed:
        lazy.__dict__["scale"] = 5.0
    return calls(wrap(lambda x: x * lazy.scale), device)


@case
def linear_algebra(device: str, wrap: Any, changed: bool) -> Values:
    def step(x: torch.Tensor) -> list[torch.Tensor]:
        square = x @ x.mT + torch.eye(3, device=x.device)
        ones = torch.ones(3, 1, device=x.device)
        return [torch.linalg.solve(square, ones), torch.linalg.cholesky(square), torch.linalg.eigvalsh(square), torch.linalg.svdvals(x)]

    return [v for found in calls(wrap(step), device) for v in found]


@case
def attributes_of_results_and_views_of_arrays(device: str, wrap: Any, changed: bool) -> Values:
    def step(x: torch.Tensor, n: int) -> Any:
        y: Any = x * 2
        a = np.zeros(3)
        y.n, y.count, y.src, y.items, y.views = n, (x > 4).sum().item(), x, [y, "a"], (a, a[1:])
        return y

    run, found = wrap(step), []
    for n in (4 if changed else 3, 5, 6):
        x = inputs(device) + n
        y = run(x, n)
        y.views[0][1] = n
        found += [y, y.n, y.count, y.src is x, y.items[0] is y, y.views[1].tolist()]
    return found
