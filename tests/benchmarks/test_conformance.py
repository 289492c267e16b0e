"""`make conformance`, on a checkout of a few lines: torch_xla's test files run unedited, and what fails is listed with its reason."""

import textwrap
from pathlib import Path
from typing import Any

import pytest

from benchmarks import conformance
from benchmarks.conformance_cases import EXAMPLES, FILES, REASONS, Case, reason

TESTS = """
import sys, unittest
import beside, torch, torch_xla, torch_xla.runtime as xr

class T(unittest.TestCase):
    def test_good(self):
        self.assertEqual(torch.ones(2, device="xla").sum().item(), 2 * beside.ONE)
    def test_bad(self):
        self.assertEqual(xr.global_runtime_device_count(), 5)
    def test_parts(self):
        for i in range(2):
            with self.subTest(i=i):
                self.assertEqual(i, 0)
    @unittest.skip("needs a TPU")
    def test_skipped(self):
        pass
    def test_zz_dies(self):
        sys.exit = None
        import os
        os._exit(1)

if __name__ == "__main__":
    unittest.main()
"""


def checkout(folder: Path, source: str) -> Path:
    (folder / "test" / "spmd").mkdir(parents=True)
    (folder / "test" / "beside.py").write_text("ONE = 1\n")
    (folder / "test" / "spmd" / "test_few.py").write_text(textwrap.dedent(source))
    return folder


def test_each_test_of_a_file_has_its_outcome_also_where_the_process_dies(tmp_path: Path) -> None:
    found = conformance.run(checkout(tmp_path, TESTS), Case("test/spmd/test_few.py"), 2, 300, tmp_path / "out.jsonl")
    assert found["T.test_good"] == "pass" and found["T.test_skipped"] == "skip: needs a TPU"
    assert found["T.test_bad"].startswith("fail: AssertionError: 2 != 5") and found["T.test_parts"].startswith(
        "fail: AssertionError: 1 != 0"
    )
    assert found["T.test_zz_dies"] == "no result: the process ended"


@pytest.mark.parametrize(
    ("source", "outcome"), [pytest.param("import torch_xla", "pass", marks=pytest.mark.slow), ("raise SystemExit(3)", "fail: exit code 3")]
)
def test_a_script_passes_if_it_ends_well(source: str, outcome: str, tmp_path: Path) -> None:
    case = Case("test/spmd/test_few.py", is_script=True)
    assert conformance.run(checkout(tmp_path, source), case, 1, 300, tmp_path / "out.jsonl") == {"test_few.py": outcome}


def test_the_page_counts_what_ran_and_lists_what_failed() -> None:
    outcomes: dict[str, Any] = {"A.test_a": "pass", "A.test_skip": "skip: TPU", "A.test_xla_placement": "fail: RuntimeError: numpy"}
    results: dict[str, Any] = {"commit": "abc", "devices": {"1": {"test/x.py": outcomes, "examples/y.py": {"y.py": "pass"}}}}
    text = conformance.page(results)
    assert "| 1 | 1 | 2 | 1 | 1 |" in text and "(commit abc)" in text
    assert f"| `x.py` | `A.test_xla_placement` | 1 | {reason('test/x.py', 'A.test_xla_placement')} |" in text


def test_every_file_is_named_once_and_reasons_are_sentences() -> None:
    names = [case.name for case in (*FILES, *EXAMPLES)]
    assert len(names) == len(set(names)) >= 40
    assert all(why and not why.endswith(".") for _, why in REASONS)
    assert reason("test/spmd/test_xla_sharding.py", "T.test_xla_shards") is None


def test_the_record_has_a_reason_for_all_that_does_not_pass() -> None:
    import json

    if conformance.RESULTS.exists():
        results = json.loads(conformance.RESULTS.read_text(encoding="utf-8"))
        assert [name for name in conformance.failures(results) if not reason(*name)] == []
        assert conformance.page(results) == conformance.PAGE.read_text(encoding="utf-8")
