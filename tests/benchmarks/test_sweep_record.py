"""What a sweep's record says passes must go on passing, unless somebody changes the record on purpose."""

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.sweep_record import guard, regressions

RECORD: dict[str, Any] = {
    "add": {"float32": {"forward": "pass", "grad": "pass", "out": "skip: no out= form"}},
    "T5": {"eager": "pass in float64"},
}
GOOD: dict[str, Any] = {
    "add": {"float32": {"forward": "pass", "grad": "pass"}},
    "T5": {"eager": "pass"},
    "new": {"eager": "AssertionError"},
}
BAD: dict[str, Any] = {"add": {"float32": {"forward": "pass", "grad": "AssertionError: 1"}}}


@pytest.mark.parametrize(
    ("results", "is_whole", "expected"),
    [
        (GOOD, True, {}),
        (BAD, False, {"add float32 grad": "AssertionError: 1"}),
        (BAD, True, {"add float32 grad": "AssertionError: 1", "T5 eager": "no result"}),
        ({"add": {"float32": {"forward": "skip: why"}}}, False, {"add float32 forward": "skip: why"}),
    ],
)
def test_regression_is_what_passed_and_passes_no_longer(results: dict[str, Any], is_whole: bool, expected: dict[str, str]) -> None:
    assert regressions(RECORD, results, is_whole) == expected


def test_regression_ends_the_run_and_leaves_the_record(tmp_path: Path) -> None:
    record = tmp_path / "ops.json"
    record.write_text(json.dumps(RECORD))
    with pytest.raises(SystemExit, match=r"2 entries of ops.json no longer pass[\s\S]*add float32 grad: AssertionError: 1[\s\S]*--accept"):
        guard(record, BAD, is_whole=True, accepts=False)
    assert json.loads(record.read_text()) == RECORD
    assert json.loads((tmp_path / "ops.new.json").read_text()) == BAD


def test_record_is_changed_on_purpose_or_where_nothing_was_lost(tmp_path: Path) -> None:
    record = tmp_path / "ops.json"
    guard(record, BAD, is_whole=True, accepts=False)  # there is none yet
    record.write_text(json.dumps(RECORD))
    guard(record, GOOD, is_whole=True, accepts=False)
    guard(record, BAD, is_whole=True, accepts=True)
