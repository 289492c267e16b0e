"""What an editor knows of a compiled function: the signature of what was compiled, and the options by name."""

import inspect
import json
import subprocess
import sys
from pathlib import Path

import pytest

import spmd
from spmd.program._options import Options

ROOT = Path(__file__).parents[1]

CODE = """
from typing import assert_type
import torch
import spmd

def step(x: torch.Tensor, times: int = 1) -> tuple[torch.Tensor, int]:
    return x, times

compiled = spmd.compile(step)
assert_type(compiled(torch.ones(2)), tuple[torch.Tensor, int])
compiled("no tensor")  # wrong: reportArgumentType
compiled(torch.ones(2), many=3)  # wrong: reportCallIssue

@spmd.compile(keep_grads=True, on_retrace="error")
def other(x: torch.Tensor) -> torch.Tensor:
    return x

assert_type(other(torch.ones(2)), torch.Tensor)
other()  # wrong: reportCallIssue
spmd.compile(step, steps_per_cal=2)  # wrong: reportCallIssue
spmd.compile(step, on_retrace="raise")  # wrong: reportArgumentType
"""


@pytest.mark.slow  # pyright reads torch: half a minute
def test_a_compiled_function_keeps_its_signature_for_editors(tmp_path: Path) -> None:
    (tmp_path / "code.py").write_text(CODE, encoding="utf-8")
    (tmp_path / "pyrightconfig.json").write_text(json.dumps({"extraPaths": [str(ROOT)], "include": ["code.py"]}), encoding="utf-8")
    command = [sys.executable, "-m", "pyright", "--pythonpath", sys.executable, "--outputjson", "-p", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    found = {d["range"]["start"]["line"]: d["rule"] for d in json.loads(done.stdout)["generalDiagnostics"] if d["severity"] == "error"}
    wrong = {i: line.rpartition("# wrong: ")[2] for i, line in enumerate(CODE.splitlines()) if "# wrong: " in line}
    assert set(found) == set(wrong)
    assert all(found[i] in (wrong[i], "reportCallIssue", "reportArgumentType") for i in wrong)


def test_the_options_are_spelt_out() -> None:
    options = list(inspect.signature(spmd.compile).parameters)[1:-1]
    assert options == [*inspect.signature(Options).parameters, "dynamic"]  # which decides what step it is, and is no option of a program
    assert all(f"\n    {name}: " in inspect.getdoc(spmd.compile) for name in options)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"steps_per_cal": 2}, "compile has no option 'steps_per_cal'; did you mean 'steps_per_call'?\n  fix: options are keep_grads, "),
        ({"keep_grad": True}, "compile has no option 'keep_grad'; did you mean 'keep_grads'?"),
        ({"fullgraph": True}, "compile has no option 'fullgraph'\n"),
    ],
)
def test_a_misspelt_option_says_what_was_meant(given: dict[str, object], text: str) -> None:
    for compiled in (lambda: spmd.compile(lambda x: x, **given), lambda: spmd.compile(**given)):  # type: ignore[call-overload]
        with pytest.raises(TypeError) as refused:
            compiled()
        assert str(refused.value).startswith(text)


@pytest.mark.parametrize(
    "given", [{"steps_per_call": 0}, {"max_retraces": 0}, {"max_programs": 0}, {"keep_grads": "yes"}, {"check": 1}], ids=str
)
def test_an_option_that_means_nothing_is_refused(given: dict[str, object]) -> None:
    with pytest.raises(spmd.SpmdError, match="fix: spmd.compile"):
        spmd.compile(lambda x: x, **given)  # type: ignore[call-overload]
