"""`make versions`: which tests it runs, and what it writes."""

from benchmarks import versions


def test_files_of_the_subset_are_there() -> None:
    assert [name for name in versions.SUBSET if not (versions.ROOT / name).exists()] == []


def test_page_counts_and_names_what_fails() -> None:
    results = {
        "2.11.0 0.10.2": {"passed": 3, "skipped": 1, "failed": ["tests/a.py::b"]},
        "2.13.0 0.10.2": {"passed": 4, "skipped": 0, "failed": []},
    }
    page = versions.page(results)
    assert "| 2.11.0 | 0.10.2 | 3 | 1 | 1 |\n| 2.13.0 | 0.10.2 | 4 | 0 | 0 |\n" in page
    assert "- torch 2.11.0, jax 0.10.2: tests/a.py::b" in page
