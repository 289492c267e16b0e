"""Stored traces and files: source files that change, damaged records, output; and what a step says about a stored trace."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import PIL.Image

ROOT = Path(__file__).parents[2]
START = """
import sys, torch, spmd
from spmd.base import _program_files
_program_files.WORTH_KEEPING_S = 0.0  # executables that compile fast too
spmd.configure(cache_dir="cache")
X = torch.arange(4.0).to("jax")
"""
TRAIN = """
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh()).to("jax")
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

@spmd.compile
def step(x):
    optimizer.zero_grad()
    loss = (model(x) ** 2).mean()
    loss.backward()
    optimizer.step()
    return loss.detach()
"""
LOSSES = TRAIN + "print([round(step(X).item(), 5) for _ in range(3)], step.num_traces)"


def run(folder: Path, script: str, start: str = START) -> list[str]:
    """The lines that a script prints in a process of its own. The file stays the same file if the script does."""
    path, text = folder / "script.py", start + textwrap.dedent(script)
    if not path.exists() or path.read_text() != text:
        path.write_text(text)
    env = {
        **os.environ,
        "XDG_CACHE_HOME": str(folder),
        "JAX_PLATFORMS": "cpu",
        "PYTHONPATH": f"{ROOT}{os.pathsep}{folder}",
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    env.pop("PYTEST_CURRENT_TEST", None)
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, check=False, env=env, cwd=folder)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_the_first_step_of_a_second_process_uses_the_default_folder(tmp_path: Path) -> None:
    start = START.replace('spmd.configure(cache_dir="cache")\n', "")
    assert start != START
    first, second = run(tmp_path, LOSSES, start), run(tmp_path, LOSSES, start)
    assert first[0].endswith("] 1")
    assert second[0] == first[0].removesuffix("1") + "0"


SOURCES = {
    "global": "SCALE = 2.0\ndef of_global(x): return x * SCALE\n",
    "default": "def of_default(x, scale=2): return x * scale\n",
    "inner": "def of_inner(x):\n    inner = lambda y, s=(1, 2.0): y * s[1]\n    return inner(x)\n",
    "class": "class A:\n    def __mul__(self, x): return x * 2\ndef of_class(x): return A() * x\n",
    "module": "import torch\nclass B(torch.nn.Module):\n    def forward(self, x): return x * 2\nM = B()\ndef of_module(x): return M(x)\n",
}


def test_an_edit_of_the_same_size_and_time_is_noticed(tmp_path: Path) -> None:
    module, source = tmp_path / "edited.py", "".join(SOURCES.values())
    script = """
    import edited
    functions = edited.of_global, edited.of_default, edited.of_inner, edited.of_class, edited.of_module
    steps = [spmd.compile(lambda x, f=f: f(x)) for f in functions]
    print([step(X).tolist()[1] for step in steps], [step.num_traces for step in steps])
    """
    module.write_text(source)
    before = module.stat()
    assert run(tmp_path, script) == [f"{[2.0] * 5} {[1] * 5}"]
    assert run(tmp_path, script)[0].startswith(str([2.0] * 5))
    module.write_text(source.replace("2", "3"))
    os.utime(module, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert run(tmp_path, script) == [f"{[3.0] * 5} {[1] * 5}"]


def test_a_changed_file_that_a_library_opens_is_noticed(tmp_path: Path) -> None:
    script = """
    import glob, runpy, PIL.Image
    functions = (
        lambda: PIL.Image.open("scale.png").getpixel((0, 0)),
        lambda: runpy.run_path("scale.py")["SCALE"],
        lambda: len(glob.glob("data/*")),
    )
    steps = [spmd.compile(lambda x, f=f: x * f()) for f in functions]
    print([step(X).tolist()[1] for step in steps])
    """
    for value in (2, 3):
        PIL.Image.new("L", (1, 1), value).save(tmp_path / "scale.png")
        (tmp_path / "scale.py").write_text(f"SCALE = {value}")
        (tmp_path / "data").mkdir(exist_ok=True)
        for i in range(value):
            (tmp_path / "data" / str(i)).touch()
        assert run(tmp_path, script) == [str([float(value)] * 3)]


def test_a_damaged_record_is_not_used(tmp_path: Path) -> None:
    first = run(tmp_path, LOSSES)
    for content in (b"\x80\x04garbage", b"\x80\x04]."):
        with_sum = b"spmd program 1\n" + hashlib.sha256(content).digest() + content
        for file in (tmp_path / "cache").rglob("trace-*"):
            file.write_bytes(with_sum)
        assert run(tmp_path, LOSSES) == first
    for file in (tmp_path / "cache").rglob("trace-*"):
        file.write_bytes(file.read_bytes()[:100])
    assert run(tmp_path, LOSSES) == first


def test_a_record_without_its_executable_is_not_used(tmp_path: Path) -> None:
    first = run(tmp_path, LOSSES)
    for file in (tmp_path / "cache").rglob("*.program"):
        if not file.name.startswith("trace-"):
            file.unlink()
    assert run(tmp_path, LOSSES) == first


def test_what_a_trace_prints_or_writes_appears_in_every_process(tmp_path: Path) -> None:
    script = """
    from pathlib import Path
    @spmd.compile
    def printing(x):
        print("printed")
        return x + 1
    @spmd.compile
    def writing(x):
        Path("written.txt").write_text("text")
        return x + 2
    printing(X), writing(X)
    print(Path("written.txt").read_text())
    """
    assert run(tmp_path, script) == ["printed", "text"]
    (tmp_path / "written.txt").unlink()
    assert run(tmp_path, script) == ["printed", "text"]


def test_a_step_describes_a_stored_trace_as_one_of_its_own(tmp_path: Path) -> None:
    script = (
        TRAIN
        + """
step(X)
print(step.rolled, step.flops(), step.memory().alias_bytes, len(step.hlo()))
print(step.retraces, "7 tensors written" in str(step), step.program(X) is not None)
step.clear()
step(X)
model.eval()
print(round(step(X).item(), 5), step.retraces)
print(step.num_traces, file=sys.stderr)
"""
    )
    first = run(tmp_path, script)
    assert run(tmp_path, script) == first


def test_a_long_list_in_reach_is_stored_without_a_search_of_all(tmp_path: Path) -> None:
    script = """
    rows = [{"i": i} for i in range(300_000)]
    step = spmd.compile(lambda x: x * rows[5]["i"])
    import time
    start = time.perf_counter()
    print(step(X).tolist()[1], time.perf_counter() - start < 20)
    """
    assert run(tmp_path, script) == ["5.0 True"]
    shutil.rmtree(tmp_path / "cache")


ROLLED = """
import jax

mesh = spmd.Mesh(range(8), (8,), ("fsdp",))
torch.manual_seed(0)
model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Tanh()) for _ in range(6))).to("jax")
for layer in model:
    spmd.fully_shard(layer, mesh=mesh)
spmd.fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
compiled = []
jax.monitoring.register_event_duration_secs_listener(lambda event, duration_secs, **_: compiled.append(event))
jax.monitoring.register_event_listener(lambda event, **_: compiled.append(event))

@spmd.compile(roll=True)
def step(x):
    optimizer.zero_grad()
    loss = (model(x) ** 2).mean()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()

x = torch.linspace(-1, 1, 256).view(16, 16).to("jax")
compiled.clear()
losses = [round(step(x).item(), 6) for _ in range(3)]
requests, hits = (sum(event.endswith(name) for event in compiled) for name in ("backend_compile_duration", "cache_hits"))
print(losses, len(step.rolled) > 0, step.num_traces, requests - hits)
"""


def test_a_rolled_program_over_devices_is_compiled_again_without_a_trace(tmp_path: Path) -> None:
    """Its executable is not kept: see Note [Collectives that lose their order]. The lowered program is."""
    start = 'import os\nos.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"\n' + START
    first, second = run(tmp_path, ROLLED, start), run(tmp_path, ROLLED, start)
    kept = [file.name for file in (tmp_path / "cache").rglob("*.program")]
    assert not any(name.startswith("jit_step") for name in kept)
    losses = first[-1].rpartition("] ")[0]
    assert first[-1].split()[-3:-1] == ["True", "1"]
    assert second == [f"{losses}] True 0 1"]
