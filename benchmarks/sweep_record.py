"""A sweep's record: JSON whose leaves begin with "pass" where something passes. What passed must go on passing.

failed = regressions(json.loads(path.read_text()), results, is_whole=True)      # {"add float32 grad": "AssertionError: ..."}
guard(path, results, is_whole=True, accepts=False)                              # ends the program where there are some
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
    """What passes in the record and not in the results, and what came of it.

    Args:
        is_whole: whether what the results lack was lost; False where only a part was run.
    """
    found = dict(_leaves(results))
    return {
        " ".join(path): found.get(path, "no result")
        for path, text in _leaves(record)
        if text.startswith("pass") and (path in found or is_whole) and not found.get(path, "").startswith("pass")
    }


def guard(record: Path, results: dict[str, Any], is_whole: bool, accepts: bool) -> None:
    """End the program with an error if something has stopped passing and nobody accepts that; the results are kept beside the record.

    Raises:
        SystemExit: names what passes no longer.
    """
    if accepts or not record.exists():
        return
    failed = regressions(json.loads(record.read_text(encoding="utf-8")), results, is_whole)
    if not failed:
        return
    lines = [f"{len(failed)} entries of {record.name} pass no longer; the record is as it was", *(f"  {n}: {t}" for n, t in failed.items())]
    if is_whole:
        kept = record.with_suffix(".new.json")
        kept.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        lines += [f"  fix: mend them, or, to change the record on purpose: --merge {kept} --accept"]
    raise SystemExit("\n".join(lines))
