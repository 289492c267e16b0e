"""Creates a recipe's model, sharded over the mesh, and its optimizer and learning rate schedule."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from mesh import Mesh
from spmd.base._errors import message
from spmd.rules import shard_module
from spmd.sharding._precision import MixedPrecisionPolicy, mixed_precision
from spmd.train import _recipe
from spmd.train._import_path import imported
from spmd.train._recipe import RecipeError


def built_model(table: _recipe.Model, precision: _recipe.Precision, mesh: Mesh) -> nn.Module:
    """The model in training mode on device 'jax', sharded by the recipe's rules and computing in the recipe's dtype.

    Raises:
        RecipeError: the model cannot be found, or does not accept its arguments.
    """
    if table.own:
        model = _called(imported(table.own, "[model] own"), table.arguments, "[model] arguments")
        if not isinstance(model, nn.Module):
            what = f"[model] own = {table.own!r} returned {type(model).__name__}"
            raise RecipeError(message(what, fix="name a class or function that returns a torch.nn.Module"))
    else:
        model = _hugging_face_model(table)
    rules: Any = table.rules
    if rules == "replicated":
        rules = [("**", None)]
    elif ":" in rules:
        rules = imported(rules, "[model] rules")
    shard_module(model, mesh, rules)
    model.train().to("jax")
    if precision.compute != "float32":
        compute = getattr(torch, precision.compute)
        mixed_precision(model, MixedPrecisionPolicy(compute, getattr(torch, precision.reduce or precision.compute)))
    return model


def _hugging_face_model(table: _recipe.Model) -> nn.Module:
    if importlib.util.find_spec("transformers") is None:
        what = "[model] pretrained and config need transformers, which is not installed"
        raise RecipeError(message(what, fix="pip install 'spmd-mesh[hf]'"))
    transformers = importlib.import_module("transformers")  # with an import statement type checkers would analyze all of its models

    auto = _attribute(transformers, table.auto, "[model] auto")
    if table.pretrained:
        try:
            return auto.from_pretrained(table.pretrained, **table.arguments)
        except OSError as error:
            what = f"[model] pretrained = {table.pretrained!r}: {str(error).splitlines()[0]}"
            raise RecipeError(message(what, fix="a folder with config.json, or a model on the hub or in its local cache")) from error
    config = _called(_attribute(transformers, table.config, "[model] config"), table.arguments, "[model] arguments")
    try:
        return auto.from_config(config)
    except ValueError as error:
        what = f"[model] auto = {table.auto!r} cannot create a model from a {table.config}"
        raise RecipeError(message(what, fix='another class, as [model] auto = "AutoModelForImageClassification"')) from error


def built_optimizer(table: _recipe.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all parameters that require gradients, in up to two groups: with and without weight decay.

    Raises:
        RecipeError: torch.optim has no such class, or the class does not accept the arguments.
    """
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    least_dims = 0 if table.decay == "all" else 2
    groups = [
        {"params": [p for p in parameters if p.dim() >= least_dims], "weight_decay": table.weight_decay},
        {"params": [p for p in parameters if p.dim() < least_dims], "weight_decay": 0.0},
    ]
    kind = imported(table.name, "[optimizer] name") if ":" in table.name else _attribute(torch.optim, table.name, "[optimizer] name")
    return _called(kind, {"lr": table.lr, **table.arguments}, "[optimizer] arguments", [group for group in groups if group["params"]])


def built_schedule(table: _recipe.Schedule, optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """The learning rate schedule of a run of `steps` steps. Its state is the number of steps so far."""
    return LambdaLR(optimizer, factor_of(table, steps))


def factor_of(table: _recipe.Schedule, steps: int) -> Callable[[int], float]:
    """The learning rate of each step as a fraction of the peak: linear warm-up, then constant, or linear or cosine decay to `final`."""
    end = table.steps or steps

    def factor(step: int) -> float:
        if step < table.warm_up:
            return (step + 1) / table.warm_up
        if table.name == "constant":
            return 1.0
        part = min(1.0, (step - table.warm_up) / max(1, end - table.warm_up))
        left = 1 - part if table.name == "linear" else 0.5 + 0.5 * math.cos(math.pi * part)
        return table.final + (1 - table.final) * left

    return factor


def _attribute(module: Any, name: str, key: str) -> Any:
    if not hasattr(module, name):
        near = difflib.get_close_matches(name, dir(module), 1)
        what = f"{key} = {name!r}: {module.__name__} has no such class"
        raise RecipeError(message(what, fix=repr(near[0]) if near else "package.module:name"))
    return getattr(module, name)


def _called(target: Any, arguments: dict[str, Any], key: str, *positional: Any) -> Any:
    try:
        return target(*positional, **arguments)
    except TypeError as error:
        name = getattr(target, "__name__", str(target))
        if name not in str(error) and "argument" not in str(error):
            raise
        raise RecipeError(message(f"{key} do not match {name}: {error}", fix=f"see help({name})")) from error


__all__ = ["built_model", "built_optimizer", "built_schedule", "factor_of"]
