"""`spmd train --init`: writes a recipe from answers at a terminal, or from options, with a comment on every key."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from spmd.base._errors import message
from spmd.train._image_folder import SUFFIXES as IMAGES
from spmd.train._key_tables import meaning_of, toml
from spmd.train._recipe import RecipeError, keys_of, tables
from spmd.train._recipe_file import apply_overrides, recipe_of

Ask = Callable[[str, str], str]  # question, default -> answer

# key, question, default
QUESTIONS = (
    ("model", "Model: a Hugging Face name, folder or configuration class, or package.module:name", "GPT2Config"),
    ("data", "Data: token files (.bin), text, a folder with one folder of images per class, or package.module:name", "data/train.bin"),
    ("mesh.devices", "Virtual CPU devices (0: the machine's own devices)", "8"),
    ("mesh.axes", 'Axes of the mesh: "data" splits batches, "model" splits the model', "data=8"),
    ("model.rules", "Sharding of the parameters: replicated, fsdp, megatron, fsdp+megatron", "replicated"),
    ("data.batch", "Samples per step", "32"),
    ("steps", "Steps", "1000"),
    ("optimizer.lr", "Learning rate", "3e-4"),
)


_SOURCES = {"model": ("pretrained", "config", "own"), "data": ("paths", "own")}  # a question whose answer belongs to one of several keys


def write_recipe(path: Path, words: Sequence[str], ask: Ask | None) -> None:
    """Write a valid recipe.

    Args:
        path: a file that does not exist yet.
        words: overrides as `spmd train` takes them. Questions that they answer are not asked.
        ask: asks a question at the terminal. None: keys without an override keep their defaults.

    Raises:
        RecipeError: the file exists, or the recipe would be invalid.
    """
    if path.exists():
        raise RecipeError(message(f"{path} exists and is not overwritten", fix=f"spmd train --init {path.stem}-2{path.suffix}"))
    found: dict[str, Any] = {"out": f"runs/{path.stem}"}
    apply_overrides(found, words)
    if ask is not None:
        _ask(found, path.absolute().parent, ask)
    recipe_of(found, str(path))
    path.write_text(recipe_text(found), encoding="utf-8")


def _ask(found: dict[str, Any], folder: Path, ask: Ask) -> None:
    for key, question, default in QUESTIONS:
        table, _, name = key.partition(".")
        given = found.get(table, {}) if name or key in _SOURCES else found
        if any(source in given for source in _SOURCES.get(key, (name or key,))):
            continue
        answer = ask(question, default) or default
        if key == "model":
            apply_overrides(found, [f"--model.{model_key(answer)}={toml(answer)}"])
        elif key == "data":
            kind = data_kind(answer, folder)
            words = [f"--data.own={toml(answer)}"] if kind == "dataset" else [f"--data.paths={toml([answer])}"]
            words += ["--data.tokenizer=bytes"] if kind == "text" else []
            apply_overrides(found, [f"--data.kind={kind}", *words])
        else:
            apply_overrides(found, [f"--{key}={answer}"])


def model_key(answer: str) -> str:
    """The key of [model] that the answer belongs to: own, config or pretrained."""
    return "own" if ":" in answer else "config" if answer.endswith("Config") and "/" not in answer else "pretrained"


def data_kind(answer: str, folder: Path) -> str:
    """The kind of data at a path relative to `folder`, guessed from its name and files."""
    if ":" in answer:
        return "dataset"
    if any(file.suffix.lower() in IMAGES for file in (folder / answer).glob("*/*")):
        return "images"
    return "tokens" if answer.endswith(".bin") else "text"


def recipe_text(found: Mapping[str, Any]) -> str:
    """Plain data as TOML, with each key's meaning as a comment."""
    lines: list[str] = []
    for table, kind in tables().items():
        given = found if not table else found.get(table, {})
        keys = keys_of(kind)
        written = [name for name in keys if name in given]
        if table and written:
            lines += ["", f"[{table}] # {meaning_of(kind)}"]
        lines += [f"{name} = {toml(given[name])} # {keys[name].metadata['meaning']}" for name in written]
    return "\n".join([*lines, ""])


__all__ = ["QUESTIONS", "data_kind", "model_key", "recipe_text", "write_recipe"]
