"""Note [One call] of `spmd.program` names the functions that a call goes through, in their order."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import spmd
import spmd.program

FOLDER = Path(spmd.program.__file__).parent
NOTE = (spmd.program.__doc__ or "").partition("Note [One call]")[2]
PARTS = {
    title: re.findall(r"^ {8}(\S+\.py) (\S+)", text, re.MULTILINE) for title, text in re.findall(r"\n {4}(\w.*)\n((?: {8}.*\n)+)", NOTE)
}
TRACING, RUNNING = "trace, if none holds", "run"


def entered(call: Any) -> list[tuple[str, str]]:
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


def in_order_of(hops: list[tuple[str, str]], calls: list[tuple[str, str]]) -> list[tuple[str, str]]:
    return sorted((hop for hop in hops if hop in calls), key=calls.index)


@pytest.fixture
def calls() -> list[list[tuple[str, str]]]:
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


def test_the_note_is_short_and_names_functions_that_exist() -> None:
    assert len(NOTE.splitlines()) <= 40
    assert list(PARTS) == ["find the program", TRACING, RUNNING]
    assert all(len(hops) >= 3 for hops in PARTS.values())


def test_a_call_that_finds_its_program_goes_through_find_and_run(calls: list[list[tuple[str, str]]]) -> None:
    named = [*PARTS["find the program"], *PARTS[RUNNING]]
    assert in_order_of(named, calls[1]) == named
    assert not set(PARTS[TRACING]) & set(calls[1])


def test_a_call_that_traces_goes_through_everything_in_the_order_of_the_note(calls: list[list[tuple[str, str]]]) -> None:
    named = [hop for hops in PARTS.values() for hop in hops]
    assert in_order_of(named, calls[2]) == named
    assert in_order_of([*PARTS[TRACING], *PARTS[RUNNING]], calls[0]) == [*PARTS[TRACING], *PARTS[RUNNING]]
