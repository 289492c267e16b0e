"""Fast compilation for tests: XLA:CPU spends a third of the time, and the programs mean the same.

Tests of numerics, HLO, memory and time are compiled as users' programs are: the files in `OPTIMIZED`, and what is marked
`@pytest.mark.optimized`. `pytest --optimize` compiles all so (`make test-all`). One function of jax makes the options of every
compilation of this process, and another one compiles: a module that was compiled already (the same text, places in the source included)
gives the executable of before, since the rows of a table make the same few programs hundreds of times. Processes that a test starts are
told by jax's own variable, jobs by `flags` (`XLA_FLAGS` cannot be set here: libtpu reads it when it is loaded, and ends the process for
a flag of XLA:CPU).
"""

from __future__ import annotations

import contextlib
import gc
import io
import os
import threading
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

FAST: dict[str, Any] = {
    "xla_backend_optimization_level": 0,
    "xla_llvm_disable_expensive_passes": True,
    "xla_cpu_use_fusion_emitters": False,
    "xla_cpu_parallel_codegen_split_count": 1,  # as many parts as there are functions otherwise, each with passes of its own
}
OPTIMIZED = (
    "tests/program/test_channels_last.py",
    "tests/program/test_gpt2.py",
    "tests/program/test_gradients.py",
    "tests/program/test_megatron.py",
    "tests/program/test_optim.py",
    "tests/program/test_remat.py",
    "tests/sharding/test_precision.py",
)
_VARIABLE = "JAX_DISABLE_MOST_OPTIMIZATIONS"
_MAX_MAPS = 20_000  # of 65,530 that Linux lets a process have
_MAX_TESTS = 50  # between two looks at the maps: a look takes milliseconds
_MAX_MODULES = 500  # that share a context, which keeps their types and attributes
_MAX_PROGRAMS = 300  # kept for modules like theirs: each has memory maps
_options = compiler.get_compile_options
_compile = compiler.backend_compile_and_load
_programs: OrderedDict[tuple[bytes, bytes, str], Any] = OrderedDict()
_make_context = mlir.make_ir_context
_context: Any = None
_num_modules = 0
_num_tests = 0
_is_fast = False


def flags() -> str:
    """The options as `XLA_FLAGS` has them, for a process of CPU devices; empty where tests are compiled as users' programs are."""
    return " ".join(f"--{name}={str(value).lower()}" for name, value in FAST.items()) if _is_fast else ""


def _with_fast_options(*args: Any, **kwargs: Any) -> Any:
    options = _options(*args, **kwargs)
    backend = kwargs.get("backend")
    if _is_fast and backend is not None and backend.platform == "cpu":
        options.env_option_overrides = [*FAST.items(), *options.env_option_overrides]
    return options


def _compiled_once(backend: Any, module: Any, devices: Any, options: Any, host_callbacks: Any) -> Any:
    """An executable of the module; that of an equal one, if there was one."""
    if backend.platform != "cpu" or host_callbacks:
        return _compile(backend, module, devices, options, host_callbacks)
    text = io.BytesIO()
    module.operation.write_bytecode(text)
    key = text.getvalue(), options.SerializeAsString(), str(devices)
    found = _programs.pop(key, None) or _compile(backend, module, devices, options, host_callbacks)
    _programs[key] = found
    if len(_programs) > _MAX_PROGRAMS:
        _programs.popitem(last=False)
    return found


def share_context() -> Any:
    """The MLIR context of the main thread's modules: jax makes one for each, which takes longer than lowering a small function."""
    global _context, _num_modules
    is_nested = ir.Context.current is not None  # where a module is made while another one is, it would become a part of that
    if is_nested or threading.current_thread() is not threading.main_thread():  # as XLA's own, which call partitioning rules
        return _make_context()
    if _context is None or _num_modules == _MAX_MODULES:
        _context, _num_modules = _make_context(), 0
    _num_modules += 1
    return _context


# a library's: what they read is nothing that a trace depends on
share_context.__module__ = _compiled_once.__module__ = mlir.__name__


def drop_programs_that_pile_up() -> None:
    """Forget jax's compiled programs when there are thousands: each has memory maps, whose number is limited."""
    global _num_tests
    _num_tests += 1
    maps = Path("/proc/self/maps")
    if _num_tests % _MAX_TESTS == 0 and maps.exists() and maps.read_bytes().count(b"\n") > _MAX_MAPS:
        _programs.clear()
        jax.clear_caches()
        gc.collect()


@contextlib.contextmanager
def fast(active: bool) -> Iterator[None]:
    """Compile fast, here and in processes started meanwhile, or as users do."""
    global _is_fast
    before, told = _is_fast, os.environ.pop(_VARIABLE, None)
    compiler.get_compile_options = _with_fast_options
    compiler.backend_compile_and_load = _compiled_once
    mlir.make_ir_context = share_context
    _is_fast = active
    if active:
        os.environ[_VARIABLE] = "1"
    try:
        yield
    finally:
        _is_fast = before
        os.environ.pop(_VARIABLE, None)
        if told is not None:
            os.environ[_VARIABLE] = told
