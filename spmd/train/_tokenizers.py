"""The tokenizers of a recipe: Hugging Face's, and UTF-8 bytes."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Protocol

from spmd.base._errors import message
from spmd.train._recipe import RecipeError


class Tokenizer(Protocol):
    """Encodes text as tokens and decodes it. `end` is the token after a document, or None."""

    @property
    def end(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """UTF-8 bytes as tokens; token 256 ends a document."""

    end = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class HuggingFace:
    """A tokenizer of transformers that adds no special tokens."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.end = inner, inner.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        return self._inner.decode(tokens)


def tokenizer_of(name: str, key: str) -> Tokenizer:
    """Load the tokenizer that a recipe names.

    Args:
        name: "bytes", a folder, or a name on the Hugging Face hub.
        key: the recipe's key, for errors: "[data] tokenizer".

    Raises:
        RecipeError: `name` is empty, cannot be loaded, or needs transformers, which is not installed.
    """
    if name == "bytes":
        return Bytes()
    if not name:
        raise RecipeError(message(f"{key} is not given", fix=f'{key} = "bytes", or a Hugging Face folder or name'))
    if importlib.util.find_spec("transformers") is None:
        raise RecipeError(message(f"{key} = {name!r} needs transformers, which is not installed", fix="pip install 'spmd-mesh[hf]'"))
    transformers = importlib.import_module("transformers")  # with an import statement type checkers would analyze all of its models

    try:
        return HuggingFace(transformers.AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError) as error:
        what = f"{key} = {name!r}: {str(error).splitlines()[0]}"
        raise RecipeError(message(what, fix='a folder with tokenizer.json, a name on the hub or in its local cache, or "bytes"')) from error


__all__ = ["Bytes", "HuggingFace", "Tokenizer", "tokenizer_of"]
