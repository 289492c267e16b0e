"""The places where the programs of `make fuzz` store their Python state: source text to declare, read and write each place."""

from __future__ import annotations

from dataclasses import dataclass

# Classes by name. A program defines those that it uses.
CLASSES = {
    "Box": "class Box:\n    def __init__(self, value=None):\n        self.value = value",
    "Slots": "class Slots:\n    __slots__ = ('value',)\n    def __init__(self, value=None):\n        self.value = value",
    "Data": "@dataclasses.dataclass\nclass Data:\n    value: object = None\n    other: int = 0",
    "SlotData": "@dataclasses.dataclass(slots=True)\nclass SlotData:\n    value: object = None",
    "Frozen": "@dataclasses.dataclass(frozen=True)\nclass Frozen:\n    value: object = None",
    "Prop": (
        "class Prop:\n    def __init__(self, value=None):\n        self._value = value\n    @property\n    def value(self):\n"
        "        return self._value\n    @value.setter\n    def value(self, new):\n        self._value = new"
    ),
    "Items": (
        "class Items:\n    def __init__(self, value=None):\n        self._held = {'k': value}\n    def __getitem__(self, key):\n"
        "        return self._held[key]\n    def __setitem__(self, key, new):\n        self._held[key] = new"
    ),
    "Forward": (
        "class Forward:\n    def __init__(self, value=None):\n        self.__dict__['held'] = {'value': value}\n"
        "    def __getattr__(self, name):\n        try:\n            return self.__dict__['held'][name]\n"
        "        except KeyError:\n            raise AttributeError(name) from None\n"
        "    def __setattr__(self, name, new):\n        self.held[name] = new"
    ),
    "MyDict": "class MyDict(dict):\n    pass",
    "MyList": "class MyList(list):\n    pass",
    "Row": "Row = collections.namedtuple('Row', ['value', 'other'])",
    "Child": (
        "class Parent:\n    value = 0\n    def bump(self, new):\n        self.value = new\n"
        "class Child(Parent):\n    def bump(self, new):\n        super().bump(new)"
    ),
    "Meter": (
        "class Meter:\n    def __init__(self):\n        self.total, self.count = 0.0, 0\n    def update(self, value, n=1):\n"
        "        self.total += value * n\n        self.count += n\n    @property\n    def average(self):\n"
        "        return self.total / max(1, self.count)"
    ),
    "Counting": (
        "class Counting(nn.Module):\n    def __init__(self):\n        super().__init__()\n        self.lin = nn.Linear(8, 8)\n"
        "        self.calls = 0\n        self.gain = 1.0\n        self.seen = []\n        self.register_buffer('mean', torch.zeros(8))\n"
        "    def forward(self, h):\n        if self.training:\n            self.calls += 1\n"
        "            with torch.no_grad():\n                self.mean.mul_(0.9).add_(h.detach().mean(0), alpha=0.1)\n"
        "        if self.calls % 3 == 2:\n            self.seen.append(self.calls)\n"
        "        return torch.tanh(self.lin(h - self.mean)) * self.gain"
    ),
}


@dataclass(frozen=True)
class Kind:
    """A kind of place that stores one value.

    Attributes:
        declare: statements that create it; `{n}` is its name, `{v}` its first value.
        reads: expressions that read it.
        writes: statements that store `{e}` in it.
        uses: names of the classes that it needs.
        is_variable: whether functions that store to it need a `global` statement.
    """

    declare: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    uses: tuple[str, ...] = ()
    is_variable: bool = False


def _attribute(make: str, *uses: str) -> Kind:
    reads = ("{n}.value", "{n}.value", "getattr({n}, 'value')")
    return Kind(f"{{n}} = {make}", reads, ("{n}.value = {e}", "{n}.value = {e}", "setattr({n}, 'value', {e})"), uses)


def _item(make: str, key: str, *uses: str) -> Kind:
    return Kind(f"{{n}} = {make}", (f"{{n}}[{key}]",), (f"{{n}}[{key}] = {{e}}",), uses)


KINDS: dict[str, Kind] = {
    "global": Kind("{n} = {v}", ("{n}", "globals()['{n}']"), ("{n} = {e}", "{n} = {e}", "globals()['{n}'] = {e}"), is_variable=True),
    "attribute": _attribute("Box({v})", "Box"),
    "vars": Kind("{n} = Box({v})", ("vars({n})['value']", "{n}.__dict__['value']"), ("{n}.__dict__['value'] = {e}",), ("Box",)),
    "nested": Kind("{n} = Box(Box({v}))", ("{n}.value.value",), ("{n}.value.value = {e}", "{n}.value = Box({e})"), ("Box",)),
    "slot": _attribute("Slots({v})", "Slots"),
    "dataclass": _attribute("Data({v})", "Data"),
    "slot dataclass": _attribute("SlotData({v})", "SlotData"),
    "property": _attribute("Prop({v})", "Prop"),
    "namespace": _attribute("types.SimpleNamespace(value={v})"),
    "forwarding": _attribute("Forward({v})", "Forward"),
    "frozen": Kind(
        "{n} = Box(Frozen({v}))", ("{n}.value.value",), ("{n}.value = dataclasses.replace({n}.value, value={e})",), ("Box", "Frozen")
    ),
    "named tuple": Kind(
        "{n} = Box(Row({v}, 1))", ("{n}.value.value", "{n}.value[0]"), ("{n}.value = {n}.value._replace(value={e})",), ("Box", "Row")
    ),
    "class": Kind("class {n}:\n    value = {v}", ("{n}.value", "{n}().value"), ("{n}.value = {e}",)),
    "inherited": Kind("{n} = Child()\n{n}.bump({v})", ("{n}.value",), ("{n}.bump({e})",), ("Child",)),
    "module": _attribute("types.ModuleType('{n}'); {n}.value = {v}"),
    "nn.Module": _attribute("nn.Module(); {n}.value = {v}"),
    "dict": Kind(
        "{n} = {{'k': {v}}}",
        ("{n}['k']", "{n}.get('k', 1)", "{n}.setdefault('k', 1)"),
        ("{n}['k'] = {e}", "{n}.update(k={e})", "{n}.update({{'k': {e}}})"),
    ),
    "dict in a dict": _item("{{'a': {{'k': {v}}}}}", "'a']['k'"),
    "dict of tuples": _item("{{('a', 1): {v}}}", "'a', 1"),
    "list": _item("[0, {v}, 1]", "1"),
    "last of a list": _item("[0, {v}]", "-1"),
    "list in a dict": _item("{{'a': [{v}]}}", "'a'][0"),
    "my dict": _item("MyDict(k={v})", "'k'", "MyDict"),
    "my list": _item("MyList([{v}])", "0", "MyList"),
    "items": _item("Items({v})", "'k'", "Items"),
    "ordered dict": _item("collections.OrderedDict(k={v})", "'k'"),
    "default dict": _item("collections.defaultdict(int, k={v})", "'k'"),
    "user dict": _item("collections.UserDict(k={v})", "'k'"),
    "chain map": _item("collections.ChainMap({{}}, {{'k': {v}}})", "'k'"),
    "deque": _item("collections.deque([0, {v}], maxlen=4)", "-1"),
    "tuple": Kind("{n} = Box(({v}, 1))", ("{n}.value[0]",), ("{n}.value = ({e}, *{n}.value[1:])",), ("Box",)),
    "context": Kind("{n} = contextvars.ContextVar('{n}', default={v})", ("{n}.get()",), ("{n}.set({e})",)),
    "closure": Kind(
        "def make_{n}(value):\n    def get():\n        return value\n    def put(new):\n        nonlocal value\n        value = new\n"
        "    return get, put\n{n}_get, {n}_put = make_{n}({v})",
        ("{n}_get()",),
        ("{n}_put({e})",),
    ),
    "function": Kind("def {n}():\n    return {n}.value\n{n}.value = {v}", ("{n}()", "{n}.value"), ("{n}.value = {e}",)),
    "default": Kind("def {n}(value={v}):\n    return value", ("{n}()",), ("{n}.__defaults__ = ({e},)",)),
    "keyword default": Kind("def {n}(*, value={v}):\n    return value", ("{n}()",), ("{n}.__kwdefaults__['value'] = {e}",)),
    "partial": Kind("{n} = functools.partial(lambda value: value, value={v})", ("{n}()",), ("{n}.keywords['value'] = {e}",)),
    "bound method": Kind("{n} = Box(Box({v}))\n{n}.read = lambda: {n}.value.value", ("{n}.read()",), ("{n}.value.value = {e}",), ("Box",)),
}
# The places that also store tensors.
TENSOR_KINDS = tuple(k for k in KINDS if k not in ("dict of tuples", "context", "default", "keyword default", "partial", "default dict"))

# Containers of numbers: statement that creates one, expressions that read a number, statements that change it. `{e}` is an int, `{i}` an
# int from 0 to 3.
CONTAINERS: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "list": (
        "{n} = [1, 2]",
        (
            "len({n})",
            "sum({n})",
            "max({n}, default=0)",
            "sum(v for v in {n} if v > 1)",
            "sum([v * 2 for v in {n}[-2:]])",
            "({n}[-1] if {n} else 0)",
            "sum(i * v for i, v in enumerate({n}))",
            "sum(a * b for a, b in zip({n}, {n}[1:]))",
            "({n}.index({n}[-1]) if {n} else 0)",
            "sorted({n})[:1].count(1)",
        ),
        (
            "{n}.append({e})",
            "{n}.append({e})",
            "{n} += [{e}]",
            "{n}.extend([{e}, 1])",
            "{n}.insert(0, {e})",
            "if {n}:\n    {n}.pop()",
            "if len({n}) > 3:\n    {n}.pop(0)",
            "{n}[:] = {n}[-3:]",
            "{n}.sort()",
            "{n}.reverse()",
            "if len({n}) > 4:\n    del {n}[0]",
            "{n}.clear()",
        ),
    ),
    "deque": (
        "{n} = collections.deque([1], maxlen=3)",
        ("len({n})", "sum({n})", "({n}[0] if {n} else 0)", "max({n}, default=0)"),
        ("{n}.append({e})", "{n}.appendleft({e})", "if {n}:\n    {n}.popleft()", "{n}.rotate(1)", "{n}.extend([{e}])"),
    ),
    "set": (
        "{n} = {{1}}",
        ("len({n})", "sum({n})", "int({i} in {n})", "len({n} & {{1, 2}})", "len({n} | {{{i}}})"),
        ("{n}.add({i})", "{n}.discard({i})", "{n}.update([{i}, 2])", "{n} |= {{{i}}}", "{n} -= {{{i}}}"),
    ),
    "dict": (
        "{n} = {{1: 1, 2: 3}}",
        (
            "len({n})",
            "sum({n}.values())",
            "{n}.get({i}, 0)",
            "int({i} in {n})",
            "sum(k * v for k, v in {n}.items())",
            "sum(k for k in {n})",
            "max({n}, default=0)",
        ),
        (
            "{n}[{i}] = {e}",
            "{n}[{i}] = {n}.get({i}, 0) + 1",
            "{n}.setdefault({i}, {e})",
            "{n}.pop({i}, None)",
            "{n}.update({{{i}: {e}}})",
            "if {i} in {n}:\n    del {n}[{i}]",
            "{n} |= {{{i}: {e}}}",
        ),
    ),
    "default dict": (
        "{n} = collections.defaultdict(int)",
        ("len({n})", "{n}[{i}]", "sum({n}.values())"),
        ("{n}[{i}] += 1", "{n}['a'] += {e}", "{n}.pop({i}, None)"),
    ),
    "counter": (
        "{n} = collections.Counter(a=1)",
        ("{n}['a']", "sum({n}.values())", "{n}.most_common(1)[0][1]"),
        ("{n}['a'] += 1", "{n}.update(['a', 'b'])", "{n}['b'] = {e}"),
    ),
    "ordered dict": (
        "{n} = collections.OrderedDict(a=1, b=2)",
        ("len({n})", "list({n}.values())[0]"),
        ("{n}['a'] = {e}", "{n}.move_to_end('a')", "{n}['c'] = {e}"),
    ),
    "numbers": ("{n} = np.array([1, 2, 3])", ("int({n}.sum())", "int({n}[1])", "len({n})"), ("{n}[1] = {e}", "{n} += 1")),
    "bytes": ("{n} = bytearray(b'abc')", ("{n}[0] % 7", "len({n})"), ("{n}[0] = ({n}[0] + 1) % 200", "{n}.append({i})")),
    "keys": (
        "{n} = {{'w': [1], 'v': [2]}}",
        ("sum(sum(v) for v in {n}.values())", "len({n}['w'])"),
        ("{n}['w'].append({e})", "{n}.setdefault('z', []).append({e})", "{n}['v'] = [{e}]"),
    ),
    "boxes": (
        "{n} = [Box(1), Box(2)]",
        ("sum(b.value for b in {n})", "{n}[0].value"),
        ("{n}[0].value = {e}", "for b in {n}:\n    b.value += 1", "{n}.append(Box({e}))", "{n}[0], {n}[1] = {n}[1], {n}[0]"),
    ),
}

# Containers of vectors: statement that creates one, expressions that read a vector, statements that store the vector `{t}`.
QUEUES: dict[str, tuple[str, tuple[str, ...], tuple[str, ...]]] = {
    "list": (
        "{n} = []",
        (
            "torch.stack({n}).mean(0) if {n} else {z}",
            "sum({n}, {z})",
            "({n}[-1] if {n} else {z})",
            "({n}[0] * len({n}) if {n} else {z})",
            "sum((t * i for i, t in enumerate({n})), {z})",
        ),
        (
            "{n}.append({t})",
            "{n}.append({t})",
            "{n}.append({t})\nif len({n}) > 2:\n    {n}.pop(0)",
            "if {n}:\n    {n}[-1] = {t}",
            "if {n}:\n    {n}[0].mul_(0.5)",
            "{n} += [{t}]",
            "del {n}[:-2]",
        ),
    ),
    "deque": (
        "{n} = collections.deque(maxlen=3)",
        ("torch.stack(list({n})).sum(0) if {n} else {z}", "({n}[0] if {n} else {z})"),
        ("{n}.append({t})", "{n}.append({t})", "{n}.appendleft({t})", "if {n}:\n    {n}.popleft()", "if {n}:\n    {n}[-1].add_(0.25)"),
    ),
    "dict": (
        "{n} = {{}}",
        ("{n}.get({i}, {z})", "sum({n}.values(), {z})", "({n}[{i}] if {i} in {n} else {z})", "({n}['last'] if 'last' in {n} else {z})"),
        (
            "{n}[{i}] = {t}",
            "if {i} not in {n}:\n    {n}[{i}] = {t}",
            "{n}['last'] = {t}",
            "{n}.setdefault({i}, {t})",
            "{n}.pop({i}, None)",
            "if 'last' in {n}:\n    {n}['last'].add_(0.125)",
        ),
    ),
    "tuple": (
        "{n} = Box(())",
        ("sum({n}.value, {z})", "({n}.value[-1] if {n}.value else {z})"),
        ("{n}.value = (*{n}.value[-1:], {t})", "{n}.value += ({t},)"),
    ),
    "pairs": ("{n} = []", ("sum((t * s for t, s in {n}), {z})", "len({n}) * {z}"), ("{n}.append(({t}, {i}))", "{n}[:] = {n}[-2:]")),
    "boxes": (
        "{n} = [Box(None), Box(None)]",
        ("({n}[0].value if {n}[0].value is not None else {z})",),
        ("{n}[{i} % 2].value = {t}", "{n}.reverse()", "{n}[0].value = {n}[1].value"),
    ),
}

__all__ = ["CLASSES", "CONTAINERS", "KINDS", "QUEUES", "TENSOR_KINDS", "Kind"]
