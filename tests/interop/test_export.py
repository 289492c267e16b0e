"""`spmd.export`: files that run without torch, in processes where torch cannot be imported, and what they refuse."""

import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mesh
import spmd
from spmd.interop import _exported_program
from tests.grids import grid, line
from tests.oracle import MLP, REORDERED, TOLERANCE, batch
from tests.without_torch import without_torch


def marked_mlp() -> tuple[nn.Module, mesh.Mesh]:
    torch.manual_seed(0)
    m = grid()
    model = MLP(p=0.25).to("jax")
    spmd.mark_sharding(model.up.weight, m, ("model", None))
    spmd.mark_sharding(model.down.weight, m, (None, "model"))
    return model, m


def test_a_sharded_training_step_goes_on_where_it_was_exported(tmp_path: Path, num_devices: int) -> None:
    model, m = marked_mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=10.0)

    @spmd.compile
    def step(x: torch.Tensor, *, y: torch.Tensor) -> dict[str, Any]:
        optimizer.zero_grad()
        loss = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        return {"loss": loss, "parts": (loss * 2, 3, None)}

    hosts = batch(16, 8), batch(16, 8, seed=2)
    x, y = (spmd.mark_sharding(t.to("jax"), m, ("data", None)) for t in hosts)
    step(x, y=y)
    before = {name: value.cpu() for name, value in model.state_dict().items()}
    path = spmd.export(step, (x,), tmp_path / "step.spmd", {"y": y})
    assert all(torch.equal(value.cpu(), before[name]) for name, value in model.state_dict().items())
    want = []
    for rate in (1e-2, 1e-2, 1e-3):
        optimizer.param_groups[0]["lr"] = rate
        want.append(step(x, y=y)["loss"].item())
    code = """
x, y = inputs
for rate in (1e-2, 1e-2, 1e-3):
    old = state["up.weight"]
    state, result = program(state, x, y=y, numbers={"optimizer.lr": rate})
    assert old.is_deleted(), "what is updated is donated"
    assert (float(result["parts"][0]), *result["parts"][1:]) == (2 * float(result["loss"]), 3, None)
    results.append(float(result["loss"]))
weight = state["up.weight"]
spec = [str(e) for e in weight.sharding.spec]
print(json.dumps([results, spec, np.asarray(weight).tolist(), sorted(state)]))
"""
    got, spec, weight, names = without_torch(code, path, *hosts, num_devices=num_devices)
    np.testing.assert_allclose(got, want, *REORDERED)
    assert spec[0] == "model"
    np.testing.assert_allclose(weight, model.up.weight.detach().cpu().as_subclass(torch.Tensor), *REORDERED)
    assert {"up.weight", "random state", "optimizer.up.weight.exp_avg"} <= set(names)


@pytest.mark.parametrize("uneven", [pytest.param(False, marks=pytest.mark.slow), True], ids=["even", "uneven"])
def test_a_model_for_inference(uneven: bool, tmp_path: Path, num_devices: int) -> None:
    width = 2 * num_devices + uneven
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Dropout(0.5)).eval()
    x = batch(width, 3)
    want = model(x)
    model = model.to("jax")
    spmd.mark_sharding(model[0].weight, line(), ("data", None))
    given = spmd.mark_sharding(x.to("jax"), line(), ("data", None))
    path = spmd.export(model, (given,), tmp_path / "model.spmd")
    code = """
state, out = program(state, inputs[0])
print(json.dumps([np.asarray(out).tolist(), [i["name"] for i in program.manifest["state"] if i["is_written"]]]))
"""
    got, written = without_torch(code, path, x, num_devices=num_devices)
    np.testing.assert_allclose(got, want.detach(), *TOLERANCE[torch.float32])
    assert written == []


@pytest.mark.slow
def test_a_decode_step_with_a_static_cache(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=32, n_head=4, vocab_size=64, n_positions=16, bos_token_id=None, eos_token_id=None)
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(config).eval().to("jax")
    cache = transformers.StaticCache(config=config, max_cache_len=16)

    def decode(token: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            out = model(token, past_key_values=cache, cache_position=position, position_ids=position[None], use_cache=True)
            return out.logits[:, -1].argmax(-1, keepdim=True)

    step = spmd.compile(decode)
    token, position = torch.tensor([[5]], device="jax"), torch.tensor([0], device="jax")
    step(token, position)  # the cache has its tensors then
    cache.reset()
    path = spmd.export(step, (token, position), tmp_path / "decode.spmd")
    want = []
    for i in range(6):
        token = step(token, torch.tensor([i], device="jax"))
        want.append(token.item())
    code = """
token = np.array([[5]])
for i in range(6):
    state, token = program(state, token, np.array([i]))
    results.append(int(token[0, 0]))
print(json.dumps(results))
"""
    assert without_torch(code, path, num_devices=1) == want


def exported(tmp_path: Path, **options: Any) -> Path:
    return spmd.export(MLP().to("jax"), (torch.zeros(2, 8, device="jax"),), tmp_path / "mlp.spmd", **options)


def load(path: Path) -> Any:
    return _exported_program.load(str(path))


def changed(path: Path, **entries: Any) -> Path:
    """The file with another manifest."""
    other = path.with_name("other.spmd")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            new.writestr(name, json.dumps({**json.loads(old.read(name)), **entries}) if name == "manifest.json" else old.read(name))
    return other


def no_program(path: Path) -> Path:
    path.write_text("{}")
    return path


def damaged(path: Path, part: str) -> Path:
    """The file with bytes of one part overwritten."""
    with zipfile.ZipFile(path) as archive:
        start = archive.getinfo(part).header_offset + 30 + len(part) + 10
    whole = path.read_bytes()
    path.write_bytes(whole[:start] + bytes(byte ^ 255 for byte in whole[start : start + 20]) + whole[start + 20 :])
    return path


VERSIONS = {"spmd": "9", "jax": "9.9"}
NOT_LOADED: dict[str, tuple[Callable[[Path], Path], str]] = {
    "no file of ours": (lambda p: no_program(p), "is not an exported program"),
    "a damaged manifest": (lambda p: damaged(p, "manifest.json"), r"or is damaged\n  manifest.json: "),
    "a damaged program": (lambda p: damaged(p, "program0.bin"), r"or is damaged\n  program0.bin: "),
    "format": (lambda p: changed(p, format=99), r"has format 99, but this loader reads up to 2\n  written with spmd"),
    "platform": (lambda p: changed(p, platforms=["tpu"]), r"is a program for tpu, but these devices are cpu(?s:.*)platforms=\(\"cpu\",\)"),
    "devices": (
        lambda p: changed(p, mesh={"shape": [512], "axes": ["data"]}),
        r"for 512 devices, but there are \d+\n  its mesh: \{'data': 512\}",
    ),
    "jax": (
        lambda p: changed(p, versions=VERSIONS, programs=[{}]),
        r"cannot be read by jax(?s:.*)spmd 9, jax 9.9(?s:.*)pip install jax==9.9",
    ),
}


@pytest.mark.parametrize(("change", "text"), NOT_LOADED.values(), ids=NOT_LOADED)
def test_what_cannot_run_here_says_why(change: Callable[[Path], Path], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        load(change(exported(tmp_path)))


def test_a_weight_that_is_damaged_is_refused_by_name(tmp_path: Path) -> None:
    path = exported(tmp_path)
    with zipfile.ZipFile(path) as archive:
        weight = next(name for name in archive.namelist() if name.endswith(".npy"))
    program = load(damaged(path, weight))
    with pytest.raises(ValueError, match=rf"or is damaged\n  {weight}: "):
        program.state()


X = np.zeros((2, 8), np.float32)
NOT_CALLED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a shape": (lambda p: p(p.state(), X[:1]), r"args\[0\] is float32\[2, 8\] in this program, but the value is float32\[1, 8\]"),
    "a dtype": (lambda p: p(p.state(), X.astype(int)), r"the value is int64\[2, 8\]"),
    "an argument": (lambda p: p(p.state()), r"the call has no args\[0\]"),
    "a number": (lambda p: p(p.state(), X, numbers={"lr": 1.0}), "takes no number 'lr'"),
    "a name": (lambda p: p.state({"up": X}), "no state 'up'"),
}


@pytest.mark.parametrize(("call", "text"), NOT_CALLED.values(), ids=NOT_CALLED)
def test_a_call_that_does_not_fit_says_what_is_wanted(call: Callable[[Any], Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=text):
        call(load(exported(tmp_path)))


def test_without_weights_they_are_given_and_other_platforms_can_be_asked_for(tmp_path: Path) -> None:
    path = exported(tmp_path, weights=False, platforms=("cpu", "tpu"))
    program = load(path)
    with pytest.raises(ValueError, match=r"has no value for 'up.weight'"):
        program.state()
    names = {item["name"]: np.ones(item["shape"], np.float32) for item in program.manifest["state"]}
    assert program(program.state(names), X)[1].shape == (2, 8)
    assert "args[0]: float32[2, 8]" in str(program) and str(program).startswith("MLP for cpu and tpu, one device")


def test_a_program_for_chips_that_are_not_here(tmp_path: Path) -> None:
    pytest.importorskip("libtpu")
    m = mesh.Mesh(range(4), (2, 2), ("data", "model"), topology="v5e:2x2")
    with torch.device("meta"):
        model = MLP()
    model.to_empty(device="jax")
    spmd.mark_sharding(model.up.weight, m, ("model", None))
    x = spmd.mark_sharding(torch.empty(4, 8, device="jax"), m, ("data", None))
    path = spmd.export(model, (x,), tmp_path / "pod.spmd")
    with zipfile.ZipFile(path) as archive:
        manifest = json.loads(archive.read("manifest.json"))
    assert (manifest["platforms"], manifest["mesh"]) == (["tpu"], {"shape": [2, 2], "axes": ["data", "model"]})
    assert all(item["file"] is None for item in manifest["state"])


def test_several_sizes_and_values_over_one_state(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = MLP().to("jax")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)

    def step(x: torch.Tensor, is_training: bool) -> torch.Tensor:
        loss = model(x).square().mean()
        if is_training:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return loss

    calls = [(batch(size, 8), is_training) for size, is_training in ((4, True), (2, True), (4, False))]
    program = load(spmd.export(step, calls[0], tmp_path / "sizes.spmd", also=calls[1:]))
    state = program.state()
    compiled = spmd.compile(step)
    for x, is_training in (*calls, *calls):
        state, loss = program(state, x.numpy(), is_training)
        np.testing.assert_allclose(loss, compiled(x.to("jax"), is_training).item(), *REORDERED)
    with pytest.raises(ValueError, match=r"args\[0\] is float32\[4, 8\] in this program, but the value is float32\[3, 8\](?s:.*)also="):
        program(state, batch(3, 8).numpy(), True)


def test_results_with_gaps_between_their_elements(tmp_path: Path) -> None:
    def turned(x: torch.Tensor) -> torch.Tensor:
        return (x * 2).t()

    program = load(spmd.export(turned, (batch(3, 5),), tmp_path / "turned.spmd"))
    np.testing.assert_array_equal(program({}, batch(3, 5).numpy())[1], turned(batch(3, 5)))


def counts(x: torch.Tensor) -> torch.Tensor:
    SEEN.append(len(SEEN))
    return x + len(SEEN)


class Counting(torch.optim.Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            state["count"] = state.get("count", 0) + 1
            parameter.sub_(parameter.grad / state["count"])


def test_a_variable_that_is_set_and_reset_is_no_change(tmp_path: Path) -> None:
    collector = SimpleNamespace(found=None, is_active=False)

    def fn(x: torch.Tensor) -> torch.Tensor:
        collector.found, collector.is_active = [x], True
        y = x * len(collector.found)
        collector.found, collector.is_active = None, False
        return y + 1

    program = load(spmd.export(fn, (batch(3, 5),), tmp_path / "fn.spmd"))
    np.testing.assert_array_equal(program({}, batch(3, 5).numpy())[1], batch(3, 5) + 1)


def test_an_optimizer_that_counts_in_python_is_refused(tmp_path: Path) -> None:
    model = MLP().to("jax")
    optimizer = Counting(model.parameters())

    def step(x: torch.Tensor) -> None:
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()

    spmd.compile(step)(torch.ones(2, 8, device="jax"))
    with pytest.raises(spmd.SpmdError, match="step cannot be exported: it counts in Python in an optimizer's state"):
        spmd.export(step, (torch.ones(2, 8, device="jax"),), tmp_path / "x.spmd")


SEEN: list[int] = []
REFUSED: dict[str, tuple[Callable[..., Any], tuple[Any, ...], str]] = {
    "writes to Python": (counts, (torch.ones(2),), r"counts cannot be exported: it writes to .* in every call"),
    "updates an argument": (lambda x: x.add_(1), (torch.ones(2),), "writes in place to an argument"),
    "an object returned": (lambda x: object(), (torch.ones(2),), "returns a object"),
    "an object given": (
        lambda x, y: x,
        (torch.ones(2), object()),
        r"args\[1\] is a object: an exported file takes arrays and plain values",
    ),
}


@pytest.mark.parametrize(("fn", "args", "text"), REFUSED.values(), ids=REFUSED)
def test_what_needs_python_is_refused(fn: Callable[..., Any], args: tuple[Any, ...], text: str, tmp_path: Path) -> None:
    with pytest.raises(spmd.SpmdError, match=text):
        spmd.export(fn, args, tmp_path / "x.spmd")


def test_a_path_in_no_folder_is_refused_before_anything_is_traced(tmp_path: Path) -> None:
    def never(x: torch.Tensor) -> torch.Tensor:
        pytest.fail("traced")

    with pytest.raises(spmd.SpmdError, match=f"spmd.export cannot write .*: there is no folder '{tmp_path}/no'\n(.*)\n  fix: os.makedirs"):
        spmd.export(never, (torch.ones(2),), tmp_path / "no" / "x.spmd")
    with pytest.raises(spmd.SpmdError, match="spmd.export takes the path of a file, got None"):
        spmd.export(never, (torch.ones(2),), None)  # pyright: ignore[reportArgumentType]


def test_a_check_of_the_function_is_made_by_the_file(tmp_path: Path) -> None:
    def rooted(x: torch.Tensor, scale: float) -> torch.Tensor:
        if (x < 0).any():
            raise ValueError("negative")
        return x.sqrt() * scale

    program = load(spmd.export(rooted, (torch.ones(2), 2.0), tmp_path / "checked.spmd"))
    assert program({}, np.full(2, 4.0, np.float32), 2.0)[1].tolist() == [4, 4]
    with pytest.raises(RuntimeError, match="negative"):
        program({}, np.full(2, -4.0, np.float32), 2.0)
    with pytest.raises(ValueError, match=r"args\[1\] is 2.0 in this program, but 3.0 in the call"):
        program({}, np.ones(2, np.float32), 3.0)
