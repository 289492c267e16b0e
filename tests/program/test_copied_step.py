"""Copies and pickles of compiled functions are those of the functions that were compiled."""

import copy
import pickle
from typing import Any

import pytest
import torch
import torch.nn as nn

import spmd


@spmd.compile
def doubled(x: torch.Tensor) -> torch.Tensor:
    return x * 2


def tripled(x: torch.Tensor) -> torch.Tensor:
    return x * 3


class Model(nn.Module):
    """Compiled functions where they may lie: an attribute, a method of the object, one of the class."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.activation = doubled
        self.step = spmd.compile(self.scaled)

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.weight

    @spmd.compile
    def shifted(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.weight


def used() -> Any:
    model, x = Model().to("jax"), torch.ones(2, device="jax")
    assert [fn(x).tolist() for fn in (model.activation, model.step, model.shifted)] == [[2, 2], [1, 1], [2, 2]]
    return model


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda fn: pickle.loads(pickle.dumps(fn))])
def test_a_copy_of_a_function_is_the_function(copied: Any) -> None:
    doubled(torch.ones(1, device="jax"))
    assert copied(doubled) is doubled
    assert copied([doubled])[0] is doubled


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model)).to("jax")])
def test_what_is_bound_to_an_object_is_bound_to_its_copy(copied: Any) -> None:
    model, x = used(), torch.ones(2, device="jax")
    twin = copied(model)
    with torch.no_grad():
        twin.weight.fill_(3)
    assert [fn(x).tolist() for fn in (twin.activation, twin.step, twin.shifted)] == [[2, 2], [3, 3], [4, 4]]
    assert [fn(x).tolist() for fn in (model.activation, model.step, model.shifted)] == [[2, 2], [1, 1], [2, 2]]
    assert twin.activation is doubled and copy.copy(model.step) is model.step


def test_a_pickle_names_a_function_of_a_module() -> None:
    again = pickle.loads(pickle.dumps(spmd.compile(tripled, max_programs=3)))
    assert again(torch.ones(1, device="jax")).item() == 3 and again._options.max_programs == 3
    with pytest.raises(pickle.PicklingError, match="cannot be pickled: module .* has it under no name of its own"):
        pickle.dumps(spmd.compile(lambda x: x))
