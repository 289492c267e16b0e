"""`spmd bench` from the command line to the document: processes, tables, JSON, chart. Times are not asserted."""

import json
import platform
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from spmd.base._errors import UsageError
from spmd.bench import BenchArgs, _chart, _document, _facts, _result_table, run
from spmd.bench._contenders import entrants_of
from spmd.bench._measure import Effort, Entrant, measure, num_phases
from spmd.bench._run_command import job_of

ROOT = Path(__file__).resolve().parents[2]
ARGS = BenchArgs("megatron", preset="tiny", against="jax,torch,torchax", torchax_python=Path("/nowhere/python"))


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    told: list[str] = []
    effort = Effort(rounds=2, losses=3, traces=1)
    entrants = entrants_of(ARGS.against.split(","), job_of(ARGS), ARGS.torchax_python)
    found = measure(job_of(ARGS), entrants, effort, told.append)
    assert len(told) == num_phases(entrants, effort)
    return found


def test_contenders_take_turns_and_are_compared(result: dict[str, Any]) -> None:
    assert result["peers"]["ours"]["losses"] == pytest.approx(result["peers"]["jax"]["losses"], rel=1e-4)
    assert result["peers"]["torch"]["losses"] == pytest.approx(result["peers"]["jax"]["losses"], rel=1e-4)
    assert len(result["peers"]["ours"]["seconds"]) == 2
    assert result["peers"]["jax"]["ratios"]["ready_s"] == 1.0
    assert result["model_flops"] == 11 * 2 * 64 * 64 * 256  # two layers, three products each but for the first input's gradient


def test_every_goal_is_reported(result: dict[str, Any]) -> None:
    wanted = {"step, s", "trace + lower, warm, s", "FLOPs", "collective bytes", "peak bytes per chip"}
    assert wanted <= {goal["what"] for goal in result["goals"]}
    met = {goal["what"]: goal["met"] for goal in result["goals"]}
    assert met["FLOPs"] and met["collective bytes"] and met["peak bytes per chip"]


def test_peer_that_is_not_there_says_so(result: dict[str, Any]) -> None:
    assert "torchax's environment was not found: run make torchax" in result["peers"]["torchax"]["absent"]
    assert any("make torchax" in cell for row in _result_table.rows_of(result) for cell in row)


def test_json_names_no_host_and_no_path(result: dict[str, Any]) -> None:
    text = json.dumps(result)
    assert str(ROOT) not in text
    assert platform.node() not in text


@pytest.mark.parametrize("width", [200, 80])
def test_result_is_shown(result: dict[str, Any], tmp_path: Path, width: int) -> None:
    console = Console(width=width, record=True)
    console.print(_result_table.table(result, width), _result_table.goals(result), _result_table.collectives(result), _chart.bars(result))
    shown = console.export_text()
    assert "all-reduce over model" in shown and "MFU n/a" in shown and "megatron plain tiny data=4,model=2" in shown
    assert "trace+lower s" in shown and "compile s" in shown and "peak MiB" in shown
    assert max(map(len, shown.splitlines())) <= width
    pytest.importorskip("matplotlib")
    _chart.save([result], tmp_path / "chart.png")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_document_has_every_figure(result: dict[str, Any]) -> None:
    page = _document.document({"megatron": [result], "gpt2": []})
    assert "### megatron plain tiny data=4,model=2" in page
    for goal in result["goals"]:
        assert goal["what"] in page
    header = next(line for line in page.splitlines() if line.startswith("|  |"))
    assert {line.count("|") for line in page.splitlines() if line.startswith(("|  |", "| ours |", "| jax |"))} == {header.count("|")}


def test_failing_peer_is_left_out_and_the_rest_runs() -> None:
    job = job_of(BenchArgs("megatron", mesh="data=3", preset="tiny"))  # 8 rows do not divide by 3, which jax by hand needs
    with pytest.raises(Exception, match="peer 'jax' failed at 'make'"):
        measure(job, [Entrant("jax", "by_hand", _python())], Effort(0, 1, 0), lambda _: None)


def _python() -> str:
    import sys

    return sys.executable


def test_unknown_peer_is_refused() -> None:
    with pytest.raises(UsageError, match="--against takes .* not 'jaxx'; did you mean 'jax'"):
        run(BenchArgs("megatron", against="jaxx"))


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        ({"preset": "huge"}, "--preset of megatron is one of tiny, small, dispatch, full, not 'huge'"),
        ({"variant": "hf"}, "--variant of megatron is one of plain, sequence, not 'hf'"),
        ({"mesh": "data"}, "--mesh 'data' is not a mesh"),
        ({"mesh": "data=4,=2"}, "--mesh 'data=4,=2' is not a mesh"),
        ({"mesh": "data=x"}, "--mesh 'data=x' is not a mesh"),
    ],
)
def test_sizes_that_are_not_there_are_refused_before_anything_runs(wrong: Any, text: str) -> None:
    with pytest.raises(UsageError, match=re.escape(text)):
        run(BenchArgs("megatron", **wrong))


@pytest.mark.parametrize(("kind", "known"), [("NVIDIA H200", True), ("TPU v5 lite", True), ("cpu", False)])
def test_share_of_peak_is_only_said_of_known_chips(kind: str, known: bool) -> None:
    assert (_facts.mfu(10**12, 0.1, 2, _facts.peak_flops(kind)) is not None) == known
    assert _facts.mfu(10**12, 0.1, 2, 1e13) == pytest.approx(0.5)
