"""The state of an optimizer, as its class and the user change it: in the step, and between two calls of one."""

import collections
import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mesh
import spmd
from tests.oracle import assert_same, assert_same_model, batch, descend

Edit = Callable[[Any, list[nn.Parameter]], None]


class _Base(torch.optim.Optimizer):
    """SGD whose `amount` says by how much."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad * self.amount(p), alpha=group["lr"])

    def amount(self, p: torch.Tensor) -> Any:
        raise NotImplementedError


class CountsBeside(_Base):
    def step(self, closure: Any = None) -> None:
        self.state["steps"] = self.state.get("steps", 0) + 1
        super().step(closure)

    def amount(self, p: torch.Tensor) -> Any:
        return 1 / self.state["steps"]


class MeansBeside(_Base):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.state["mean"] = torch.zeros_like(self.param_groups[0]["params"][0])

    def amount(self, p: torch.Tensor) -> Any:
        return self.state["mean"].mul_(0.5).add_(p.grad)


class KeepsPythonsValues(_Base):
    def amount(self, p: torch.Tensor) -> Any:
        state = self.state[p]
        state.setdefault("history", []).append(len(state["history"]) if "history" in state else 0)
        state["past"] = (*state.get("past", ()), 1)
        state["table"] = {"k": state.get("table", {"k": 0})["k"] + 1}
        return state["table"]["k"] + len(state["past"]) + state["history"][-1]


class CountsInItsGroup(_Base):
    """Of a counter in the group, which varies, follow numbers that the state keeps, alone and in containers."""

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
        super().step(closure)

    def amount(self, p: torch.Tensor) -> Any:
        state, step = self.state[p], self.param_groups[0]["step"]
        before, state["alpha"] = state.get("alpha", 1.0), 2 / (step + 3)
        state["past"] = (step, [step / 2, {"lr": self.param_groups[0]["lr"]}])
        return before


class TakesAway(torch.optim.SGD):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.num = 0

    def step(self, closure: Any = None) -> None:
        super().step(closure)
        self.num += 1
        for p in list(self.state):
            if self.num == 2:
                self.state[p].pop("momentum_buffer")
            if self.num == 4:
                del self.state[p]
        if self.num == 5:
            self.state.clear()
        if self.num == 6:
            self.state = collections.defaultdict(dict)


class SlowWeights(torch.optim.Optimizer):
    """Lookahead as it is written mostly: around another optimizer, without `Optimizer.__init__`: torch's hooks do not see its step."""

    def __init__(self, parameters: Any) -> None:
        self.optimizer = torch.optim.SGD(parameters, 0.1, momentum=0.5)
        self.param_groups, self.defaults = self.optimizer.param_groups, self.optimizer.defaults
        self.state = collections.defaultdict(dict)
        for group in self.param_groups:
            group["counter"] = 0

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:
        self.optimizer.step()
        for group in self.param_groups:
            if group["counter"] == 0:
                for p in group["params"]:
                    state = self.state[p]
                    if "slow" not in state:
                        state["slow"] = p.data.clone()
                    slow = state["slow"]
                    slow += (p.data - slow) * 0.5
                    p.data.copy_(slow)
            group["counter"] = (group["counter"] + 1) % 2


class Curvature(_Base):
    """Sophia's way: another method than `step` keeps something in the state."""

    @torch.no_grad()
    def look(self) -> None:
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            if len(state) == 0:
                state["square"], state["num"] = torch.zeros_like(p), 0
            state["square"].mul_(0.5).add_(p.grad * p.grad)
            state["num"] += 1

    def amount(self, p: torch.Tensor) -> Any:
        return 1 / (1 + self.state[p]["square"])


class Notes(_Base):
    """Lamb's way: what was found goes into the state, where the step does not read it; and `p.data` is set."""

    def amount(self, p: torch.Tensor) -> Any:
        state = self.state[p]
        state["num"] = state.get("num", 0) + 1
        state["norm"] = p.norm()
        state["mean"] = (state["mean"] if "mean" in state else torch.zeros_like(p)) * 0.5 + p.grad
        p.data = p.data * 0.5
        return state["mean"] / state["norm"]


class KeepsADict(_Base):
    """As AggMo: a tensor for each of several numbers."""

    def amount(self, p: torch.Tensor) -> Any:
        state = self.state[p]
        if not state:
            state["by beta"] = {beta: torch.zeros_like(p) for beta in (0.0, 0.5)}
        return sum(mean.mul_(beta).add_(p.grad, alpha=0.5) for beta, mean in state["by beta"].items())


class KeepsAQueue(_Base):
    """As AdaShift: the last gradients."""

    def amount(self, p: torch.Tensor) -> Any:
        queue = self.state[p].setdefault("queue", collections.deque(maxlen=3))
        queue.append(p.grad.clone())
        return queue[0]


class Projection:
    def __init__(self) -> None:
        self.basis: torch.Tensor | None = None


class KeepsAnObject(_Base):
    """As GaLore: an object that computes a tensor in its first step, and another one in some later steps."""

    def amount(self, p: torch.Tensor) -> Any:
        projection = self.state[p].setdefault("projection", Projection())
        if projection.basis is None:
            projection.basis = p.grad / p.grad.norm()
        elif self.state.setdefault("num", 0) % 3 == 2:
            projection.basis = projection.basis + p.grad
        self.state["num"] = self.state.get("num", 0) + 1
        return projection.basis


class LooksOnly(_Base):
    """As Fromage: it looks for state that it never keeps."""

    def amount(self, p: torch.Tensor) -> Any:
        return self.state[p].get("scale", 0.5)


USES: dict[str, Callable[[Any], Any]] = {
    "type": lambda k: (isinstance(k, int), type(k), isinstance(k / 2, float)),
    "arithmetic": lambda k: (
        k // 2,
        k % 3,
        k * k,
        -k,
        k**2,
        k**-1,
        2.5 * k,
        math.sqrt(k),
        max(k, 3),
        round(k / 2),
        divmod(k, 2),
        sum([k, k]),
    ),
    "bits": lambda k: (k & 1, k >> 1, ~k, math.comb(k, 1), k.bit_length()),
    "text": lambda k: (f"{k:03d}", str(k), f"{1 / k:.3f}"),
    "json": lambda k: json.dumps({"step": k}),
    "index": lambda k: ([*range(9)][k % 9], {1: "a", 2: "b"}.get(k), len("x" * (k % 9))),
    "tensor": lambda k: (torch.tensor(k).dtype, (torch.arange(3) * k).dtype, torch.tensor(k / 2).dtype),
}


class CountsForEach(_Base):
    """Counts the steps of each parameter as an int, and keeps what `use` makes of it."""

    def __init__(self, parameters: Any, use: Callable[[Any], Any] = USES["type"], first: int = 0) -> None:
        super().__init__(parameters)
        self.use, self.first, self.seen = use, first, list[Any]()

    def amount(self, p: torch.Tensor) -> Any:
        state = self.state[p]
        state["step"] = state.get("step", self.first) + 1
        self.seen.append(self.use(state["step"]))
        return 0.5 / state["step"] + (1 - 0.9 ** state["step"])


class KeepsWhatIsKnownLater(_Base):
    def amount(self, p: torch.Tensor) -> Any:
        state = self.state[p]
        state["step"] = state.get("step", 0) + 1
        state["root mean square"], state["name"] = p.norm().item() / 2, f"step {state['step']}"
        return state["root mean square"]


class ChangesAType(_Base):
    def amount(self, p: torch.Tensor) -> Any:
        state = self.state[p]
        state["amount"] = state["amount"] * 1.5 if "amount" in state else 3
        return state["amount"]


def _content(optimizer: Any, parameters: list[nn.Parameter]) -> list[Any]:
    """The values of parameters and state, on the CPU, parameters by their number."""
    names = {p: i for i, p in enumerate(parameters)}

    def plain(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return [round(x, 4) + 0.0 for x in value.detach().cpu().flatten().tolist()]
        if isinstance(value, float):
            return round(value, 4)
        if isinstance(value, (dict, Projection)):
            return {key: plain(part) for key, part in (value if isinstance(value, dict) else vars(value)).items()}
        return list(map(plain, value)) if isinstance(value, (list, tuple, collections.deque)) else value

    def state_of(owner: Any) -> Any:
        state = optimizer.state[owner]
        return {k: plain(v) for k, v in state.items()} if isinstance(state, dict) else plain(state)

    return [list(map(plain, parameters)), {names.get(owner, owner): state_of(owner) for owner in list(optimizer.state)}]


def _run(make: Callable[..., Any], edits: dict[int, Edit], device: str, calls: int = 8, traces: list[int] | None = None) -> list[Any]:
    parameters = [nn.Parameter(torch.full((4,), i + 1.0).to(device)) for i in range(2)]
    optimizer = make(parameters)

    def step() -> None:
        optimizer.zero_grad()
        torch.stack([(p * p).sum() for p in parameters]).sum().backward()
        optimizer.step()

    run: Any = spmd.compile(step) if device == "jax" else step
    found = []
    for i in range(calls):
        if i in edits:
            edits[i](optimizer, parameters)
        run()
        found.append(_content(optimizer, parameters))
        if traces is not None:
            traces.append(run.num_traces)
    return found


OWN = [CountsBeside, MeansBeside, KeepsPythonsValues, CountsInItsGroup, TakesAway, SlowWeights, Notes]
OWN += [KeepsADict, KeepsAQueue, KeepsAnObject, LooksOnly, KeepsWhatIsKnownLater, ChangesAType]


@pytest.mark.parametrize("make", OWN)
def test_what_a_class_of_ones_own_does_to_its_state_is_done_by_every_call(make: Callable[..., Any]) -> None:
    assert repr(_run(make, {}, "jax")) == repr(_run(make, {}, "cpu"))  # 1 is not 1.0


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("first", [0, 2**53 - 3])
def test_an_int_of_a_parameters_state_is_an_int(use: str, first: int) -> None:
    seen: list[str] = []
    for device in ("cpu", "jax"):
        made: list[CountsForEach] = []
        make = lambda ps, made=made: made.append(CountsForEach(ps, USES[use], first)) or made[0]  # noqa: E731
        content = _run(make, {}, device, 6)
        seen.append(repr((content, made[0].seen)))
    assert seen[0] == seen[1]


def test_an_int_of_a_parameters_state_is_a_number_that_changes() -> None:
    traces: list[int] = []
    _run(CountsBeside, {}, "jax", traces=traces)
    assert traces[-1] == 2


def test_replaced_state_is_one_program_again_after_it_was_loaded() -> None:
    traces: list[int] = []
    edits: dict[int, Edit] = {4: lambda o, ps: o.load_state_dict(copy.deepcopy(o.state_dict()))}
    assert _run(Notes, edits, "jax", traces=traces) == _run(Notes, edits, "cpu")
    assert traces[4:] == [traces[3] + 1] * 4


def test_a_count_beside_the_parameters_state_is_an_input_and_may_be_set() -> None:
    edits: dict[int, Edit] = {3: lambda o, ps: o.state.update(steps=10)}
    assert _run(CountsBeside, edits, "jax") == _run(CountsBeside, edits, "cpu")


def test_state_that_a_method_without_a_step_makes_is_made_once() -> None:
    found: list[Any] = []
    for device, wrap in (("cpu", lambda fn: fn), ("jax", spmd.compile)):
        parameters = [nn.Parameter(torch.arange(4.0).to(device))]
        optimizer = Curvature(parameters)

        def backward(p: torch.Tensor = parameters[0]) -> None:
            p.grad = None
            (p * p).sum().backward()

        def look(backward: Any = backward, optimizer: Any = optimizer) -> None:
            backward()
            optimizer.look()

        def step(backward: Any = backward, optimizer: Any = optimizer) -> None:
            backward()
            optimizer.step()

        run_look, run_step = wrap(look), wrap(step)
        for _ in range(3):
            run_look()
            run_step()
            found.append(_content(optimizer, parameters))
    assert found[3:] == found[:3]


LOOKS: dict[str, Callable[[Any, Any], Any]] = {
    "len": lambda o, p: len(o.state),
    "in": lambda o, p: p in o.state,
    "get": lambda o, p: sorted(o.state.get(p, ())),
    "item": lambda o, p: "exp_avg" in o.state[p],
    "state_dict": lambda o, p: sorted(o.state_dict()["state"]),
}


def test_state_that_is_looked_at_before_the_first_step_is_not_there_yet() -> None:
    found: list[Any] = []
    for device, wrap in (("cpu", lambda fn: fn), ("jax", spmd.compile)):
        for look in LOOKS.values():
            p = nn.Parameter(torch.arange(4.0).to(device))
            optimizer, seen = torch.optim.Adam([p], 0.1), []

            def step(p: Any = p, optimizer: Any = optimizer, seen: list[Any] = seen, look: Any = look) -> None:
                seen.append(look(optimizer, p))
                optimizer.zero_grad()
                (p * p).sum().backward()
                optimizer.step()

            run = wrap(step)
            for _ in range(3):
                run()
            found.append((seen, _content(optimizer, [p])))
    assert found[len(LOOKS) :] == found[: len(LOOKS)]


@pytest.mark.parametrize("make", [torch.optim.Adam, lambda ps, lr: torch.optim.SGD(ps, lr, momentum=0.9), torch.optim.RMSprop])
@pytest.mark.parametrize("has_closure", [False, True])
def test_a_parameter_without_a_gradient_has_no_state_for_code_after_the_step(make: Callable[..., Any], has_closure: bool) -> None:
    found: list[Any] = []
    for device, wrap in (("cpu", lambda fn: fn), ("jax", spmd.compile)):
        for look in (*LOOKS.values(), lambda o, p: [v["step"].item() for v in o.state.values() if "step" in v]):
            used, other = (nn.Parameter(torch.arange(4.0).to(device)) for _ in range(2))
            optimizer, seen, uses = make([used, other], 0.1), [], {"both": False}

            def backward(used: Any = used, other: Any = other, optimizer: Any = optimizer, uses: Any = uses) -> None:
                optimizer.zero_grad()
                ((used * used).sum() + (other.sum() if uses["both"] else 0)).backward()

            def step(other: Any = other, optimizer: Any = optimizer, backward: Any = backward, look: Any = look) -> Any:
                if has_closure:
                    optimizer.step(backward)
                else:
                    backward()
                    optimizer.step()
                return look(optimizer, other)

            run = wrap(step)
            for i in range(6):
                uses["both"] = i in (2, 3)
                if i == 4:
                    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2).to(device))]})
                seen.append((run(), sorted(optimizer.state_dict()["state"])))
            found.append((seen, _content(optimizer, [used, other])))
    half = len(found) // 2
    assert found[half:] == found[:half]


def _swap(optimizer: Any, ps: list[nn.Parameter]) -> None:
    optimizer.state[ps[0]], optimizer.state[ps[1]] = optimizer.state[ps[1]], optimizer.state[ps[0]]


def _rename(optimizer: Any, ps: list[nn.Parameter]) -> None:
    optimizer.state[ps[0]]["old"] = optimizer.state[ps[0]].pop("momentum_buffer")


@pytest.mark.parametrize(
    "edit",
    [
        _swap,
        _rename,
        lambda o, ps: o.state.__setitem__(ps[0], {"momentum_buffer": torch.ones_like(ps[0])}),
        lambda o, ps: o.state.__setitem__(ps[0], dict(o.state[ps[0]])),
        lambda o, ps: o.state[ps[1]].__setitem__("momentum_buffer", None),
        lambda o, ps: o.state.pop(ps[1]),
    ],
    ids=["swapped", "renamed", "replaced", "copied", "emptied", "taken away"],
)
def test_state_that_the_user_changes_between_two_calls_is_used(edit: Edit) -> None:
    def make(ps: Any) -> Any:
        return torch.optim.SGD(ps, 0.1, momentum=0.9)

    assert _run(make, {2: edit}, "jax", 5) == _run(make, {2: edit}, "cpu", 5)


class BornBeside(_Base):
    def amount(self, p: torch.Tensor) -> Any:
        if "mean" not in self.state:
            self.state["mean"] = torch.zeros_like(p)
        return self.state["mean"].add_(p.grad)


class BornUnderAName(_Base):
    def amount(self, p: torch.Tensor) -> Any:
        state = self.state["all"]
        state.setdefault("mean", torch.zeros_like(p))
        return state["mean"].add_(p.grad)


@pytest.mark.parametrize(("make", "place"), [(BornBeside, r"self\.state\['mean'\]"), (BornUnderAName, r"self\.state\['all'\]\['mean'\]")])
def test_a_tensor_of_the_state_that_no_parameter_owns_is_refused_where_it_is_made_inside(make: Callable[..., Any], place: str) -> None:
    with pytest.raises(spmd.TraceError, match=rf"(?s){place}.*fix: create it before the first step"):
        _run(make, {}, "jax", 1)


class StartsWith(_Base):
    """`start` makes the state in the first step, which then goes on with it."""

    def __init__(self, parameters: Any, start: Callable[[dict[str, Any], torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__(parameters)
        self.start = start

    def amount(self, p: torch.Tensor) -> Any:
        state = self.state[p]
        if not state:
            assert p.grad is not None
            self.start(state, p, p.grad)
        return state["m"].mul_(0.9)


def _filled_there(state: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
    state["m"] = torch.zeros_like(p)
    state["m"].fill_(0.5)


def _written_through_a_view(state: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
    state["m"] = torch.zeros_like(p)
    state["m"][0] = 0.5


# the last two are there before the first step, and the programs of the others are one more
STARTS: list[Callable[[dict[str, Any], torch.Tensor, torch.Tensor], None]] = [
    lambda state, p, grad: state.update(m=grad.clone()),
    lambda state, p, grad: state.update(m=grad.clone().neg_()),
    lambda state, p, grad: state.update(m=torch.zeros_like(p).copy_(grad.abs())),
    lambda state, p, grad: state.update(m=grad.norm().reciprocal()),
    lambda state, p, grad: state.update(m=torch.empty_like(p).fill_(0.5)),
    lambda state, p, grad: state.update(m=p.new().resize_as_(p).fill_(0.5)),
    lambda state, p, grad: state.update(m=torch.zeros_like(p).add_(0.5)),
    _filled_there,
    _written_through_a_view,
    lambda state, p, grad: state.update(m=torch.full_like(p, 0.5)),
    lambda state, p, grad: state.update(m=torch.ones(1, device=p.device).expand_as(p).clone()),
]


def test_state_starts_as_the_first_step_makes_it() -> None:
    def run(device: str) -> tuple[list[torch.Tensor], Any]:
        parameters = [nn.Parameter(torch.linspace(0.5, 1.5, 4).to(device)) for _ in STARTS]
        optimizers = [StartsWith([p], start) for p, start in zip(parameters, STARTS, strict=True)]

        def step() -> None:
            for p, optimizer in zip(parameters, optimizers, strict=True):
                optimizer.zero_grad()
                (p * p).sum().backward()
                optimizer.step()

        compiled = spmd.compile(step) if device == "jax" else step
        for _ in range(4):
            compiled()
        return [p.detach().cpu() for p in parameters], compiled

    (found, compiled), (expected, _) = run("jax"), run("cpu")
    for number, (got, want) in enumerate(zip(found, expected, strict=True)):
        torch.testing.assert_close(got, want, msg=lambda text, number=number: f"{number}: {text}")
    assert compiled.num_traces == 2


def test_state_that_needs_no_gradient_is_there_before_the_first_step() -> None:
    parameter = nn.Parameter(torch.ones(4, device="jax"))
    optimizer = StartsWith([parameter], STARTS[-1])

    @spmd.compile
    def step() -> None:
        optimizer.zero_grad()
        (parameter * parameter).sum().backward()
        optimizer.step()

    step(), step()
    assert step.num_traces == 1


class CountsOnTheCpu(_Base):
    """As MADGRAD is published."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters)
        self.state["k"] = torch.tensor([0])

    def amount(self, p: torch.Tensor) -> Any:
        self.state["k"] += 1
        return float(self.state["k"]) ** 0.5


class ShowsPartsOfOne(_Base):
    def amount(self, p: torch.Tensor) -> Any:
        state, parts = self.state[p], torch.stack([p.norm(), p.norm() * 2]).unbind()
        if not state:
            state["norm"], state["twice"] = parts if self.are_apart else (parts[0], parts[0])
        return state["norm"] + state["twice"]

    are_apart = True


class ShowsOneTwice(ShowsPartsOfOne):
    are_apart = False


def test_parts_of_a_tensor_become_state_of_their_own() -> None:
    assert _run(ShowsPartsOfOne, {}, "jax", 3) == _run(ShowsPartsOfOne, {}, "cpu", 3)


@pytest.mark.parametrize(
    ("make", "what"),
    [
        (CountsOnTheCpu, r"reads a CPU tensor of shape .* after writing to it in place"),
        (ShowsOneTwice, r"state\['twice'\].* shares memory with other state"),
    ],
)
def test_state_that_no_call_could_go_on_with_is_refused_by_name(make: Callable[..., Any], what: str) -> None:
    with pytest.raises(spmd.TraceError, match=what):
        _run(make, {}, "jax", 3)


class TwoLayers(nn.Module):
    """A model whose second layer runs only if it is switched on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.is_deep = nn.Linear(4, 4), nn.Linear(4, 4), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        return self.second(x) if self.is_deep else x


@pytest.mark.parametrize(
    "make", [lambda p: torch.optim.AdamW(p, 0.1), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)], ids=["AdamW", "SGD"]
)
def test_parameters_without_a_gradient_have_no_state_as_on_the_cpu(make: Any) -> None:
    def run(device: str, wrap: Any) -> list[Any]:
        torch.manual_seed(0)
        model = TwoLayers().to(device)
        optimizer, x = make(model.parameters()), torch.ones(2, 4).to(device)
        step, seen = wrap(lambda x: descend(model, optimizer, x)), list[Any]()
        for model.is_deep in (False, False, True, True, False):
            seen.append((step(x), copy.deepcopy(optimizer.state_dict()["state"])))
        return seen

    assert_same(run("jax", spmd.compile), run("cpu", lambda fn: fn))


@pytest.mark.multidevice(num=8)
def test_state_follows_a_parameter_that_is_marked_again(mesh_4x2: mesh.Mesh) -> None:
    host, layer = nn.Linear(8, 6), nn.Linear(8, 6)
    layer.load_state_dict(host.state_dict())
    layer.to("jax")
    optimizers = [torch.optim.AdamW(module.parameters()) for module in (host, layer)]

    def step(module: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = module(x).square().sum()
        loss.backward()
        optimizer.step()
        return loss.detach()

    compiled = spmd.compile(lambda x: step(layer, optimizers[1], x))
    x = batch(8, 8)
    on_device = spmd.mark_sharding(x.to("jax"), mesh_4x2, ("data", None))
    for spec in (("model", None), ("model", None), (None, "data"), ("data", "model"), None, None, ("model", None)):  # 6 rows over 4: padded
        if spec is None:
            spmd.clear_sharding(layer.weight)
        else:
            spmd.mark_sharding(layer.weight, mesh_4x2, spec)
        assert_same(compiled(on_device), step(host, optimizers[0], x))
        state = optimizers[1].state[layer.weight]
        for value in (state["exp_avg"], state["exp_avg_sq"]):
            assert tuple(spmd.XLAShardedTensor(value).partition_spec) == (spec or (None, None))
        assert_same(layer.weight.detach(), host.weight.detach())


@pytest.mark.multidevice(num=8)
def test_state_that_was_marked_itself_keeps_its_mark(mesh_4x2: mesh.Mesh) -> None:
    layer = nn.Linear(8, 8).to("jax")
    spmd.mark_sharding(layer.weight, mesh_4x2, ("data", None))
    optimizer = torch.optim.SGD(layer.parameters(), momentum=0.9)

    @spmd.compile
    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        layer(x).sum().backward()
        optimizer.step()

    x = spmd.mark_sharding(batch(8, 8).to("jax"), mesh_4x2, ("data", None))
    step(x)
    momentum = optimizer.state[layer.weight]["momentum_buffer"]
    spmd.mark_sharding(momentum, mesh_4x2, (None, "model"))
    spmd.mark_sharding(layer.weight, mesh_4x2, ("model", None))
    step(x)
    assert tuple(momentum.partition_spec) == (None, "model") and tuple(layer.weight.partition_spec) == ("model", None)


@pytest.mark.multidevice(num=8)
def test_another_sharding_of_the_state_is_used_from_the_next_step_on(mesh_4x2: mesh.Mesh) -> None:
    host, device = nn.Linear(8, 8), nn.Linear(8, 8).to("jax")
    host.load_state_dict({key: value.cpu() for key, value in device.state_dict().items()})
    optimizers = [torch.optim.Adam(m.parameters(), lr=1e-2) for m in (host, device)]
    spmd.mark_sharding(device.weight, mesh_4x2, ("model", None))
    step = spmd.compile(lambda x: descend(device, optimizers[1], x))
    specs: list[Any] = [("model", None), (None, "data"), ("data", "model")]
    for spec in specs:
        if spec is not specs[0]:
            spmd.set_state_sharding(device.weight, mesh_4x2, spec)
        for seed in range(2):
            x = batch(8, 8, seed=seed)
            assert_same(step(spmd.mark_sharding(x.to("jax"), mesh_4x2, ("data", None))), descend(host, optimizers[0], x))
            assert tuple(spmd.to_jax(optimizers[1].state[device.weight]["exp_avg"]).sharding.spec) == spec
    assert_same_model(device, host)
    assert step.num_traces == 3
    assert "the optimizer's state of a parameter of shape [8, 8] changed" in str(step.retraces[0])


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize(("value", "text"), [(torch.zeros(8), "a tensor on cpu that is no parameter"), (3, "3")], ids=["tensor", "number"])
def test_only_a_parameter_has_state_with_a_sharding(value: Any, text: str, mesh_4x2: mesh.Mesh) -> None:
    with pytest.raises(spmd.SpmdError, match=f"set_state_sharding takes a parameter, got {text}\n"):
        spmd.set_state_sharding(value, mesh_4x2, ("data",))
    assert not getattr(value, "__dict__", {})
