"""The command `spmd train`: reads a recipe and overrides, and runs it, in several processes if the recipe asks for them."""

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
    """Run the command line and return the exit code.

    Args:
        argv: arguments after the program's name. None: those of the process.
        prog: the command's name in its messages.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    is_debugging, all_words = "--debug" in words, list(words)
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
            what = f"{prog}: the first argument is {words[0]!r}, not a recipe"
            raise RecipeError(message(what, fix=f"{prog} RECIPE.toml {' '.join(words)}"))
        recipe = read_recipe(words[0], words[1:])
    except RecipeError as error:
        return report_failure(str(error), 2)
    if recipe.launch.processes > 1 and _join.place().count == 1:
        return launch_processes(recipe, all_words, prog)
    return Run(recipe).train() if is_debugging else run(recipe, prog)


def run(recipe: Recipe, prog: str) -> int:
    """Train and return the exit code. An error is reported in one line, with its traceback in a file in the run's folder."""
    try:
        return Run(recipe).train()
    except SpmdError as error:
        return report_failure(str(error), 2)
    except KeyboardInterrupt:
        return report_failure(f"{prog}: stopped by Ctrl-C; the same command resumes from the last checkpoint", 130)
    except Exception as error:  # from a library or from the user's code
        index = mesh.init().index
        log = write_traceback(error, Path(recipe.out) / (f"error-{index}.txt" if index else "error.txt"))
        return report_failure(f"{prog}: {line_of_failure(error, log)}", 1)


def initialise(words: Sequence[str], prog: str) -> int:
    """Write a recipe. At a terminal, ask for what the options leave open."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if not words or words[0].startswith("-"):
        raise RecipeError(message(f"{prog} --init needs a file name", fix=f"{prog} --init RECIPE.toml"))
    ask = (lambda question, default: console.input(f"{question} [{default}]: ")) if sys.stdin.isatty() else None
    write_recipe(Path(words[0]), words[1:], ask)
    console.print(f"wrote {words[0]}; now: {prog} {words[0]}")
    return 0


def launch_processes(recipe: Recipe, words: Sequence[str], prog: str) -> int:
    """Run the same command in every process of a job on this machine, and return the job's exit code."""
    options = ["-n", str(recipe.launch.processes), "--restarts", str(recipe.launch.restarts)]
    if recipe.mesh.devices:
        options += ["--devices-per-process", str(recipe.mesh.devices // recipe.launch.processes)]
    return launch.main([*options, "--", "-m", "spmd.train", *words], prog=prog, preload=("spmd.train", "torch._dynamo"))


def report_failure(text: str, code: int) -> int:
    """Print the error and return the exit code. In a job of several processes all of them end, with this text as the reason."""
    Console(stderr=True, markup=False, highlight=False, soft_wrap=True).print(Text(text, style="red"))
    job = _join.job()
    if job is not None:
        job.alarm.failed(text, code)
    return code


__all__ = ["main"]
