"""`python -m spmd.compat.torch_xla script.py ARGS`: runs a script written for torch_xla, unedited."""

from __future__ import annotations

import os.path
import runpy
import sys

from spmd.base._errors import message
from spmd.compat.torch_xla import install


def main(argv: list[str]) -> None:
    """Run `argv[0]` as `__main__`, with the rest as its arguments.

    Raises:
        SystemExit: the script does not exist.
    """
    if not argv or argv[0].startswith("-") or not os.path.exists(argv[0]):
        given = f"got {argv[0]!r}" if argv else "got nothing"
        raise SystemExit(message("there is no script to run", given, fix="python -m spmd.compat.torch_xla train.py --its --own --options"))
    install()
    sys.argv[:] = argv
    sys.path[0] = os.path.dirname(os.path.abspath(argv[0]))
    runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
