"""Set-up of every test run: virtual devices first, so that no test can start jax with another number of them.

`pytest --devices N` chooses the number (default 8). Warnings are errors (pyproject.toml, `filterwarnings`).
"""

import gc
import os
import shutil
import tempfile
import warnings
from collections.abc import Generator
from pathlib import Path

import hypothesis
import jax
import pytest

import mesh
from tests import compilation

# No deadline: the first example of a property compiles. Derandomised: a red run is red again.
hypothesis.settings.register_profile("spmd", deadline=None, derandomize=True)
hypothesis.settings.load_profile("spmd")

# Files of processes that take long: first, since at the end of a run the other worker would wait for them.
LONG = ("test_train_gpt2.py", "test_everywhere.py", "test_examples.py", "test_device_counts.py", "test_readme.py", "test_notebook.py")
# What imports transformers, peft, flax: last, since each trace afterwards swaps their functions too (tests/later.py).
LAST = (
    *("test_optax_flax.py", "test_presets.py", "test_roll_models.py", "test_scan_layers.py", "test_models.py", "test_table.py"),
    "test_measurements.py",
    *("test_programs.py", "test_scripts.py", "test_export.py", "test_export_sizes.py", "test_functionalize.py", "test_grouped.py"),
)


def is_last(path: Path) -> bool:
    return path.name in LAST or path.parent.name in ("huggingface", "train")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--devices", type=int, default=8, metavar="N", help="number of virtual devices (default: 8)")
    parser.addoption("--lazy", action="store_true", help="run each test under spmd.lazy(): operations wait, and run as one program")
    parser.addoption("--optimize", action="store_true", help="compile as users do, not fast, in tests without the mark `optimized` too")


def pytest_configure(config: pytest.Config) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", mesh.AcceleratorIdle)  # tests want virtual devices on every machine
        mesh.virtual_devices(config.getoption("--devices"))
    # CPU torch in one thread, here and in what tests start: its tensors are small, and threads that wait for the next one take a core.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    # This process keeps no programs; those that tests start share a folder, which goes with the run.
    jax.config.update("jax_enable_compilation_cache", False)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="spmd-tests-")
    gc.disable()  # while modules are imported, which leaves hardly any garbage and takes a quarter longer with it


def pytest_unconfigure(config: pytest.Config) -> None:
    if "PYTEST_XDIST_WORKER" not in os.environ:
        shutil.rmtree(Path(os.environ["XDG_CACHE_HOME"]), ignore_errors=True)


def pytest_collection_finish(session: pytest.Session) -> None:
    gc.enable()
    gc.set_threshold(20_000, 10, 10)  # a collection in thirty that Python would make: nine tenths of what they cost


def pytest_sessionfinish() -> None:
    gc.collect()
    gc.freeze()  # pytest collects five times more: errors of finalizers have been seen


def pytest_report_header(config: pytest.Config) -> str:
    return f"virtual devices: {config.getoption('--devices')}"


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    num_devices = config.getoption("--devices")
    items.sort(key=lambda item: (item.path.name not in LONG, is_last(item.path)))  # stable: the others stay in their order
    for item in items:
        if item.nodeid.partition("::")[0] in compilation.OPTIMIZED:
            item.add_marker(pytest.mark.optimized)
        marker = item.get_closest_marker("multidevice")
        if marker is None:
            continue
        num_needed = marker.kwargs.get("num", 2)
        if num_devices < num_needed:
            item.add_marker(pytest.mark.skip(reason=f"needs {num_needed} devices, --devices gave {num_devices}"))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Compile fast, except for tests marked `optimized`; a hook, not a fixture, so that fixtures of any scope are compiled so too."""
    with compilation.fast(not item.config.getoption("--optimize") and item.get_closest_marker("optimized") is None):
        done = yield
    compilation.drop_programs_that_pile_up()
    return done


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None, object, object]:
    """With `--lazy`, what a test computes eagerly is recorded; fixtures are not."""
    if not item.config.getoption("--lazy"):
        return (yield)
    import spmd

    with spmd.lazy(max_retraces=10**9):
        return (yield)


@pytest.fixture
def num_devices(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--devices")


@pytest.fixture
def mesh_4x2(num_devices: int) -> mesh.Mesh:
    """Eight devices, four along `data` and two along `model`."""
    if num_devices < 8:
        pytest.skip(f"mesh_4x2 needs 8 devices, --devices gave {num_devices}")
    return mesh.Mesh(range(8), (4, 2), ("data", "model"))
