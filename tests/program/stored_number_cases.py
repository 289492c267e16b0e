"""Stored traces of steps with numbers that vary: counters, schedules and numbers as arguments, which are inputs of the program."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tests.program.stored_harness import Values, calls, case, inputs, train


class Trainer:
    """A step that counts, sets the learning rate from the count, and averages the weights."""

    def __init__(self, device: str, warmup: int = 10, start: int = 0) -> None:
        self.model = nn.Linear(4, 3).to(device)
        with torch.no_grad():
            for p in self.model.parameters():
                p.copy_(torch.arange(p.numel(), dtype=torch.float32).reshape(p.shape) / 10)
        self.average = [p.detach().clone() for p in self.model.parameters()]
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.5)
        self.warmup, self.count, self.history = warmup, start, list[float]()

    def schedule(self) -> float:
        return 0.1 * min(1.0, self.count / self.warmup)

    def step(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        for group in self.optimizer.param_groups:
            group["lr"] = self.schedule()
        loss = train(self.model, self.optimizer, x)
        decay = min(0.9, (1 + self.count) / (10 + self.count))
        with torch.no_grad():
            for mean, p in zip(self.average, self.model.parameters(), strict=True):
                mean.lerp_(p, 1 - decay)
        self.history.append(self.optimizer.param_groups[0]["lr"])
        return loss

    def values(self) -> Values:
        rates = [group["lr"] for group in self.optimizer.param_groups]
        return [*(p.detach() for p in self.model.parameters()), *self.average, self.count, *self.history, *rates]


@case
def a_warmup_in_the_step(device: str, wrap: Any, changed: bool) -> Values:
    trainer = Trainer(device, warmup=5 if changed else 10)
    return [*calls(wrap(trainer.step), device, 5), *trainer.values()]


@case
def a_counter_that_starts_elsewhere(device: str, wrap: Any, changed: bool) -> Values:
    trainer = Trainer(device, start=3 if changed else 0)
    return [*calls(wrap(trainer.step), device, 5), *trainer.values()]


@case
def a_schedule_that_is_replaced(device: str, wrap: Any, changed: bool) -> Values:
    trainer = Trainer(device)
    if changed:
        trainer.schedule = lambda: 0.2 / trainer.count  # type: ignore[method-assign]
    return [*calls(wrap(trainer.step), device, 5), *trainer.values()]


@case
def a_counter_of_another_type(device: str, wrap: Any, changed: bool) -> Values:
    trainer = Trainer(device, start=0.0 if changed else 0)  # type: ignore[arg-type]
    return [*calls(wrap(trainer.step), device, 4), *trainer.values()]


class Counted:
    def __init__(self, every: int = 2, count: int = 0) -> None:
        self.count, self.every, self.place = count, every, 0

    def branch(self, x: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return x * self.count if self.count % self.every else x + 1

    def queue(self, x: torch.Tensor, queue: torch.Tensor) -> torch.Tensor:
        queue[self.place] = x.sum(0)
        self.place = (self.place + 1) % len(queue)
        return queue.sum(0) * self.place


@case
def a_branch_on_a_counter(device: str, wrap: Any, changed: bool) -> Values:
    counted = Counted(every=3 if changed else 2)
    return [*calls(wrap(counted.branch), device, 7), counted.count]


@case
def a_branch_on_a_counter_that_starts_elsewhere(device: str, wrap: Any, changed: bool) -> Values:
    counted = Counted(count=1 if changed else 0)
    return [*calls(wrap(counted.branch), device, 7), counted.count]


@case
def a_place_in_a_queue(device: str, wrap: Any, changed: bool) -> Values:
    counted, queue = Counted(), torch.zeros(5 if changed else 3, 4, device=device)
    step, x = wrap(counted.queue), inputs(device)
    return [*(step(x * i, queue) for i in range(5)), queue, counted.place]


@case
def numbers_as_arguments(device: str, wrap: Any, changed: bool) -> Values:
    step, x = wrap(lambda x, i, f: (x * f + i, i + 1, math.sqrt(f))), inputs(device)
    numbers = [(5, 2.5), (3, 0.5), (1, 0.25)] if changed else [(1, 0.5), (2, 1.5), (3, 2.5)]
    return [value for i, f in numbers for value in step(x, i, f)]


@case
def a_branch_on_an_argument(device: str, wrap: Any, changed: bool) -> Values:
    step, x = wrap(lambda x, i: x * i if i > 3 else x + i), inputs(device)
    return [step(x, i) for i in ((7, 1, 8, 2) if changed else (1, 2, 5, 3, 6))]


@case
def a_branch_on_an_argument_the_other_way_first(device: str, wrap: Any, changed: bool) -> Values:
    step, x = wrap(lambda x, i: x * i if i > 3 else x + i), inputs(device)
    return [step(x, i) for i in ((1, 5, 6) if changed else (1, 2, 3))]


_counts = {"n": 0, "of": [0, 0.0]}
_total = 0


@case
def counters_in_variables(device: str, wrap: Any, changed: bool) -> Values:
    global _total
    _counts.update(n=4 if changed else 0, of=[0, 1.0])
    _total = 0
    count = 0

    def step(x: torch.Tensor) -> torch.Tensor:
        global _total
        nonlocal count
        count, _total = count + 1, _total + len(x)
        _counts["n"] += 2
        _counts["of"][1] *= 0.5
        return x * _counts["of"][1] + count * _counts["n"] - _total

    return [*calls(wrap(step), device, 4), count, _total, _counts["n"], *_counts["of"]]


class Counting(torch.optim.Optimizer):
    """An optimizer that counts in its group, in its state and in itself."""

    def __init__(self, params: Any, power: float) -> None:
        super().__init__(params, {"lr": 0.1, "k": 0})
        self.power, self.steps = power, 0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        for group in self.param_groups:
            group["k"] += 1
            rate = group["lr"] / group["k"] ** self.power
            for p in group["params"]:
                state = self.state[p]
                state["n"] = state.get("n", 0) + 1
                p.add_(p.grad, alpha=-rate / math.sqrt(state["n"] + self.steps))


@case
def an_optimizer_that_counts(device: str, wrap: Any, changed: bool) -> Values:
    trainer = Trainer(device)
    trainer.optimizer = Counting(trainer.model.parameters(), 0.7 if changed else 0.5)  # type: ignore[assignment]
    step = wrap(lambda x: train(trainer.model, trainer.optimizer, x))
    losses = calls(step, device, 5)
    return [*losses, *(p.detach() for p in trainer.model.parameters()), trainer.optimizer.steps, trainer.optimizer.param_groups[0]["k"]]


@case
def texts_of_a_counter(device: str, wrap: Any, changed: bool) -> Values:
    counted, texts = Counted(count=10 if changed else 0), list[str]()

    def step(x: torch.Tensor) -> torch.Tensor:
        counted.count += 1
        texts.append(f"{counted.count:03d}")
        return x * counted.count

    return [*calls(wrap(step), device, 4), *texts]


@case
def an_index_that_counts(device: str, wrap: Any, changed: bool) -> Values:
    counted, table = Counted(count=1 if changed else 0), torch.arange(8.0, device=device)

    def step(x: torch.Tensor) -> torch.Tensor:
        counted.count += 1
        return x * table[counted.count] + x[:, : counted.count % 4 + 1].sum()

    return [*calls(wrap(step), device, 4), counted.count]


@case
def a_counter_in_a_buffer(device: str, wrap: Any, changed: bool) -> Values:
    module = nn.Module()
    module.register_buffer("at", torch.tensor(2 if changed else 0))
    module.register_buffer("queue", torch.zeros(8))
    module.to(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        at = int(module.at)
        module.queue[at : at + 2] = x[0, :2]
        module.at.fill_((at + 2) % 8)
        return module.queue.clone()

    return [*calls(wrap(step), device, 6), module.at.clone(), module.queue.clone()]


@case
def flags_and_masks_that_the_host_knows(device: str, wrap: Any, changed: bool) -> Values:
    module = nn.Module()
    module.register_buffer("ready", torch.tensor(changed))
    module.to(device)
    mask = torch.tensor([True, False, True]).to(device)

    def step(x: torch.Tensor, keep: torch.Tensor) -> torch.Tensor:
        if not module.ready:
            module.ready.fill_(True)
            return x[keep] * 2
        return x[keep].sum() + x[: len(keep.nonzero())]

    step = wrap(step)
    return [*(step(inputs(device), mask) for _ in range(3)), module.ready.clone()]


@case
def an_integer_of_a_tensor_argument(device: str, wrap: Any, changed: bool) -> Values:
    step = wrap(lambda x, n: x * int(n[0]))
    return [step(inputs(device), torch.tensor([i + 3 * changed, 1], device=device)) for i in range(4)]
