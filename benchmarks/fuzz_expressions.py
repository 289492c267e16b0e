"""The declarations of the programs of `make fuzz`, and expressions that use them: numbers, conditions and vectors."""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks.fuzz_places import CONTAINERS, KINDS, QUEUES, TENSOR_KINDS, Kind

Block = list[str]
Table = dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]]


class Expressions:
    """Generates the declarations of a program and expressions that read them. Every choice is drawn from `rng`."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.rng = random.Random(seed)
        self.classes: dict[str, None] = {}
        self.declared: Block = []
        self.helpers: Block = []
        self.variables: list[str] = []  # names that need a `global` statement
        self.roots: list[str] = []
        self.ints: list[tuple[str, Kind]] = []
        self.floats: list[tuple[str, Kind]] = []
        self.flags: list[tuple[str, Kind]] = []
        self.texts: list[tuple[str, Kind]] = []
        self.vectors: list[tuple[str, Kind]] = []
        self.bags: list[tuple[str, str]] = []
        self.queues: list[tuple[str, str]] = []
        self.matrices: list[str] = []
        self.local_ints: list[str] = []
        self.calls: list[str] = []  # expressions that call helpers on a tensor
        self.log = ("", Kind("", (), ()))
        self.model = ""
        self.kept = ""
        self.has_batch = False
        self.depth = 0

    # drawing

    def one(self, *choices: str) -> str:
        return self.rng.choice(choices)

    def chance(self, probability: float) -> bool:
        return self.rng.random() < probability

    def new(self, prefix: str) -> str:
        name = f"{prefix}{len(self.roots)}"
        self.roots.append(name)
        return name

    def use(self, *names: str) -> None:
        self.classes.update(dict.fromkeys(names))
        if "Child" in names:
            self.classes["Child"] = None

    # state

    def place(self, value: str, kinds: tuple[str, ...] = tuple(KINDS)) -> tuple[str, Kind]:
        kind = KINDS[self.rng.choice(kinds)]
        name = self.new("s")
        self.use(*kind.uses)
        self.declared.append(kind.declare.format(n=name, v=value))
        if kind.is_variable:
            self.variables.append(name)
        if "_get, " in kind.declare:
            self.roots[-1] = f"{name}_get()"
        return name, kind

    def declare(self) -> None:
        r = self.rng
        self.ints = [self.place(str(r.randrange(4))) for _ in range(r.randint(1, 3))]
        self.floats = [self.place(str(r.choice((0.5, 1.0, 0.25)))) for _ in range(r.randint(1, 2))]
        self.log = self.place("0.0")
        self.flags = [self.place(self.one("True", "False"))] if self.chance(0.5) else []
        self.texts = [self.place(self.one("'warm'", "'train'"))] if self.chance(0.3) else []
        for _ in range(r.randint(0, 2)):
            self.bags.append((self.container("b", CONTAINERS), self.last))
        for _ in range(r.randint(0, 2)):
            self.queues.append((self.container("q", QUEUES), self.last))
        for _ in range(r.randint(0, 2)):
            self.vectors.append(self.place(f"tensor({r.randrange(99)}, 8)", TENSOR_KINDS))
        for _ in range(r.randint(0, 1)):
            name = self.new("m")
            self.declared.append(f"{name} = tensor({r.randrange(99)}, 4, 8)")
            self.matrices.append(name)
            if self.chance(0.4):
                self.vectors.append(self.view_of(name))
        if self.chance(0.4):
            self.kept = self.new("kept")
            self.use("Box")
            self.declared.append(f"{self.kept} = []")
            self.has_batch = self.chance(0.6)
        if self.chance(0.4):
            self.declare_model()
        if self.chance(0.25):
            self.use("Meter")
            name = self.new("meter")
            self.declared.append(f"{name} = Meter()")
            self.floats.append(
                (name, Kind("", (f"{name}.average", f"{name}.total"), (f"{name}.update({{e}})", f"{name}.update({{e}}, n=2)")))
            )
        if len(self.vectors) > 1 and self.chance(0.3):
            (a, first), (b, second) = self.vectors[:2]
            self.declared.append(second.writes[0].format(n=b, e=first.reads[0].format(n=a)))

    def container(self, prefix: str, table: Table) -> str:
        self.last = self.rng.choice(tuple(table))
        name = self.new(prefix)
        if "Box(" in table[self.last][0]:
            self.use("Box")
        self.declared.append(table[self.last][0].format(n=name))
        if self.chance(0.25) and table[self.last][0].startswith("{n} ="):  # stored in an object instead of a global variable
            self.use("Box")
            self.declared.append(f"{name} = Box({name})")
            return f"{name}.value"
        return name

    def view_of(self, matrix: str) -> tuple[str, Kind]:
        name = self.new("w")
        self.declared.append(f"{name} = {matrix}[{self.rng.randrange(4)}]")
        return name, Kind("", ("{n}",), ("{n}.copy_({e})", "{n}.mul_(0.5).add_({e})"))

    def declare_model(self) -> None:
        self.model = "model"
        self.roots.append("model")
        kind = self.one("linear", "counting", "norm")
        if kind == "counting":
            self.use("Counting")
            self.declared.append("model = Counting()")
            self.ints.append(("model", Kind("", ("{n}.calls", "len({n}.seen)"), ("{n}.calls = {e}",))))
            self.floats.append(("model", Kind("", ("{n}.gain",), ("{n}.gain = {e}",))))
        elif kind == "linear":
            self.declared.append("model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))")
        else:
            # without a bias: before a batch norm, the gradient of a bias consists only of rounding errors
            self.declared.append("model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.BatchNorm1d(8))")
        self.declared.append(f"fill(model, {self.rng.randrange(99)})")
        rule = self.one(
            "SGD(model.parameters(), lr=0.1)", "SGD(model.parameters(), lr=0.1, momentum=0.9)", "Adam(model.parameters(), lr=0.05, eps=0.1)"
        )
        self.declared.append(f"opt = torch.optim.{rule}")
        self.roots.append("opt")
        self.floats.append(("opt", Kind("", ("{n}.param_groups[0]['lr']",), ("{n}.param_groups[0]['lr'] = 0.01 + 0.05 * abs({e}) % 0.2",))))
        if self.chance(0.4):
            rule = self.one("StepLR(opt, 2, 0.5)", "LambdaLR(opt, lambda e: 1 / (1 + e))", "CosineAnnealingLR(opt, 10)")
            self.declared.append(f"sched = torch.optim.lr_scheduler.{rule}")
        if self.chance(0.4):
            name = self.new("hooked")
            self.declared.append(
                f"{name} = [0]\ndef on_forward(module, args, out):\n    {name}[0] += 1\n    return out * (1.0 if {name}[0] % 2 else 0.5)"
            )
            self.declared.append(
                f"{self.one('model', 'model[0]') if kind != 'counting' else 'model.lin'}.register_forward_hook(on_forward)"
            )
            self.ints.append((name, Kind("", ("{n}[0]",), ("{n}[0] = {e}",))))

    # expressions

    def read(self, places: list[tuple[str, Kind]]) -> str:
        name, kind = self.rng.choice(places)
        return self.rng.choice(kind.reads).format(n=name)

    def integer(self, depth: int = 2) -> str:
        sized = [name for name, kind in self.queues if kind != "tuple"]
        simple: list[Callable[[], str]] = [
            *([lambda: self.read(self.ints)] * 4),
            lambda: str(self.rng.randrange(4)),
            lambda: "k",
            *([lambda: self.rng.choice(self.local_ints)] * (2 if self.local_ints else 0)),
            *([self.count] * (2 if self.bags else 0)),
            *([lambda: f"len({self.rng.choice(sized)})"] if sized else []),
        ]
        if depth <= 0 or self.chance(0.4):
            return self.rng.choice(simple)()
        a, b = (lambda: self.integer(depth - 1)), (lambda: self.integer(depth - 1))
        return self.rng.choice(
            (
                lambda: f"({a()} + {b()})",
                lambda: f"({a()} - {b()})",
                lambda: f"({a()} % {self.rng.randint(2, 4)})",
                lambda: f"({a()} * 2)",
                lambda: f"({a()} // 2)",
                lambda: f"min({a()}, {b()})",
                lambda: f"max({a()}, {b()})",
                lambda: f"abs({a()})",
                lambda: f"({a()} if {self.condition(0)} else {b()})",
                lambda: f"int({self.condition(0)})",
                lambda: f"int({self.number(depth - 1)})",
            )
        )()

    def count(self) -> str:
        name, kind = self.rng.choice(self.bags)
        return self.rng.choice(CONTAINERS[kind][1]).format(n=name, i=self.index(), e=1)

    def index(self) -> str:
        return self.one(str(self.rng.randrange(4)), f"{self.read(self.ints)} % 4", "k % 4", "1")

    def number(self, depth: int = 2) -> str:
        if depth <= 0 or self.chance(0.35):
            return self.rng.choice((lambda: self.read(self.floats), lambda: self.read(self.floats), lambda: "0.5", lambda: "gain"))()
        a, i = (lambda: self.number(depth - 1)), (lambda: self.integer(depth - 1))
        return self.rng.choice(
            (
                lambda: f"({a()} * 0.5 + {a()})",
                lambda: f"({i()} * 0.1)",
                lambda: f"math.tanh({a()})",
                lambda: f"min(1.0, {i()} / 10)",
                lambda: f"float({i()})",
                lambda: f"round({a()}, 2)",
                lambda: f"({a()} if {self.condition(0)} else {a()})",
                lambda: f"1 / (1 + abs({i()}))",
                lambda: f"({a()} - {a()})",
                lambda: f"0.9 ** abs({i()})",
            )
        )()

    def condition(self, depth: int = 1) -> str:
        kinds: list[Callable[[], str]] = [
            lambda: f"{self.integer(0)} {self.one('>', '<', '==', '>=', '!=')} {self.rng.randrange(4)}",
            lambda: f"{self.read(self.ints)} % {self.rng.randint(2, 3)} == {self.rng.randrange(2)}",
            lambda: f"{self.number(0)} > 0.6",
            lambda: "flag",
            lambda: "x.shape[0] == 4",
            *([lambda: self.read(self.flags), lambda: f"not {self.read(self.flags)}"] * (2 if self.flags else 0)),
            *(
                [lambda: f"{self.read(self.texts)} == 'warm'", lambda: f"{self.read(self.texts)} in ('train', 'cool')"]
                if self.texts
                else []
            ),
            *(
                [lambda: self.rng.choice(self.bags)[0]]
                if self.bags and self.bags[0][1] not in ("numbers",) and self.bags[-1][1] != "numbers"
                else []
            ),
            *([lambda: "model.training"] if self.model else []),
        ]
        if depth and self.chance(0.3):
            return f"({self.condition(0)} {self.one('and', 'or')} {self.condition(0)})"
        return self.rng.choice(kinds)()

    def vector(self, depth: int = 2) -> str:
        simple: list[Callable[[], str]] = [
            lambda: "h.mean(0)",
            lambda: "h[0]",
            lambda: "(h[-1] * 1)",
            lambda: f"torch.full((8,), {self.number(1)}, device=x.device)",
            *([lambda: self.read(self.vectors)] * (4 if self.vectors else 0)),
            *([self.queued] * (3 if self.queues else 0)),
            *([self.row] * (2 if self.matrices else 0)),
            *([lambda: "(model.mean * 1)"] if "Counting" in self.classes and self.model else []),
        ]
        if depth <= 0 or self.chance(0.4):
            return self.rng.choice(simple)()
        a = lambda: self.vector(depth - 1)  # noqa: E731
        return self.rng.choice(
            (
                lambda: f"({a()} * {self.number(1)})",
                lambda: f"({a()} + {a()})",
                lambda: f"torch.tanh({a()})",
                lambda: f"{a()}.clone()",
                lambda: f"{a()}.flip(0)",
                lambda: f"{a()}.roll({self.integer(1)})",
                lambda: f"({a()} - {self.integer(1)} * 0.1)",
                lambda: f"torch.where({a()} > 0, {a()}, {self.number(1)})",
                lambda: f"torch.lerp({a()}, {a()}, {self.number(0)})",
                lambda: f"{a()}.clamp(max={self.number(0)})",
                lambda: f"(torch.arange(8, device=x.device) * {self.number(1)})",
                lambda: f"({a()} if {self.condition(0)} else {a()})",
                *([lambda: self.rng.choice(self.calls).format(t=a())] * (2 if self.calls else 0)),
            )
        )()

    def queued(self) -> str:
        name, kind = self.rng.choice(self.queues)
        return "(" + self.rng.choice(QUEUES[kind][1]).format(n=name, i=self.index(), z="torch.zeros(8, device=x.device)") + ")"

    def row(self) -> str:
        name = self.rng.choice(self.matrices)
        return self.one(
            f"{name}[{self.integer(1)} % 4]", f"{name}.mean(0)", f"{name}[{self.index()}]", f"{name}[1:3].sum(0)", f"{name}[-1]"
        )

    def stored(self) -> str:
        """An expression for a vector of bounded values without a graph, to be stored."""
        return self.one(
            f"torch.tanh({self.vector(1)})",
            f"{self.vector(0)}.clone().clamp(-2, 2)",
            f"(torch.tanh({self.vector(2)}) * 0.5)",
            "torch.tanh(h[0])",
            "h[0]",
            "v",
        )


__all__ = ["Block", "Expressions"]
