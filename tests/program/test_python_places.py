"""What a compiled function reads of Python, wherever it lies: a change is seen by the next call, as in plain PyTorch."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import mesh
import spmd
from tests.program.python_places import PLACES, Place
from tests.sweeps import every_other

USES: dict[str, Callable[[torch.Tensor, Any], torch.Tensor]] = {
    "factor": lambda x, value: x * value,
    "branch": lambda x, value: x + 1 if value > 2 else x - 1,
    "count": lambda x, value: sum((x for _ in range(int(value))), x),
}
USES["all"] = lambda x, value: torch.cat([use(x, value) for name, use in USES.items() if name != "all"])
# Each write makes another object, which is another program.
REPLACED = {
    "in_a_frozen_dataclass_that_is_replaced",
    "in_a_dict_that_replaces_the_attributes",
    "in_attributes_that_two_objects_share",
    "in_a_static_method_that_is_replaced",
    "in_a_method_that_is_replaced",
    "in_a_method_of_the_object_itself",
    "in_a_function_that_is_rebound",
    "in_a_module_that_is_replaced",
    "in_a_frozen_set_that_is_replaced",
    "in_a_list_of_a_module",
    "in_a_config_of_a_module_that_is_replaced",
    "in_a_registered_function",
    "in_the_gradient_of_a_cpu_tensor",
    "in_a_registered_method",
    "in_a_cached_result_of_a_method",
    "in_a_file",
    "in_a_file_of_numpy",
    "in_a_file_of_an_encoding",
    "in_a_compressed_file",
    "in_a_file_that_a_library_opens",
    "in_one_of_several_files",
    "in_a_file_of_code",
    "in_the_number_of_files",
    "in_a_file_by_its_path",
    "in_a_method_that_an_encoder_of_json_calls",
    "in_a_method_that_an_enum_calls",
    "in_what_a_module_gives_for_a_name",
    "in_a_module_that_is_imported_by_name",
    "in_a_type_hint",
    "in_a_module_of_a_package",
    "in_the_text_of_a_factory",
    "in_the_replaced_dict_of_a_function",
    "in_the_replaced_dict_of_a_partial",
    "in_the_replaced_dict_of_an_exception",
    "in_the_member_that_a_value_names",
    "in_the_member_that_a_name_names",
    "in_an_implementation_that_c_code_calls",
    "in_a_registry_of_copies",
    "in_a_function_that_a_pickle_names",
    "in_the_number_of_fields_of_a_dataclass",
    "in_the_fields_that_a_class_inherits",
    "in_the_members_that_c_code_looks_up",
}
VALUES = (2.0, 2.0, 3.0, 3.0, 2.0, 5.0, 3.0)


def outcomes(place: Place, use: str, wrap: Callable[[Any], Any], x: torch.Tensor) -> list[list[float]]:
    read, write = place()
    fn = wrap(lambda x: USES[use](x, read()))
    found: list[list[float]] = []
    for value in VALUES:
        if value != VALUES[0] or found:
            write(value)
        found.append(fn(x).tolist())
    return found


def rows() -> Iterator[Any]:
    """Every second place as a factor, which may become an input; the others, and the other uses, in `make test` are of the test below."""
    for number, name in enumerate(PLACES):
        for use in ("factor", "branch", "count"):
            yield pytest.param(name, use, marks=[] if use == "factor" and number % 2 == 1 else pytest.mark.slow, id=f"{name}-{use}")


@pytest.mark.parametrize(("name", "use"), list(rows()))
def test_a_changed_value_is_seen(name: str, use: str) -> None:
    step: Any = None

    def compiled(fn: Any) -> Any:
        nonlocal step
        step = spmd.compile(fn, max_retraces=100)
        return step

    x = torch.tensor([1.0, 2.0])
    expected = outcomes(PLACES[name], use, lambda fn: fn, x)
    assert outcomes(PLACES[name], use, compiled, x.to("jax")) == expected
    assert step.num_traces <= (len(VALUES) if name in REPLACED else len(set(VALUES)) + 1)


@pytest.mark.parametrize("name", every_other(PLACES))
def test_a_changed_value_is_seen_on_eight_devices(name: str, mesh_4x2: mesh.Mesh) -> None:
    x = torch.arange(8.0).reshape(4, 2)
    expected = outcomes(PLACES[name], "all", lambda fn: fn, x)
    sharded = spmd.mark_sharding(x.to("jax"), mesh_4x2, ("data", "model"))
    assert outcomes(PLACES[name], "all", lambda fn: spmd.compile(fn, max_retraces=100), sharded) == expected
