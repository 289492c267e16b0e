"""`step.save` and `step.load`: executables that another process compiled are found by the trace, or refused by name."""

import json
import zipfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest
import torch
from torch import nn

import mesh
import spmd
from spmd.base._jax_executables import _Unpickler
from spmd.program import _executable_file
from tests import launched
from tests.oracle import descend

SCRIPT = """
import sys, warnings
import jax, torch, spmd

warnings.simplefilter("error", UserWarning)
compiled = []
jax.monitoring.register_scalar_listener(lambda event, *_, **__: compiled.append(event.endswith("backend_compile_duration")))
spmd.configure(cache_dir=False)
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.Dropout(0.5), torch.nn.Linear(16, 16)).to("jax")
optimizer = torch.optim.AdamW(model.parameters())

@spmd.compile
def train_step(x):
    optimizer.zero_grad()
    loss = model(x).pow(2).mean()
    loss.backward()
    optimizer.step()
    return loss

x = torch.linspace(0, 1, 128).reshape(8, 16).to("jax")
if sys.argv[2] == "load":
    train_step.load(sys.argv[1])
program = train_step.program(x)
before = len(compiled)
losses = [train_step(x).item() for _ in range(3)]
if sys.argv[2] == "save":
    train_step.save(sys.argv[1])
print(program.timings.lower_s < 0.01, losses)
"""


@contextmanager
def compilations() -> Generator[list[str]]:
    """What jax compiles meanwhile."""
    found: list[str] = []

    def note(event: str, duration_secs: float, **about: Any) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(str(about.get("fun_name", "")))

    jax.monitoring.register_event_duration_secs_listener(note)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(note)


def trained(shape: tuple[int, int] = (4, 2), **options: Any) -> tuple[Any, nn.Module, Callable[[], torch.Tensor]]:
    """A step that draws and counts, its model, and batches over a mesh."""
    torch.manual_seed(1)
    grid = mesh.Mesh(range(shape[0] * shape[1]), shape, ("data", "model"))
    layers = [nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.25), nn.GELU()) for _ in range(4)]
    model = nn.Sequential(*layers, nn.BatchNorm1d(8)).to("jax")
    for layer in layers:
        spmd.mark_sharding(next(layer.parameters()), grid, (None, "model"))
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    @spmd.compile(**options)
    def train_step(x: torch.Tensor) -> torch.Tensor:
        return descend(model, optimizer, x)

    steps = options.get("steps_per_call", 1)
    sizes, spec = ((16, 8), ("data", None)) if steps == 1 else ((steps, 16, 8), (None, "data", None))
    return train_step, model, lambda: spmd.mark_sharding(torch.rand(sizes).to("jax"), grid, spec)


LOOPS: list[dict[str, Any]] = [{"roll": True, "shape": (1, 1)}, {"steps_per_call": 3, "shape": (1, 1)}]  # see the test of what is refused


@pytest.mark.parametrize("options", [{}, *LOOPS, {"keep_grads": True}, {"debug_nans": True}], ids=str)
def test_a_loaded_program_is_found_by_the_trace_and_computes_the_same(tmp_path: Path, options: dict[str, Any]) -> None:
    step, model, batch = trained(**options)
    batches = [batch() for _ in range(3)]
    want = [step(x).tolist() for x in batches]
    assert step.save(tmp_path / "step.programs") == tmp_path / "step.programs"
    again, other, batch = trained(**options)
    again.load(tmp_path / "step.programs")
    batches = [batch() for _ in range(3)]
    with compilations() as compiled:
        got = [again(x).tolist() for x in batches]
    assert not [name for name in compiled if "train_step" in name]
    assert got == want
    assert (again.num_traces, again.num_executables, again.retraces) == (1, 1, [])
    for (name, a), b in zip(model.state_dict().items(), other.state_dict().values(), strict=True):
        assert torch.equal(a.cpu(), b.cpu()), name
    assert (again.flops(), again.memory(), again.collectives()) == (step.flops(), step.memory(), step.collectives())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2, torch.complex64], ids=str)
def test_a_program_of_any_dtype_is_loaded(dtype: torch.dtype, tmp_path: Path) -> None:
    def scale(x: torch.Tensor) -> torch.Tensor:
        return (x.to(torch.complex64) * 2).real.sum() if dtype.is_complex else (x.float() * 2).sum().to(dtype).float()

    x = torch.ones(4).to(dtype).to("jax")
    step, again = spmd.compile(scale), spmd.compile(scale)
    step(x)
    step.save(tmp_path / "scale.programs")
    again.load(tmp_path / "scale.programs")
    with compilations() as compiled:
        assert again(x).item() == 8
    assert not [name for name in compiled if "scale" in name]


def test_another_process_neither_lowers_nor_compiles(tmp_path: Path) -> None:
    def run(what: str) -> str:
        done = launched.run(SCRIPT, tmp_path / "step", what)
        assert done.code == 0, done.err
        return done.out

    saved, loaded = run("save"), run("load")
    assert saved.startswith("False ") and loaded.startswith("True ")
    assert saved.split(" ", 1)[1] == loaded.split(" ", 1)[1]


def test_all_programs_of_a_step_are_in_its_file_and_evaluation_has_its_own(tmp_path: Path) -> None:
    model = nn.Linear(4, 4).to("jax")

    def evaluate(x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        with torch.no_grad():
            return model(x) * scale

    step, again = spmd.compile(evaluate), spmd.compile(evaluate)
    calls = [(torch.ones(2, 4, device="jax"),), (torch.ones(3, 4, device="jax"),)]
    want = [step(*call).tolist() for call in calls]
    step.save(tmp_path / "evaluate")
    again.load(tmp_path / "evaluate")
    with compilations() as compiled:
        assert [again(*call).tolist() for call in calls] == want
    assert not compiled
    again.save(tmp_path / "copy")  # what was read can be written again
    third = spmd.compile(evaluate)
    third.load(tmp_path / "copy")
    with compilations() as compiled:
        assert third(*calls[0]).tolist() == want[0]
    assert not compiled


def saved(path: Path) -> Any:
    def double(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    step = spmd.compile(double)
    step(torch.ones(3, device="jax"))
    step.save(path)
    return spmd.compile(double)


def test_a_program_that_is_not_in_the_file_is_compiled_with_a_warning(tmp_path: Path) -> None:
    step = saved(tmp_path / "step")
    step.load(tmp_path / "step")
    with pytest.warns(UserWarning, match="double is compiled: the loaded file .*step has no program for this call"):
        assert step(torch.ones(4, device="jax")).tolist() == [2.0] * 4


def rewritten(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    with zipfile.ZipFile(path) as archive:
        parts = {name: archive.read(name) for name in archive.namelist()}
    manifest = json.loads(parts["manifest.json"])
    change(manifest)
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in {**parts, "manifest.json": json.dumps(manifest).encode()}.items():
            archive.writestr(name, content)


@pytest.mark.parametrize("fact", ["jax", "jaxlib", "torch", "the code of spmd", "platform", "devices", "flags", "processor"])
def test_a_file_for_something_else_is_refused_by_what_differs(tmp_path: Path, fact: str) -> None:
    step = saved(tmp_path / "step")
    rewritten(tmp_path / "step", lambda manifest: manifest["facts"].update({fact: "another"}))
    with pytest.raises(spmd.SpmdError, match="does not match this process") as raised:
        step.load(tmp_path / "step")
    (line,) = str(raised.value).splitlines()[1:-1]
    assert line.startswith(f"  {fact}: another there, ") and line.endswith(" here")
    assert "fix: call double(...) once here" in str(raised.value)


def test_a_file_of_another_function_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "step")
    with pytest.raises(spmd.SpmdError, match=r"contains programs of double, not of <lambda>"):
        spmd.compile(lambda x: x + 1).load(tmp_path / "step")


def test_a_path_that_can_be_no_file_is_refused(tmp_path: Path) -> None:
    step = spmd.compile(lambda x: x + 1)
    step(torch.ones(2).to("jax"))
    for path, text in {
        None: "save takes the path of a file, got None",
        3: "save takes the path of a file, got 3",
        tmp_path: f"is a folder\n(.*)\n  fix: .*save\\('{tmp_path}/programs.spmd'\\)",
        str(tmp_path / "no" / "x"): f"there is no folder '{tmp_path}/no'\n(.*)\n  fix: os.makedirs",
    }.items():
        with pytest.raises(spmd.SpmdError, match=text):
            step.save(path)  # pyright: ignore[reportArgumentType]
    with pytest.raises(spmd.SpmdError, match="load takes the path of a file, got 3"):
        step.load(3)  # pyright: ignore[reportArgumentType]
    assert not list(tmp_path.iterdir())


def test_what_is_no_whole_file_is_refused_before_anything_of_it_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Unpickler, "load", lambda _: pytest.fail("unpickled"))
    file = tmp_path / "step"
    step = saved(file)
    whole = file.read_bytes()
    marker, first = whole.index(b"program0.bin") + 200, whole.index(b"PK\x01\x02")
    damages = {
        "cut": whole[: len(whole) // 2],
        "text": b"no archive",
        "empty": b"",
        "changed": whole[:marker] + bytes([whole[marker] ^ 1]) + whole[marker + 1 :],
        "not deflated": whole[:marker] + b"\xff" * 100 + whole[marker + 100 :],
        "another method": whole[: first + 10] + b"\x63" + whole[first + 11 :],
    }
    for damage, content in damages.items():
        file.write_bytes(content)
        with pytest.raises(spmd.SpmdError, match="is not a complete file of programs"):
            step.load(file)
            pytest.fail(damage)
    file.write_bytes(whole)
    for change in (
        lambda manifest: manifest.update(format="another"),
        lambda manifest: manifest.pop("facts"),
        lambda manifest: manifest["programs"][0]["parts"].update({"program0.bin": "0"}),
    ):
        file.write_bytes(whole)
        rewritten(file, change)
        with pytest.raises(spmd.SpmdError, match="is not a complete file of programs"):
            step.load(file)
    for kind in (FileNotFoundError, spmd.SpmdError):
        with pytest.raises(kind, match=r"load\('.*/nothing'\): no such file(?s:.*)fix: .*save\('.*/nothing'\) first"):
            step.load(tmp_path / "nothing")
    with pytest.raises(spmd.SpmdError, match="is not a complete file of programs\n  it is a folder\n  fix: save it again"):
        step.load(tmp_path)


def test_a_step_without_a_program_has_nothing_to_save(tmp_path: Path) -> None:
    with pytest.raises(spmd.SpmdError, match=r"has no program yet.*\n.*once first"):
        spmd.compile(lambda x: x + 1).save(tmp_path / "step")
    assert not list(tmp_path.iterdir())


def test_a_program_that_calls_back_into_python_is_refused_and_writes_nothing(tmp_path: Path) -> None:
    def looked_up(x: Any) -> Any:
        return jax.pure_callback(lambda v: v, jax.ShapeDtypeStruct((3,), "float32"), x)

    step = spmd.compile(lambda x: spmd.call_jax(looked_up, (x,)))
    step(torch.ones(3, device="jax")).tolist()
    with pytest.raises(spmd.SpmdError, match=r"a program of <lambda> cannot be saved\n  it contains "):
        step.save(tmp_path / "step")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("options", [{"roll": True}, {"steps_per_call": 3}], ids=str)
def test_a_program_that_could_hang_once_it_is_loaded_is_refused_and_writes_nothing(tmp_path: Path, options: dict[str, Any]) -> None:
    step, _, batch = trained(**options)
    step(batch()).tolist()
    with pytest.raises(spmd.SpmdError, match=r"a program of train_step cannot be saved\n  it has collectives in a loop and outside it"):
        step.save(tmp_path / "step")
    assert not list(tmp_path.iterdir())


def test_a_job_is_told_where_its_programs_lie(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = saved(tmp_path / "step")
    monkeypatch.setattr(_executable_file, "job", lambda: object())
    with pytest.raises(spmd.SpmdError, match=r"the programs of double cannot be loaded in a job(.|\n)*--job-dir"):
        step.load(tmp_path / "step")
