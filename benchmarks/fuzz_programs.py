"""Generates small random programs with Python state as source text. The program of a seed is the same on every machine.

    print(source(17))

A program is a module with state in all kinds of places (`fuzz_places`), helpers, the function `step(x, ...)`, which is compiled, the
function `between(i)`, which changes the state before call i, and the function `given(i)`, which returns the arguments of call i. `STATE`
lists the state that is compared after each call. The caller (`fuzz_trials`) defines `tensor(seed, *shape)` and `fill(model, seed)`.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable

from benchmarks.fuzz_expressions import Block, Expressions
from benchmarks.fuzz_places import CLASSES, CONTAINERS, QUEUES, Kind

NUM_CALLS = 6
LAZY = 1_000_000
"""Seeds from LAZY on run the programs of seed - LAZY under `spmd.lazy()` instead of compiled."""
_IMPORTS = """import collections, contextvars, dataclasses, functools, math, types
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F"""


def source(seed: int) -> str:
    """The source text of a seed's program."""
    return _Program(seed).text()


def _indented(lines: Block) -> Block:
    return ["    " + part for line in lines for part in line.split("\n")]


class _Program(Expressions):
    """Generates one program."""

    # statements

    def write_number(self) -> Block:
        choice = self.rng.random()
        if choice < 0.45 or not self.floats:
            name, kind = self.rng.choice(self.ints)
            old = self.rng.choice(kind.reads).format(n=name)
            value = self.one(f"{old} + 1", f"{old} + 1", f"({old} + {self.integer(1)}) % 11", f"{self.integer(2)} % 7")
            if "{n} = {e}" in kind.writes and self.chance(0.3):
                return [f"{name} += 1"]
        elif choice < 0.75:
            name, kind = self.rng.choice(self.floats)
            old = self.rng.choice(kind.reads).format(n=name)
            value = self.one(
                f"0.9 * {old} + 0.1", f"max(-2.0, min(2.0, {self.number(2)}))", f"{old} * 0.5", f"min(1.5, {old} + {self.number(0)} * 0.1)"
            )
            if self.chance(0.15):
                return self.item()
        elif self.flags and choice < 0.9:
            name, kind = self.rng.choice(self.flags)
            value = self.one(f"not {self.rng.choice(kind.reads).format(n=name)}", f"bool({self.condition(1)})")
        elif self.texts:
            name, kind = self.rng.choice(self.texts)
            value = self.one(
                f"'train' if {self.condition(0)} else 'warm'",
                f"'cool' if {self.rng.choice(kind.reads).format(n=name)} == 'warm' else 'warm'",
            )
        else:
            return [f"v = {self.vector(1)}"]
        return [self.rng.choice(kind.writes).format(n=name, e=value)]

    def item(self) -> Block:
        """Store a number read from the device in a place that the step does not read, because its value is known only after the call."""
        value = self.one("v.mean().item()", "h[0, 0].item()", "v.sum().item()")
        name, kind = self.log
        old = self.rng.choice(kind.reads).format(n=name)
        return [self.rng.choice(kind.writes).format(n=name, e=f"0.5 * {old} + 0.1 * {value}")]

    def keep(self) -> Block:
        """Store values that the call creates or receives: objects, functions, nested containers."""
        name = self.kept
        choices = [
            f"{name}.append(Box({self.integer(1)}))",
            f"{name}[-1:] = [{{'t': {self.stored()}, 'n': {self.integer(1)}}}]",
            f"{name}.append(({self.stored()}, [{self.integer(0)}]))",
            f"{name}.append({{{self.integer(0)}, 70}})",
            f"number = {self.integer(1)}\n{name}.append(lambda: number * 2)",
            f"{name}.append({name}[-1] if {name} else None)",
            f"pair = [{self.stored()}]\n{name}.append(pair)\n{name}.append([pair, {self.integer(0)}])",
            f"for held in {name}:\n    if isinstance(held, Box):\n        held.value += 1",
            f"v = v + sum(held() for held in {name} if callable(held)) % 5 * 0.1",
            f"v = v + sum(held.value for held in {name} if isinstance(held, Box)) % 5 * 0.1",
            f"v = v + sum(held['n'] for held in {name} if isinstance(held, dict)) % 5 * 0.1",
            f"match {name}[-1] if {name} else None:\n    case Box(value=int(n)) if n > 1:\n        h = h + n % 3\n"
            f"    case {{'t': t}}:\n        v = v + t",
            f"del {name}[:-3]",
        ]
        if self.has_batch and self.depth < 2:
            choices += [
                f"if batch is not None:\n    {name}.append(batch)",
                "if batch is not None:\n    batch['log'].append(v)\n    v = v + batch['x'].mean(0)",
                f"if batch is not None:\n    batch['n'] = {self.integer(1)}\n    batch['x'] = batch['x'] * 0.5",
                "if batch is not None:\n    batch['x'].add_(0.5)",
                f"if batch is not None and 'n' in batch:\n    v = v + batch['n'] * {self.number(0)}",
            ]
        return [self.rng.choice(choices)]

    def write_container(self) -> Block:
        if not self.bags:
            return self.write_number()
        name, kind = self.rng.choice(self.bags)
        return [self.rng.choice(CONTAINERS[kind][2]).format(n=name, e=f"{self.integer(1)} % 9", i=self.index())]

    def write_queue(self) -> Block:
        if not self.queues:
            return self.write_vector()
        name, kind = self.rng.choice(self.queues)
        return [self.rng.choice(QUEUES[kind][2]).format(n=name, t=self.stored(), i=self.index())]

    def write_vector(self) -> Block:
        if not self.vectors:
            return self.update()
        name, kind = self.rng.choice(self.vectors)
        old, new = self.rng.choice(kind.reads).format(n=name), self.stored()
        in_place = self.one(
            f"{old}.mul_(0.5).add_({new})",
            f"{old}.copy_({new})",
            f"{old}[{self.index()}] = {self.number(0)}",
            f"{old}[:4] = {new}[4:]",
            f"{old}.add_({self.number(0)}).clamp_(-2, 2)",
            f"{old}[::2].mul_(0.5)",
            f"{old}.view(2, 4)[0].fill_({self.number(0)})",
        )
        return [in_place] if self.chance(0.5) else [self.rng.choice(kind.writes).format(n=name, e=new)]

    def write_matrix(self) -> Block:
        if not self.matrices:
            return self.write_vector()
        name = self.rng.choice(self.matrices)
        i = f"{self.integer(1)} % 4"
        return [
            self.one(
                f"{name}[{i}] = {self.stored()}",
                f"{name}[{self.index()}].mul_(0.5)",
                f"{name}.mul_(0.5)",
                f"{name}[:, {self.rng.randrange(8)}] = {self.number(0)}",
                f"{name}[1:3] = {name}[0:2] * 0.5",
                f"{name}.t()[0].add_(0.25).clamp_(-2, 2)",
                f"ptr = {self.read(self.ints)} % 3\n{name}[ptr:ptr + 2] = h[:2]",
            )
        ]

    def update(self) -> Block:
        return [
            self.one(
                f"h = torch.tanh(h * {self.number(1)})",
                f"h = h + {self.vector(1)}",
                f"h = h * (1 + 0.1 * {self.integer(1)} % 5)",
                f"v = {self.vector(2)}",
                f"v = {self.vector(2)}",
                f"w = h.clone()\nw[0] = {self.vector(1)}\nw[:, {self.rng.randrange(8)}] *= {self.number(0)}\nh = w",
                f"w = h.clone().view(-1)\nw[2:6].add_({self.number(0)})\nh = w.view(h.shape)",
                f"h = torch.roll(h, {self.integer(1)}, 1)",
                f"h = torch.cat([h[1:], h[:1]]) + {self.number(1)}",
                f"h = h - h.mean(0, keepdim=True) * {self.number(1)}",
            )
        ]

    def branch(self) -> Block:
        body, other = self.block(self.rng.randint(1, 2)), self.block(1)
        lines = [f"if {self.condition()}:", *_indented(body)]
        if self.chance(0.3):
            lines += [f"elif {self.condition()}:", *_indented(self.block(1))]
        return [*lines, "else:", *_indented(other)] if self.chance(0.5) else lines

    def loop(self) -> Block:
        name = f"i{self.depth}"
        heads = [
            f"for {name} in range({self.integer(1)} % 3):",
            f"for {name} in range(2):",
            f"for {name}, t{self.depth} in enumerate(h[:2]):",
        ]
        heads += [f"for {name} in list({n}):" for n, kind in self.bags if kind in ("list", "deque", "set", "dict")]
        head = self.rng.choice(heads)
        self.local_ints.append(name)
        body = self.block(self.rng.randint(1, 2))
        self.local_ints.remove(name)
        return [head, *_indented(body)]

    def guarded(self) -> Block:
        kind = self.one("try", "no_grad", "grad", "nested", "while", "match", "flagged", "comprehension")
        if kind == "try":
            name = self.rng.choice(self.bags)[0] if self.bags else "{}"
            return [
                "try:",
                *_indented([f"h = h * (1 + 0.1 * ({name}[{self.integer(0)}] % 3))"]),
                "except (KeyError, IndexError, TypeError):",
                *_indented(self.block(1)),
            ]
        if kind in ("no_grad", "grad"):
            return [
                "with torch.no_grad():" if kind == "no_grad" else f"with torch.set_grad_enabled(bool({self.condition(0)})):",
                *_indented(self.block(2)),
            ]
        if kind == "nested":
            name = f"inner{self.rng.randrange(1000)}"
            return [
                f"def {name}(t, scale={self.number(0)}, *rest, **more):",
                *_indented(
                    [
                        "nonlocal h",
                        f"h = h + {self.integer(0)} * 0.1",
                        f"return torch.tanh(t) * scale + len(rest) + more.get('a', {self.number(0)})",
                    ]
                ),
                f"v = {name}(v{self.one('', ', 0.5', ', 0.5, 1, 2', ', a=' + self.number(0), ', scale=gain')})",
            ]
        if kind == "while":
            return [f"n = {self.integer(1)} % 4", "while n > 0:", *_indented(["n -= 1", *self.block(1)])]
        if kind == "match":
            return [
                f"match {self.integer(1)} % 3:",
                *_indented(
                    [
                        "case 0:",
                        *_indented(self.block(1)),
                        "case 1 | 5:",
                        *_indented(self.block(1)),
                        "case other:",
                        *_indented([f"h = h + other * {self.number(0)}"]),
                    ]
                ),
            ]
        if kind == "comprehension":
            return [f"v = sum([h[i % 4] * {self.number(0)} for i in range({self.integer(0)} % 3)], v)"]
        return [
            f"found = {self.integer(1)}",
            f"if (size := found % 3) > 1 and {self.condition(0)}:",
            *_indented([f"h = h * size + {self.number(0)}"]),
        ]

    def train(self) -> Block:
        if not self.model:
            return self.update()
        lines = ["opt.zero_grad()", f"loss = (model(h.detach()) * {self.number(0)} - {self.vector(0)}.detach()).square().mean()"]
        if self.chance(0.2):
            lines.append(f"loss = loss + {self.number(0)} * sum(p.square().sum() for p in model.parameters())")
        lines.append("if loss.requires_grad:\n    loss.backward()")
        if self.chance(0.2):
            lines.append(f"torch.nn.utils.clip_grad_norm_(model.parameters(), {self.one('1.0', '0.1 + abs(' + self.number(0) + ')')})")
        lines.append("opt.step()")
        if any("sched = " in d for d in self.declared) and self.chance(0.7):
            lines.append("sched.step()")
        lines += self.item() if self.chance(0.3) else [self.one("v = v + loss.detach()", "v = v * 0.5 + loss.detach()")]
        return lines

    def block(self, num: int) -> Block:
        if self.depth > 2:
            return self.update()
        self.depth += 1
        lines: Block = []
        for _ in range(num):
            make = self.rng.choice(
                (
                    *([self.write_number] * 5),
                    *([self.write_container] * 3),
                    *([self.keep] * (2 if self.kept else 0)),
                    *([self.write_queue] * 3),
                    *([self.write_vector] * 3),
                    *([self.write_matrix] * 2),
                    *([self.update] * 4),
                    *([self.branch] * 3),
                    self.loop,
                    *([self.guarded] * 2),
                )
            )
            lines += make()
        self.depth -= 1
        return lines

    def helper(self, number: int) -> None:
        name = f"helper{number}"
        body = [
            "batch = None",
            f"h = t.expand(4, 8) * {self.number(0)}",
            "v = t",
            *self.block(self.rng.randint(1, 3)),
            f"return torch.tanh(v + h.mean(0)) * {self.number(0)}",
        ]
        lines = [f"def {name}(t, k=1, gain=1.0, flag=False):", *_indented([*self.globals(), "x = t", *body])]
        if self.chance(0.2):
            self.helpers.append("@torch.no_grad()")
        self.helpers += lines
        self.calls.append(f"{name}({{t}}{self.one('', ', k=k', ', gain=gain', ', ' + self.read(self.ints))})")

    def globals(self) -> Block:
        names = [*self.variables, *(n for n, _ in (*self.bags, *self.queues) if n.isidentifier())]  # `n += [...]` stores to a name
        return [f"global {', '.join(names)}"] if names else []

    # the driver

    def mutation(self) -> Block:
        choices: list[Callable[[], Block]] = [
            lambda: [self.put(self.ints, str(self.rng.randrange(6)))],
            lambda: [self.put(self.ints, f"{self.read(self.ints)} + 1")],
            lambda: [self.put(self.floats, str(self.rng.choice((0.5, 1.5, -0.0, 0.25))))],
            *([lambda: [self.put(self.flags, self.one("True", "False"))]] if self.flags else []),
            *([lambda: [self.put(self.texts, self.one("'warm'", "'train'", "'cool'"))]] if self.texts else []),
            *(
                [
                    lambda: [
                        self.rng.choice(CONTAINERS[(b := self.rng.choice(self.bags))[1]][2]).format(
                            n=b[0], e=str(self.rng.randrange(5)), i=str(self.rng.randrange(4))
                        )
                    ]
                ]
                * 2
                if self.bags
                else []
            ),
            *([self.rebound] if self.bags or self.queues else []),
            *(
                [
                    lambda: [
                        self.rng.choice(QUEUES[(q := self.rng.choice(self.queues))[1]][2]).format(
                            n=q[0], t=self.made(), i=str(self.rng.randrange(4))
                        )
                    ]
                ]
                * 2
                if self.queues
                else []
            ),
            *(
                [
                    lambda: [self.put(self.vectors, self.made())],
                    lambda: [f"{self.read(self.vectors)}.mul_(0.5)"],
                    lambda: [f"{self.read(self.vectors)}[1] = 0.75"],
                ]
                if self.vectors
                else []
            ),
            *([lambda: [f"{self.rng.choice(self.matrices)}[2].fill_(0.5)"]] if self.matrices else []),
            *(
                [
                    lambda: [self.one("model.eval()", "model.train()")],
                    lambda: ["next(model.parameters()).requires_grad_(False)"],
                    lambda: ["opt.param_groups[0]['lr'] *= 0.5"],
                ]
                if self.model
                else []
            ),
            *(
                [lambda: [f"helper0 = {self.one('lambda t, *a, **o: t * 0.5', 'lambda t, k=1, gain=2.0, flag=True: t * k * 0.1 + gain')}"]]
                if self.calls
                else []
            ),
            *([lambda: self.aliased()] if len(self.vectors) > 1 else []),
            *([lambda: ["raw_step(*given(i)[0], **given(i)[1])"]] if self.chance(0.3) else []),
        ]
        return self.rng.choice(choices)()

    def aliased(self) -> Block:
        (a, first), (b, second) = self.rng.sample(self.vectors, 2)
        return [second.writes[0].format(n=b, e=first.reads[0].format(n=a))]

    def made(self) -> str:
        return f"tensor({self.rng.randrange(99)}, 8)"

    def put(self, places: list[tuple[str, Kind]], value: str) -> str:
        name, kind = self.rng.choice(places)
        return self.rng.choice(kind.writes).format(n=name, e=value)

    def rebound(self) -> Block:
        """Replace a container by an equal copy, or by its initial value."""
        name, kind = self.rng.choice([*self.bags, *self.queues])
        table = CONTAINERS if (name, kind) in self.bags else QUEUES
        first = table[kind][0].partition(" = ")[2].format()
        copied = {"list": f"list({name})", "dict": f"dict({name})", "set": f"set({name})", "pairs": f"list({name})"}.get(kind)
        return [f"{name} = {copied if copied and self.chance(0.6) else first}"]

    def text(self) -> str:
        self.declare()
        for number in range(self.rng.randint(0, 2)):
            self.helper(number)
        body = [*self.globals(), "h = x * 1.0" if self.chance(0.8) else "h = x", "v = h.mean(0)", *self.block(self.rng.randint(2, 5))]
        if self.model and self.chance(0.85):
            body += self.train()
        body += self.block(self.rng.randint(1, 3))
        if self.chance(0.08):
            body += [f"if {self.integer(1)} > 8:", f"    raise {self.one('ValueError', 'KeyError', 'RuntimeError')}('mine')"]
        body += [f"return {self.returned()}"]
        betweens: Block = []
        for i in range(1, NUM_CALLS):
            lines = [line for _ in range(self.rng.randint(0, 2)) for line in self.mutation()]
            if lines:
                betweens += [f"if i == {i}:", *_indented(lines)]
        names = sorted(
            {n.partition(".")[0] for n, _ in (*self.bags, *self.queues)} | set(self.variables) | ({"helper0"} if self.calls else set())
        )
        scope = [f"global {', '.join(names)}"] if names else []
        roots = ", ".join(repr(n) for n in self.roots)
        parts = [
            f"# seed {self.seed}",
            _IMPORTS,
            *(CLASSES[c] for c in self.classes),
            *self.declared,
            "\n".join(self.helpers),
            "\n".join(["def step(x, k=1, gain=1.0, *, flag=False, batch=None):", *_indented(body)]),
            "\n".join(["@torch.no_grad()", "def between(i):", *_indented([*scope, *betweens, "return None"])]),
            "\n".join(["def given(i):", *_indented(self.arguments())]),
            f"STATE = [{roots}]",
        ]
        return "\n".join(p for p in parts if p) + "\n"

    def returned(self) -> str:
        parts = [self.one("h", "v", "h.sum()"), self.one("v", "h[0]", self.vector(1), "h.t()")]
        if self.chance(0.4):
            parts.append(self.one(self.integer(1), self.number(1), "x", "None"))
        if self.chance(0.2) and self.vectors:
            parts.append(self.read(self.vectors))
        if self.chance(0.15) and self.has_batch:
            parts.append("batch")
        if self.chance(0.15) and self.kept:
            parts.append(self.one(self.kept, f"[{self.kept}, v]"))
        if self.chance(0.15):
            parts.append(f"{{'a': {self.vector(0)}, 'b': [{self.integer(0)}, v]}}")
        return ", ".join(parts)

    def arguments(self) -> Block:
        size = self.one("4", "4", "4", "4 if i != 3 else 8")
        k = self.one("", "", ", i", ", i % 2", ", 2", ", k=i")
        more = self.one("", "", ", flag=i % 2 == 0", ", gain=0.1 * i", ", gain=0.5 if i < 3 else 2.0")
        if self.has_batch:
            more += ", batch={'x': tensor(200 + i, 4, 8), 'log': [i], 'pair': ([i], 1)}"
        return textwrap.dedent(f"""\
            def packed(*args, **kwargs):
                return args, kwargs
            return packed(tensor(100 + i, {size}, 8){k}{more if not (k == ", i" and more.startswith(", k")) else ""})""").split("\n")


__all__ = ["NUM_CALLS", "source"]
