"""Note [One call] of `spmd.program` names the functions that a call goes through, in their order; Note [One size] those of a size."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import spmd
import spmd.program
import spmd.program.sizes
from spmd.device import _shared_arrays

FOLDER = Path(spmd.program.__file__).parent
FINDING, TRACING, RUNNING = "find the program", "trace, if none holds", "run"
Hops = list[tuple[str, str]]


def note(module: Any, title: str) -> tuple[str, dict[str, Hops]]:
    """A note's text, and the hops in each of its parts."""
    text = (module.__doc__ or "").partition(f"Note [{title}]")[2]
    parts = re.findall(r"\n {4}(\w.*)\n((?: {8}.*\n)+)", text)
    return text, {name: re.findall(r"^ {8}(\S+\.py) (\S+)", lines, re.MULTILINE) for name, lines in parts}


NOTE, PARTS = note(spmd.program, "One call")
SIZE_NOTE, SIZE_PARTS = note(spmd.program.sizes, "One size")


def entered(call: Any) -> Hops:
    """The functions of the folder that a call enters, in the order of their first entry."""
    found: dict[tuple[str, str], None] = {}
    start = f"{FOLDER}/"

    def note(frame: Any, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(start):
            found.setdefault((code.co_filename[len(start) :], code.co_qualname))

    note.__module__ = "sys"  # a library's, which is not recorded
    before = sys.getprofile()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(before)
    return list(found)


def all_entered(call: Any) -> list[str]:
    """The functions of Python that a call enters, in any folder, each as often as it does."""
    found: list[str] = []
    before = sys.getprofile()
    sys.setprofile(lambda frame, event, _: found.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        call()
    finally:
        sys.setprofile(before)
    return found


def in_order_of(hops: Hops, calls: Hops) -> Hops:
    return sorted((hop for hop in hops if hop in calls), key=calls.index)


@pytest.fixture
def calls() -> list[Hops]:
    """What the first call of a step enters, what the second, and what one that traces again."""
    model = torch.nn.Linear(3, 2).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, kept = torch.ones(4, 3).to("jax"), {"scale": [2.0], "losses": []}

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum() * kept["scale"][0]
        loss.backward()
        optimizer.step()
        kept["losses"].append(loss.item())
        return loss

    compiled = spmd.compile(step)
    found = [entered(lambda: compiled(x)), entered(lambda: compiled(x))]
    kept["scale"] = []
    kept["scale"].append(3.0)
    found.append(entered(lambda: compiled(x)))
    assert compiled.num_traces == 2 and len(kept["losses"]) == 3
    return found


@pytest.mark.parametrize(("text", "parts"), [(NOTE, PARTS), (SIZE_NOTE, SIZE_PARTS)], ids=["One call", "One size"])
def test_the_note_is_short_and_has_its_parts(text: str, parts: dict[str, Hops]) -> None:
    assert len(text.splitlines()) <= 40
    assert list(parts) == [FINDING, TRACING, RUNNING]
    assert all(len(hops) >= 3 for hops in parts.values())


def test_a_call_that_finds_its_program_goes_through_find_and_run(calls: list[Hops]) -> None:
    named = [*PARTS[FINDING], *PARTS[RUNNING]]
    assert in_order_of(named, calls[1]) == named
    assert not set(PARTS[TRACING]) & set(calls[1])


def test_a_call_that_traces_goes_through_everything_in_the_order_of_the_note(calls: list[Hops]) -> None:
    named = [hop for hops in PARTS.values() for hop in hops]
    assert in_order_of(named, calls[2]) == named
    assert in_order_of([*PARTS[TRACING], *PARTS[RUNNING]], calls[0]) == [*PARTS[TRACING], *PARTS[RUNNING]]


def test_a_call_enters_few_functions_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_shared_arrays, "_shared", {})  # those of other tests, which a call would look up
    model = torch.nn.Linear(3, 2).to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
        return loss

    x = torch.ones(4, 3).to("jax")
    for _ in range(2):
        step(x)
    names = all_entered(lambda: step(x))
    assert len(names) <= 52, f"each costs the host 0.1 us of 30 (benchmarks/host_time.py): {names}"


def test_a_size_goes_through_the_functions_of_its_note_in_their_order() -> None:
    model = torch.nn.Linear(3, 2).to("jax")
    step = spmd.compile(lambda x: (model(x).mean() * x.shape[0], x.shape[0] + 1), dynamic={"x": {0: spmd.Dim("rows", max=64)}})
    first, again, larger = (entered(lambda n=n: step(torch.ones(n, 3).to("jax"))) for n in (12, 13, 40))
    assert (step.num_executables, step.num_traces) == (2, 4)
    rest = [*SIZE_PARTS[FINDING], *SIZE_PARTS[RUNNING]]
    named = [hop for hops in SIZE_PARTS.values() for hop in hops]
    assert in_order_of(named, first) == named
    assert in_order_of(rest, again) == rest
    made = ("sizes/_family_search.py", "Families.search"), ("trace/_capture.py", "capture"), ("sizes/_family.py", "Family.padded")
    assert [hop for hop in made if hop in again] == []
    assert [hop for hop in made if hop in larger] == [made[-1]]  # the program for another bucket, of the same traces
