"""What torch_xla has and the modules lack says so, with a way on, however a program asks."""

# pyright: reportMissingImports=false
import importlib.util
import sys

import pytest

import spmd.compat.torch_xla


@pytest.mark.parametrize(
    ("statement", "said"),
    [
        ("import torch_xla.nothing", "torch_xla.nothing does not exist under spmd.compat.torch_xla"),
        ("import torch_xla.stablehlo as shlo", "torch_xla.stablehlo does not exist(?s:.*)fix: step.hlo"),
        ("from torch_xla.core.xla_model import send", "xla_model.send does not exist(?s:.*)fix: (?s:.*)xm.collective_permute"),
        ("from torch_xla.experimental.pallas_kernels import x", "pallas_kernels does not exist(?s:.*)spmd.call_jax"),
        ("from torch_xla import nothing", "torch_xla.nothing does not exist"),
    ],
)
def test_an_import_of_what_is_missing_says_the_way_on(statement: str, said: str) -> None:
    with pytest.raises(ModuleNotFoundError, match=said):
        exec(statement)


def test_a_question_whether_a_module_exists_is_answered_as_elsewhere() -> None:
    assert importlib.util.find_spec("torch_xla.nothing") is None
    assert importlib.util.find_spec("torch_xla.core.xla_model") is not None
    import torch_xla

    assert not hasattr(torch_xla, "nothing")
    with pytest.raises(AttributeError, match=r"_XLAC\._xla_fancy does not exist(?s:.*)fix: a compiled step's hlo"):
        torch_xla._XLAC._xla_fancy  # noqa: B018


def test_nothing_of_it_is_left_behind() -> None:
    spmd.compat.torch_xla.uninstall()
    try:
        with pytest.raises(ModuleNotFoundError, match="No module named 'torch_xla'"):
            import torch_xla.stablehlo  # noqa: F401
        assert not any(name.partition(".")[0] == "torch_xla" for name in sys.modules)
    finally:
        spmd.compat.torch_xla.install()
