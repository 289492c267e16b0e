"""`make versions`: which tests it runs, what it writes, and that what is declared is what passed."""

import json

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from benchmarks import versions
from mesh.platform import _jax_runtime
from spmd import doctor
from spmd.base import _torch
from spmd.program.reads import _instructions

RECORD = json.loads(versions.RESULTS.read_text(encoding="utf-8"))


def test_files_of_the_subset_are_there() -> None:
    assert [name for name in versions.SUBSET if not (versions.ROOT / name).exists()] == []


def test_page_counts_and_names_what_fails() -> None:
    results = {
        "3.11 2.11.0 0.10.2": {"passed": 3, "skipped": 1, "failed": ["tests/a.py::b"]},
        "3.14 2.13.0 0.10.2": {"passed": 4, "skipped": 0, "failed": []},
    }
    page = versions.page(results)
    assert "| 3.11 | 2.11.0 | 0.10.2 | 3 | 1 | 1 |\n| 3.14 | 2.13.0 | 0.10.2 | 4 | 0 | 0 |\n" in page
    assert "- 3.11 2.11.0 0.10.2: tests/a.py::b" in page


def test_every_pair_was_run_and_passed_and_the_page_says_so() -> None:
    assert list(RECORD) == list(versions.ROWS)
    assert [(pair, found["failed"]) for pair, found in RECORD.items() if found["failed"] or not found["passed"]] == []
    assert versions.PAGE.read_text(encoding="utf-8") == versions.page(RECORD)


def test_what_is_declared_and_what_errors_say_is_what_passed() -> None:
    torches, jaxes = ([*map(Version, of)] for of in zip(*versions.PAIRS, strict=True))
    first, last = min(torches), max(torches)
    newest = _instructions.NEWEST
    assert versions.PYTHONS[-1] == ".".join(map(str, newest))
    assert doctor.SUPPORTED["python"] == f">=3.11,<{newest[0]}.{newest[1] + 1}"
    assert doctor.SUPPORTED["torch"] == f">={first.major}.{first.minor}"
    assert doctor.SUPPORTED["jax"] == f">={min(jaxes).major}.{min(jaxes).minor}"
    assert Version(_torch.UNTRIED) == Version(f"{last.major}.{last.minor + 1}")
    assert f"torch {first.major}.{first.minor} to {last.major}.{last.minor}" == _torch.TRIED
    assert f"jax {min(jaxes)} to {max(jaxes)}" == _jax_runtime.TRIED
    for name, missing, tried in (("torch", _torch.missing, torches), ("jax", _jax_runtime.missing, jaxes)):
        advised = SpecifierSet(str(missing("x")).partition(f"pip install '{name}")[2].removesuffix("'"))
        assert all(advised.contains(one) for one in tried)
        assert not advised.contains(f"{max(tried).major}.{max(tried).minor + 1}")
