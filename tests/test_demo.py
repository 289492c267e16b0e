"""The demonstration, end to end with a tiny configuration, and the parts that it shows."""

import io
from pathlib import Path

import pytest
import torch
from rich.console import Console

import mesh
import spmd
from spmd.base._errors import UsageError
from spmd.demo import DemoArgs, _screens, _text, main
from spmd.demo._gpt2 import GPT, SHARDINGS, GPTConfig
from spmd.demo._train import Demo

TINY = GPTConfig(vocabulary=11, seq=8, width=16, layers=2, heads=2, dropout=0.1)


def rendered(renderable: object, width: int = 80) -> str:
    console = Console(file=io.StringIO(), width=width, highlight=False)
    console.print(renderable)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def tiny_args(num_devices: int, out: Path) -> DemoArgs:
    grid = "data=4,model=2" if num_devices == 8 else f"data={num_devices}"
    return DemoArgs(steps=12, mesh=grid, devices=num_devices, batch=16, seq=16, width=32, layers=1, heads=2, sample=10, out=out)


def test_the_demo_learns_and_saves_what_cpu_torch_reads(num_devices: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "folder" / "model.pt"
    assert main(tiny_args(num_devices, out)) == 0
    printed = capsys.readouterr().out
    for part in ("replicated", "compiled the step", "1 executable, 0 retraces", "held out", "sample", "torch alone"):
        assert part in printed
    state = torch.load(out)
    model = GPT(GPTConfig(len(state["tokens.weight"]), seq=16, width=32, layers=1, heads=2))
    model.load_state_dict(state)
    assert model(torch.zeros(1, 16, dtype=torch.int64)).isfinite().all()


def test_a_mesh_that_does_not_fit_is_explained_without_a_traceback(num_devices: int, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"--mesh 'data=1000' has 1000 devices, but --devices is {num_devices}"):
        main(DemoArgs(mesh="data=1000", devices=num_devices, out=tmp_path / "model.pt"))


@pytest.mark.multidevice(num=8)
def test_a_block_costs_two_all_reduces_over_model_each_way_and_gathers_nothing(tmp_path: Path) -> None:
    demo = Demo(tiny_args(8, tmp_path / "model.pt"), Console(file=io.StringIO()))
    demo.training.train_step(*demo.batch(demo.text.train))
    counts = demo.training.train_step.collectives().by_axis()
    assert counts.pop(("all-reduce", ("model",))) == 4 * demo.args.layers
    assert set(counts) == {("all-reduce", ("data",))}


def test_every_pattern_of_the_shardings_names_a_parameter_of_its_rank(mesh_4x2: mesh.Mesh) -> None:
    model = GPT(TINY).to("jax")
    named = {
        pattern: parameter for pattern in SHARDINGS for name, parameter in model.named_parameters() if name == pattern.replace("*", "0")
    }
    assert named.keys() == SHARDINGS.keys()
    for pattern, parameter in named.items():
        spmd.mark_sharding(parameter, mesh_4x2, SHARDINGS[pattern])


def test_the_model_looks_only_back() -> None:
    torch.manual_seed(0)
    model = GPT(TINY).eval()
    tokens = torch.randint(0, 11, (1, 8))
    changed = tokens.clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % 11
    logits, other = model(tokens), model(changed)
    torch.testing.assert_close(logits[0, :5], other[0, :5])
    assert not torch.allclose(logits[0, 5:], other[0, 5:])


def test_the_head_is_the_embedding_on_the_device_too() -> None:
    model = GPT(TINY).to("jax")
    assert model.head.weight is model.tokens.weight


def test_the_text_is_split_by_file_and_decodes_to_itself() -> None:
    text = _text.standard_library()
    assert len(text.train) > 10 * len(text.held_out) > 100_000
    source = text.decode(text.held_out[:2000])
    assert source.isascii()
    assert "import" in text.decode(text.train[:20_000])


def test_targets_are_the_next_characters() -> None:
    x, y = _text.batch(torch.arange(100), 4, 8, torch.Generator().manual_seed(0))
    assert x.shape == y.shape == (4, 8)
    assert torch.equal(x + 1, y)


def test_the_sharding_table_counts_the_bytes_of_one_device(mesh_4x2: mesh.Mesh) -> None:
    model = torch.nn.Linear(16, 32).to("jax")
    spmd.mark_sharding(model.weight, mesh_4x2, ("model", None))
    shown = rendered(_screens.sharding_table(model, mesh_4x2))
    assert "(model, None)" in shown
    assert "16×16" in shown
    assert "1 KiB" in shown  # 16 x 16 floats
    assert "replicated" in shown


def test_the_curve_falls_from_the_upper_left_to_the_lower_right() -> None:
    curve = _screens.Curve([_screens.Series("loss", [0, 1, 2, 3], [4.0, 3.0, 2.0, 1.0], "blue")], "step")
    lines = rendered(curve).splitlines()
    drawn = [[column for column, character in enumerate(line) if "⠀" < character <= "⣿"] for line in lines[:12]]
    assert all(drawn)
    assert [min(columns) for columns in drawn] == sorted(min(columns) for columns in drawn)
    assert "4.00 ┤" in lines[0]
    assert "1.00 ┤" in lines[11]
    assert "step 3" in lines[13]
