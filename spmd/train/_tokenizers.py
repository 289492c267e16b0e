"""Tokenizers that a recipe names: Hugging Face's, and the bytes of UTF-8."""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any, Protocol

from spmd.base._errors import message
from spmd.train._recipe import RecipeError


class Tokenizer(Protocol):
    """Text to token numbers and back; `end` is the token after a document, or None."""

    @property
    def end(self) -> int | None: ...

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: list[int]) -> str: ...


class Bytes:
    """The bytes of UTF-8 as tokens; 256 ends a document."""

    end = 256

    def encode(self, text: str) -> list[int]:
        return list(text.encode())

    def decode(self, tokens: list[int]) -> str:
        return bytes(token for token in tokens if token < 256).decode(errors="replace")


class HuggingFace:
    """A tokenizer of transformers, without the tokens that it adds by itself."""

    def __init__(self, inner: Any) -> None:
        self._inner, self.end = inner, inner.eos_token_id

    def encode(self, text: str) -> list[int]:
        return self._inner.encode(text, add_special_tokens=False)

    def decode(self, tokens: list[int]) -> str:
        return self._inner.decode(tokens)


def tokenizer_of(name: str, key: str) -> Tokenizer:
    """The tokenizer that a recipe names: "bytes", a folder, or a name on the hub.

    Raises:
        RecipeError: there is none.
    """
    if name == "bytes":
        return Bytes()
    if not name:
        raise RecipeError(message(f"{key} is not given", fix='a folder or name of Hugging Face, or "bytes"'))
    if importlib.util.find_spec("transformers") is None:
        raise RecipeError(message(f"{key} = {name!r} is of Hugging Face, transformers is not installed", fix="pip install 'spmd-mesh[hf]'"))
    transformers = importlib.import_module("transformers")  # after an import statement type checkers read all of its models

    try:
        return HuggingFace(transformers.AutoTokenizer.from_pretrained(name))
    except (OSError, ValueError) as error:
        what = f"{key} = {name!r}: {str(error).splitlines()[0]}"
        raise RecipeError(message(what, fix='a folder with tokenizer.json, or a name that the hub or its cache has; or "bytes"')) from error


__all__ = ["Bytes", "HuggingFace", "Tokenizer", "tokenizer_of"]
