"""Checks a sweep's results against its record: nested JSON whose leaves start with "pass" for entries that pass.

failed = regressions(json.loads(path.read_text()), results, is_whole=True)      # {"add float32 grad": "AssertionError: ..."}
guard(path, results, is_whole=True, accepts=False)                              # exits with an error if there are any
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def _leaves(tree: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, name))
        else:
            yield (*path, name), str(value)


def regressions(record: dict[str, Any], results: dict[str, Any], is_whole: bool) -> dict[str, str]:
    """The entries that pass in the record but not in the results, with their outcomes.

    Args:
        record: the recorded results.
        results: the new results.
        is_whole: whether the results are complete. If so, an entry that they do not contain is a regression.
    """
    found = dict(_leaves(results))
    return {
        " ".join(path): found.get(path, "no result")
        for path, text in _leaves(record)
        if text.startswith("pass") and (path in found or is_whole) and not found.get(path, "").startswith("pass")
    }


def guard(record: Path, results: dict[str, Any], is_whole: bool, accepts: bool) -> None:
    """Exit with an error if entries of the record no longer pass, unless `accepts`. Complete results are saved next to the record.

    Raises:
        SystemExit: the message lists the entries that no longer pass.
    """
    if accepts or not record.exists():
        return
    failed = regressions(json.loads(record.read_text(encoding="utf-8")), results, is_whole)
    if not failed:
        return
    lines = [
        f"{len(failed)} entries of {record.name} no longer pass; the record is unchanged",
        *(f"  {n}: {t}" for n, t in failed.items()),
    ]
    if is_whole:
        kept = record.with_suffix(".new.json")
        kept.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        lines += [f"  fix: repair them, or change the record on purpose with --merge {kept} --accept"]
    raise SystemExit("\n".join(lines))
