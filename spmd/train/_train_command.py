"""The command `spmd train`: a recipe and overrides; processes are started by the launcher where the recipe wants several."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

import mesh
from mesh import launch
from mesh.job import _join
from spmd.base._errors import SpmdError, message
from spmd.train._failed_run import line_of_failure, write_traceback
from spmd.train._init_recipe import write_recipe
from spmd.train._key_tables import markdown, show_help
from spmd.train._recipe import Recipe, RecipeError
from spmd.train._recipe_file import read_recipe
from spmd.train._run import Run


def main(argv: Sequence[str] | None = None, prog: str = "spmd train") -> int:
    """Run the command line; the exit code.

    Args:
        argv: arguments after the program's name; those of the process when None.
        prog: the command's name in its messages.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    is_debugging, told = "--debug" in words, list(words)
    words = [word for word in words if word != "--debug"]
    if not words or not {"-h", "--help"}.isdisjoint(words):
        show_help(Console(markup=False, highlight=False, soft_wrap=True))
        return 0
    if words == ["--keys"]:
        sys.stdout.write(markdown())
        return 0
    try:
        if words[0] == "--init":
            return initialise(words[1:], prog)
        if words[0].startswith("-"):
            raise RecipeError(message(f"{prog}: {words[0]!r} stands where the recipe belongs", fix=f"{prog} RECIPE.toml {' '.join(words)}"))
        recipe = read_recipe(words[0], words[1:])
    except RecipeError as error:
        return failed(str(error), 2)
    if recipe.launch.processes > 1 and _join.place().count == 1:
        return launched(recipe, told, prog)
    return Run(recipe).train() if is_debugging else run(recipe, prog)


def run(recipe: Recipe, prog: str) -> int:
    """Train; what ends the run too early is said in a line, and its traceback is in a file of the run's folder. The exit code."""
    try:
        return Run(recipe).train()
    except SpmdError as error:
        return failed(str(error), 2)
    except KeyboardInterrupt:
        return failed(f"{prog}: stopped by Ctrl-C; the same command goes on from the last checkpoint", 130)
    except Exception as error:  # of a library, or of the user's own parts
        index = mesh.init().index
        log = write_traceback(error, Path(recipe.out) / (f"error-{index}.txt" if index else "error.txt"))
        return failed(f"{prog}: {line_of_failure(error, log)}", 1)


def initialise(words: Sequence[str], prog: str) -> int:
    """Write a recipe; at a terminal what the words do not say is asked."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if not words or words[0].startswith("-"):
        raise RecipeError(message(f"{prog} --init does not say which file", fix=f"{prog} --init RECIPE.toml"))
    ask = (lambda question, default: console.input(f"{question} [{default}]: ")) if sys.stdin.isatty() else None
    write_recipe(Path(words[0]), words[1:], ask)
    console.print(f"wrote {words[0]}; now: {prog} {words[0]}")
    return 0


def launched(recipe: Recipe, words: Sequence[str], prog: str) -> int:
    """The same command in each process of a job on this machine; the job's exit code."""
    options = ["-n", str(recipe.launch.processes), "--restarts", str(recipe.launch.restarts)]
    if recipe.mesh.devices:
        options += ["--devices-per-process", str(recipe.mesh.devices // recipe.launch.processes)]
    return launch.main([*options, "--", "-m", "spmd.train", *words], prog=prog, preload=("spmd.train", "torch._dynamo"))


def failed(text: str, code: int) -> int:
    """Say it, and return the exit code; in a job of several processes it ends all of them, with this as the reason."""
    Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(Text(text, style="red"))
    job = _join.job()
    if job is not None:
        job.alarm.failed(text, code)
    return code


__all__ = ["main"]
