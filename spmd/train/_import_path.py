"""Imports the user's objects that a recipe names as package.module:name."""

from __future__ import annotations

import difflib
import importlib
import os
import sys
from typing import Any

from spmd.base._errors import message
from spmd.train._recipe import RecipeError


def imported(path: str, key: str) -> Any:
    """Import an object. Modules in the current working directory are found too.

    Args:
        path: package.module:name.
        key: the recipe's key, for errors: "[model] own".

    Raises:
        RecipeError: `path` has another form, or the module or the name does not exist.
    """
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise RecipeError(message(f"{key} = {path!r} is not of the form package.module:name", fix="package.module:name"))
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        found: Any = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or not (module + ".").startswith(error.name + "."):  # the missing module is a dependency
            raise
        raise RecipeError(message(f"{key} = {path!r}: no module {error.name!r}", fix="start in the folder that contains it")) from error
    for part in name.split("."):
        if not hasattr(found, part):
            near = difflib.get_close_matches(part, dir(found), 1)
            raise RecipeError(message(f"{key} = {path!r}: {module} has no {part!r}", fix=f"{module}:{near[0] if near else 'NAME'}"))
        found = getattr(found, part)
    return found


__all__ = ["imported"]
