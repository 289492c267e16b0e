"""Tests compile fast, here and in processes they start, unless they are marked `optimized`."""

import os
from pathlib import Path
from typing import Any

import jax
import pytest

from tests import compilation

ROOT = Path(__file__).resolve().parents[1]


def options() -> dict[str, Any]:
    """The options of a compilation for these devices."""
    made = jax._src.compiler.get_compile_options(1, 1, backend=jax.devices()[0].client)
    return dict(made.env_option_overrides)


def test_options_are_fast(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--optimize"):
        pytest.skip("--optimize was given")
    assert options() == compilation.FAST
    assert os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] == "1"
    assert compilation.flags().endswith("--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1")


@pytest.mark.optimized
def test_options_of_a_marked_test_are_those_of_users() -> None:
    assert not options()
    assert "JAX_DISABLE_MOST_OPTIMIZATIONS" not in os.environ and not compilation.flags()


@pytest.mark.parametrize("file", compilation.OPTIMIZED)
def test_optimized_file_is_there(file: str) -> None:
    assert (ROOT / file).exists()
