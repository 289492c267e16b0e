"""Compiled programs as files: found by the next process, whole or not at all, of one user, limited in size."""

import os
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.compilation_cache import compilation_cache
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import mesh
import spmd
from spmd.base import _program_files, _settings
from spmd.base._jax_executables import is_in_order_when_read
from spmd.base._program_files import ProgramFiles
from tests import launched

SCRIPT = """
import sys
import jax, torch, spmd
from spmd.base import _program_files
_program_files.WORTH_KEEPING_S = 0.0
found = []
if len(sys.argv) > 1:
    jax.config.update("jax_compilation_cache_dir", sys.argv[1])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.monitoring.register_event_listener(lambda event, **_: found.append(event.rpartition("/")[-1]))
layers = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(24))).to("jax")
optimizer = torch.optim.AdamW(layers.parameters())

@spmd.compile
def step(x):
    optimizer.zero_grad()
    loss = layers(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss

torch.manual_seed(0)
step(torch.ones(8, 64, device="jax")).item()
print(found.count("cache_hits"), found.count("cache_misses"))
"""


@pytest.fixture
def kept() -> Generator[None]:
    """Programs of this process are kept, however short their compilation."""
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs", "jax_persistent_cache_min_entry_size_bytes")
    before = {name: jax.config.values[name] for name in names}
    limit = _settings.in_force.cache_max_bytes
    jax.config.update("jax_enable_compilation_cache", True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_program_files, "WORTH_KEEPING_S", 0.0)
        yield
    _settings.in_force.cache_dir, _settings.in_force.cache_max_bytes = None, limit
    jax.config.update("jax_enable_compilation_cache", False)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def run(home: Path, *arguments: object) -> str:
    """What a process of its own prints: programs found, programs compiled and kept."""
    done = launched.run(SCRIPT, *arguments, XDG_CACHE_HOME=str(home))
    assert done.code == 0, done.err
    return done.out.strip()


def test_the_next_process_compiles_nothing_and_nobody_asked_for_it(tmp_path: Path) -> None:
    hits, misses = run(tmp_path).split()  # the step, and small programs of the optimizer's state
    assert int(misses) >= 1
    assert hits == "0"
    (program,) = (tmp_path / "spmd").glob("machine-*/*step*.program")
    assert (tmp_path / "spmd").stat().st_mode & 0o777 == 0o700
    assert program.stat().st_mode & 0o777 == 0o600
    assert run(tmp_path) == f"{misses} 0"


@pytest.mark.parametrize("damage", ["cut", "changed", "empty", "jax's"])
def test_a_broken_program_is_compiled_again_and_replaced(tmp_path: Path, damage: str) -> None:
    files = ProgramFiles(tmp_path, 1 << 20)
    files.put("key", b"program" * 100)
    assert files.get("key") == b"program" * 100
    (file,) = tmp_path.glob("machine-*/*")
    whole = file.read_bytes()
    broken = {"cut": whole[:-1], "changed": whole[:-1] + b"?", "empty": b"", "jax's": whole[60:]}
    file.write_bytes(broken[damage])
    assert files.get("key") is None
    assert not file.exists()
    files.put("key", b"anew")
    assert files.get("key") == b"anew"


def test_the_programs_that_nobody_used_for_longest_go_first(tmp_path: Path) -> None:
    other = tmp_path / "notes.txt"
    other.write_text("not a program")
    files = ProgramFiles(tmp_path, 300)
    for age, key in ((30, "first"), (20, "second"), (10, "third")):
        files.put(key, b"x" * 40)
        (file,) = tmp_path.glob(f"machine-*/{key}.program")
        os.utime(file, (time.time() - age,) * 2)
    assert files.get("first") is not None
    files.put("fourth", b"x" * 40)
    assert {path.stem for path in tmp_path.glob("machine-*/*")} == {"first", "third", "fourth"}
    assert other.exists()


def test_the_newest_of_some_keys_is_the_one_that_was_written_or_read_last(tmp_path: Path) -> None:
    files = ProgramFiles(tmp_path, 1 << 20)
    assert files.newest(["a", "b"]) is None
    for age, key in ((20, "a"), (30, "b"), (10, "c")):
        files.put(key, key.encode())
        (file,) = tmp_path.glob(f"machine-*/{key}.program")
        os.utime(file, (time.time() - age,) * 2)
    assert files.get("b") == b"b"
    assert files.newest(["a", "b", "c", "missing"]) == b"b"


def test_the_folder_is_not_read_for_every_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files, scans, scan = ProgramFiles(tmp_path, 1000), [], ProgramFiles._drop_oldest
    monkeypatch.setattr(ProgramFiles, "_drop_oldest", lambda self: (scans.append(1), scan(self)))
    for i in range(200):
        files.put(str(i), b"")
        assert sum(path.stat().st_size for path in tmp_path.glob("machine-*/*")) <= 1000
    assert files.get("199") == b""
    assert len(scans) < 120
    wide = ProgramFiles(tmp_path, 1 << 20)
    scans.clear()
    for i in range(200):
        wide.put(str(i), b"")
    assert len(scans) == 4


def test_programs_of_operations_are_kept_too(tmp_path: Path) -> None:
    lines = ("print(", "torch.ones(4, 64, device='jax').sort().values.sum().item()\nprint(")
    script = "import spmd.base._program_files as files\nfiles.WORTH_KEEPING_S = 0.0\n" + SCRIPT.replace(*lines)
    found = launched.run(script, XDG_CACHE_HOME=str(tmp_path)).out.split()
    assert int(found[1]) > 1
    assert launched.run(script, XDG_CACHE_HOME=str(tmp_path)).out.split() == [found[1], "0"]


def test_a_folder_that_others_can_write_to_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture, kept: None) -> None:
    folder = tmp_path / "spmd"
    folder.mkdir()
    folder.chmod(0o777)
    with pytest.raises(spmd.SpmdError, match="is writable by other users") as raised:
        spmd.configure(cache_dir=folder)
    assert f"chmod 700 {folder}" in str(raised.value)
    with pytest.MonkeyPatch.context() as patch, caplog.at_level("WARNING", "spmd.compile"):
        patch.setenv("XDG_CACHE_HOME", str(tmp_path))
        spmd.compile(lambda x: x.cos() * 7)(torch.ones(13, device="jax"))
        spmd.compile(lambda x: x.cos() * 8)(torch.ones(13, device="jax"))
    assert not list(folder.iterdir())
    (record,) = caplog.records
    assert record.message.startswith(f"compiled programs are not cached for later processes: cache_dir={str(folder)!r}")


def test_programs_lie_in_the_folder_that_is_configured_until_none_are_kept(tmp_path: Path, kept: None) -> None:
    assert spmd.configure(cache_dir=tmp_path / "programs").cache_dir == tmp_path / "programs"
    spmd.compile(lambda x: x.sin() * 7)(torch.ones(11, device="jax"))
    programs = list((tmp_path / "programs").glob("*/*lambda*.program"))
    assert programs
    assert spmd.configure(cache_max_bytes=1 << 20).cache_dir == tmp_path / "programs"
    assert spmd.configure(cache_dir=False).cache_dir is False
    spmd.compile(lambda x: x.sin() * 9)(torch.ones(11, device="jax"))
    assert list((tmp_path / "programs").glob("*/*lambda*.program")) == programs


def test_a_program_is_the_same_read_back(tmp_path: Path, kept: None) -> None:
    spmd.configure(cache_dir=tmp_path)
    x, made = torch.linspace(0, 1, 12, device="jax"), []
    for _ in range(2):
        step = spmd.compile(lambda x: (x.exp() @ x, x.softmax(0)))
        made.append(([y.cpu().tolist() for y in step(x)], step.hlo(), step.memory()))
        jax.clear_caches()
    assert made[0] == made[1]
    assert len(list(tmp_path.glob("*/*lambda*.program"))) == 1


def test_a_program_for_chips_that_are_not_here_needs_no_order() -> None:
    pytest.importorskip("libtpu", reason="the TPU compiler: pip install 'spmd-mesh[tpu]'")
    pod = mesh.Mesh(range(4), (4,), ("data",), topology="v5e:2x2")
    x = jax.ShapeDtypeStruct((16,), np.float32, sharding=NamedSharding(pod.to_jax(), P("data")))
    assert is_in_order_when_read(jax.jit(lambda x: x.sum()).lower(x).compile().runtime_executable())


def summed(x: Any) -> Any:
    return jax.lax.psum(x, "data") / 8


def looped(body: Callable[[Any], Any], x: Any) -> Any:
    return jax.lax.fori_loop(0, 5, lambda _, carry: jnp.tanh(body(carry)), x)


COLLECTIVES = {  # name: a program for eight devices, and whether it may be cached
    "outside a loop": (lambda x: summed(looped(jnp.sin, x)), True),
    "in a loop": (lambda x: looped(summed, x), True),
    "in a loop and outside": (lambda x: summed(looped(summed, x)), False),
    "in two loops": (lambda x: looped(summed, looped(summed, x) + 1), False),
    "in a branch and outside": (lambda x: summed(jax.lax.cond(summed(x)[0] > 0, summed, jnp.sin, x)), False),
}


@pytest.mark.parametrize("where", COLLECTIVES)
def test_a_program_whose_collectives_would_lose_their_order_is_not_kept(where: str, tmp_path: Path, kept: None) -> None:
    """See Note [Collectives that lose their order]: it hung when it was read. That holds for programs of jax alone too."""
    fn, is_kept = COLLECTIVES[where]
    spmd.configure(cache_dir=tmp_path)
    grid = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    split = jax.sharding.PartitionSpec("data")

    def collective(x: Any) -> Any:
        return fn(x)

    step = jax.jit(jax.shard_map(collective, mesh=grid, in_specs=split, out_specs=split, check_vma=False))
    step(jnp.ones(64)).block_until_ready()
    assert bool(list(tmp_path.glob("*/*collective*"))) is is_kept


def test_a_folder_that_the_program_gave_to_jax_is_left_to_jax(tmp_path: Path) -> None:
    assert run(tmp_path, tmp_path / "jax").startswith("0 ")
    assert not (tmp_path / "spmd").exists()
    assert list((tmp_path / "jax").glob("*step*-cache"))


def test_programs_that_cannot_be_written_fail_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = ProgramFiles(tmp_path / "programs", 1 << 20)
    (tmp_path / "programs").rename(tmp_path / "moved")
    with caplog.at_level("WARNING", "spmd.compile"):
        files.put("key", b"program")
    assert files.get("key") is None
    assert caplog.records[0].message.startswith("a compiled program could not be cached: ")


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"cache_dir": "/dev/null/programs"}, "is not a writable folder"),
        ({"cache_dir": True}, "cache_dir must be a folder or False"),
        ({"cache_dir": ""}, "cache_dir must be a folder or False"),
        ({"cache_max_bytes": 0}, "cache_max_bytes must be a number of bytes"),
        ({"cache_max_bytes": 1.5}, "cache_max_bytes must be a number of bytes"),
    ],
)
def test_folders_and_limits_that_mean_nothing_are_refused(given: dict[str, object], text: str) -> None:
    with pytest.raises(spmd.SpmdError, match=text):
        spmd.configure(**given)  # type: ignore[arg-type]
