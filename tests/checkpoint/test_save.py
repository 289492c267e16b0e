"""`save` and `restore`: everything of a training program comes back bit for bit, onto any mesh, or is refused."""

import random
import shutil
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F

import mesh
import spmd
from mesh.platform._allocator import mapped_memory
from spmd import checkpoint
from spmd.checkpoint import _read
from spmd.device._storage import load
from tests.oracle import assert_reordered

MESHES = {"4x2": (8, (4, 2)), "1x8": (8, (1, 8)), "2x1": (2, (2, 1)), "1x1": (1, (1, 1))}


def grid(name: str) -> mesh.Mesh:
    count, shape = MESHES[name]
    return mesh.Mesh(range(count), shape, ("data", "model"))


class Training:
    """A sharded model with dropout, its optimizer and schedule, and a compiled step."""

    def __init__(self, where: mesh.Mesh | None, seed: int = 0, optimizer: Any = torch.optim.AdamW, **settings: Any) -> None:
        torch.manual_seed(seed)
        layers = torch.nn.Linear(16, 32), torch.nn.GELU(), torch.nn.Dropout(0.2), torch.nn.BatchNorm1d(32), torch.nn.Linear(32, 16)
        self.model = torch.nn.Sequential(*layers).to("jax")
        if where is not None:
            spmd.mark_sharding(self.model.get_parameter("0.weight"), where, ("model", None))
            spmd.mark_sharding(self.model.get_parameter("4.weight"), where, ("data", "model"))
        self.optimizer = optimizer(self.model.parameters(), **{"lr": 1e-2, **settings})
        self.schedule = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, 10)
        model, optimizer = self.model, self.optimizer

        @spmd.compile
        def step(x: torch.Tensor) -> torch.Tensor:
            optimizer.zero_grad()
            loss = F.mse_loss(model(x), x)
            loss.backward()
            optimizer.step()
            return loss

        self.step = step

    def run(self, first: int, last: int) -> list[float]:
        losses: list[float] = []
        for number in range(first, last):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
            losses.append(self.step(x.to("jax")).item())
            self.schedule.step()
        return losses

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "schedule": self.schedule}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory, num_devices_once: int) -> tuple[Path, list[float]]:
    """A checkpoint after step 3 of a run on 4 x 2 devices, and the losses that follow."""
    if num_devices_once < 8:
        pytest.skip("needs 8 devices")
    path = tmp_path_factory.mktemp("unbroken")
    training = Training(grid("4x2"))
    training.run(0, 3)
    checkpoint.save(path, 3, training.state)
    losses = training.run(3, 6)  # donates what is being saved
    checkpoint.join()
    return path, losses


@pytest.fixture(scope="module")
def num_devices_once(request: pytest.FixtureRequest) -> int:
    return request.config.getoption("--devices")


@pytest.mark.parametrize("name", MESHES)
def test_a_run_goes_on_on_another_mesh(unbroken: tuple[Path, list[float]], name: str) -> None:
    path, losses = unbroken
    training = Training(grid(name), seed=1)
    assert checkpoint.restore(path, training.state).step == 3
    assert training.schedule.last_epoch == 3
    resumed = training.run(3, 6)
    if name == "4x2":
        assert resumed == losses
    assert_reordered(resumed, losses)


def test_a_running_program_goes_back_without_a_new_trace(unbroken: tuple[Path, list[float]]) -> None:
    path, losses = unbroken
    training = Training(grid("4x2"), seed=1)
    training.run(0, 2)
    checkpoint.restore(path, training.state)
    assert training.run(3, 6) == losses
    assert (training.step.num_executables, training.step.retraces) == (1, [])


@pytest.mark.parametrize(
    ("optimizer", "settings"),
    [
        (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
        (torch.optim.Adam, {"amsgrad": True}),
    ],
)
def test_optimizers_go_on_bit_for_bit(optimizer: Any, settings: dict[str, Any], tmp_path: Path, mesh_4x2: mesh.Mesh) -> None:
    training = Training(mesh_4x2, optimizer=optimizer, **settings)
    training.run(0, 2)
    checkpoint.save(tmp_path, 2, training.state, wait=True)
    losses = training.run(2, 4)
    again = Training(mesh_4x2, seed=1, optimizer=optimizer, **settings)
    checkpoint.restore(tmp_path, again.state)
    assert again.run(2, 4) == losses


def test_state_of_an_optimizer_follows_its_parameters_names(tmp_path: Path) -> None:
    def made(reverse: bool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        return model, torch.optim.Adam(list(model.parameters())[:: -1 if reverse else 1])

    model, optimizer = made(False)
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    checkpoint.save(tmp_path, 1, {"model": model, "optimizer": optimizer}, wait=True)
    twin, turned = made(True)
    checkpoint.restore(tmp_path, {"model": twin, "optimizer": turned})
    for one, other in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.equal(optimizer.state[one]["exp_avg"], turned.state[other]["exp_avg"])


PLAIN: list[Any] = [
    *(None, True, 7, -(2**70), 0.1, float("inf"), float("-inf"), 2 + 1j, "text \u00e9", b"\0\xff"),
    *([1, [2.5]], (1, (2,)), {"a": {3: "b", (1, 2): None}}, {1, 2}, frozenset("a"), OrderedDict(b=1, a=2), Counter("aab")),
    *(torch.float8_e4m3fn, torch.device("cpu"), np.float64(0.1), np.int8(-3)),
]


@pytest.mark.parametrize("other", [torch.optim.Adam, torch.optim.SGD], ids=lambda cls: cls.__name__)
def test_state_of_an_optimizer_of_another_class_is_refused(other: Any, tmp_path: Path) -> None:
    parameter = torch.nn.Parameter(torch.ones(4, device="jax"))
    parameter.grad = torch.ones(4, device="jax")
    optimizer = torch.optim.AdamW([parameter])
    optimizer.step()
    checkpoint.save(tmp_path, 1, {"optimizer": optimizer}, wait=True)
    text = rf"the program's optimizer is a {other.__name__}(?s:.*)the checkpoint's is a AdamW(?s:.*)restore into a AdamW"
    with pytest.raises(spmd.CheckpointError, match=text):
        checkpoint.restore(tmp_path, {"optimizer": other([parameter])})


@pytest.mark.parametrize("value", PLAIN, ids=repr)
def test_plain_values_come_back_as_they_were(value: Any, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 0, {"value": value}, wait=True)
    for found in (checkpoint.restore(tmp_path).state["value"], checkpoint.restore(tmp_path, {"value": None}).state["value"]):
        assert (found, type(found)) == (value, type(value))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e5m2", "int64", "uint8", "bool", "complex64", "float64"])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3, 4)])
def test_arrays_of_every_kind_come_back_bit_for_bit(dtype: str, shape: tuple[int, ...], tmp_path: Path) -> None:
    host = torch.randint(0, 2, shape).to(getattr(torch, dtype))
    device = host.to("jax")
    state = {"host": host, "device": device, "numpy": np.arange(3), "jax": jnp.arange(4)}
    checkpoint.save(tmp_path, 0, state, wait=True)
    target = {
        "host": torch.zeros_like(host),
        "device": torch.zeros_like(host).to("jax"),
        "numpy": np.zeros(3, int),
        "jax": jnp.zeros(4, int),
    }
    found = checkpoint.restore(tmp_path, target).state
    assert found["host"] is target["host"] and found["device"] is target["device"]
    for tensor in (target["host"], target["device"].cpu(), checkpoint.restore(tmp_path).state["device"].cpu()):
        assert tensor.dtype == host.dtype and tensor.shape == host.shape
        assert torch.equal(tensor.reshape(-1).view(torch.uint8), host.reshape(-1).view(torch.uint8))
    assert found["numpy"].tolist() == [0, 1, 2] and found["jax"].tolist() == [0, 1, 2, 3]


def test_tied_weights_are_one_array_and_stay_tied(tmp_path: Path) -> None:
    def made() -> torch.nn.ModuleDict:
        model = torch.nn.ModuleDict({"embed": torch.nn.Embedding(8, 4), "head": torch.nn.Linear(4, 8, bias=False)})
        model["head"].weight = model["embed"].weight
        return model.to("jax")

    model, twin = made(), made()
    checkpoint.save(tmp_path, 0, {"model": model}, wait=True)
    manifest = checkpoint.steps(tmp_path)[0].manifest
    assert manifest is not None and len(manifest.arrays) == 1
    checkpoint.restore(tmp_path, {"model": twin})
    assert twin["head"].weight is twin["embed"].weight
    assert torch.equal(twin["head"].weight.cpu(), model["embed"].weight.cpu())


def test_different_values_for_a_tied_weight_are_refused(tmp_path: Path) -> None:
    untied = torch.nn.ModuleDict({"a": torch.nn.Linear(4, 4, bias=False), "b": torch.nn.Linear(4, 4, bias=False)}).to("jax")
    checkpoint.save(tmp_path, 0, {"model": untied}, wait=True)
    untied["b"].weight = untied["a"].weight
    with pytest.raises(spmd.CheckpointError, match="the checkpoint has different values for the two"):
        checkpoint.restore(tmp_path, {"model": untied})


def test_random_streams_go_on(tmp_path: Path) -> None:
    def drawn() -> list[Any]:
        return [torch.rand(2).tolist(), random.random(), np.random.rand(), torch.rand(2, device="jax").cpu().tolist()]

    drawn()
    checkpoint.save(tmp_path, 0, {}, wait=True)
    expected = drawn()
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    checkpoint.restore(tmp_path, {})
    assert drawn() == expected


def test_only_what_is_asked_for_is_read(tmp_path: Path, mesh_4x2: mesh.Mesh) -> None:
    training = Training(mesh_4x2)
    training.run(0, 1)
    checkpoint.save(tmp_path, 1, training.state, wait=True)
    whole = checkpoint.restore(tmp_path, training.state).bytes_read
    assert checkpoint.restore(tmp_path, {"model": training.model}).bytes_read < whole / 2


class Watched:
    """Calls `look` when it is restored."""

    def __init__(self, look: Callable[[], None] = lambda: None) -> None:
        self.look = look

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Any) -> None:
        self.look()


def test_what_is_read_is_freed_array_by_array(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocks, held = list[weakref.ref[Any]](), list[int]()

    def noted(num_bytes: int) -> memoryview:
        found = mapped_memory(num_bytes)
        blocks.append(weakref.ref(found.obj))
        return found

    def look() -> None:
        held.append(sum(block() is not None for block in blocks))

    monkeypatch.setattr(_read, "mapped_memory", noted)
    state = {f"{i}{kind}": value for i in range(4) for kind, value in (("a", torch.full((50_000,), float(i))), ("b", Watched(look)))}
    checkpoint.save(tmp_path, 1, state, wait=True)
    checkpoint.restore(tmp_path, state)
    assert len(blocks) == 4
    assert held == [3, 2, 1, 0]


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ({"x": torch.zeros(3)}, r"the program's shape is \(3,\)"),
        ({"x": torch.zeros(2, 2, dtype=torch.float16)}, "the program's dtype is float16"),
        ({"x": torch.zeros(2, 2), "y": 1}, "the checkpoint has no 'y'"),
        ({"x": torch.nn.Linear(2, 2)}, "the program has a dict or a module"),
        ({"x": [1, 2]}, "the program has a list of 2"),
        ({"x": torch.zeros(2, 2, device="meta")}, "device 'meta' cannot hold"),
    ],
)
def test_a_state_that_does_not_fit_is_refused_and_named(target: Any, text: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 0, {"x": torch.ones(2, 2)}, wait=True)
    with pytest.raises(spmd.CheckpointError, match=text):
        checkpoint.restore(tmp_path, target)


def test_nothing_changes_when_a_part_does_not_fit(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 0, {"a": torch.ones(2), "b": torch.ones(2)}, wait=True)
    first = torch.zeros(2)
    with pytest.raises(spmd.CheckpointError, match="'b'"):
        checkpoint.restore(tmp_path, {"a": first, "b": torch.zeros(3)})
    assert first.tolist() == [0, 0]


def test_a_dtype_is_converted_only_when_allowed(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 0, {"x": torch.full((2,), 1.5)}, wait=True)
    target = torch.zeros(2, dtype=torch.bfloat16).to("jax")
    checkpoint.restore(tmp_path, {"x": target}, cast=True)
    assert target.dtype == torch.bfloat16 and target.cpu().tolist() == [1.5, 1.5]


@pytest.mark.parametrize("value", [object(), lambda: 1, {"nested": [object]}, {object(): 1}])
def test_what_has_no_plain_form_is_refused_by_path(value: Any, tmp_path: Path) -> None:
    with pytest.raises(spmd.CheckpointError, match="'?part"):
        checkpoint.save(tmp_path, 0, {"part": value}, wait=True)
    assert not checkpoint.has_step(tmp_path)


def test_a_save_holds_the_values_of_its_moment(tmp_path: Path, mesh_4x2: mesh.Mesh) -> None:
    x = spmd.mark_sharding(torch.zeros(8, 8).to("jax"), mesh_4x2, ("data", "model"))

    @spmd.compile
    def add() -> None:
        x.add_(1)

    for step in range(1, 4):
        add()
        checkpoint.save(tmp_path, step, {"x": x})
    add()
    checkpoint.join(tmp_path)
    assert [checkpoint.restore(tmp_path, step=step).state["x"].cpu().unique().tolist() for step in (1, 2, 3)] == [[1], [2], [3]]


def test_old_steps_go_and_the_same_step_may_be_saved_again(tmp_path: Path) -> None:
    for step in (1, 2, 3, 3, 4, 4):
        checkpoint.save(tmp_path, step, {"x": np.full(3, step)}, keep=2, wait=True)
    assert [found.step for found in checkpoint.steps(tmp_path)] == [4, 3]
    assert len(list(tmp_path.iterdir())) == 2


def test_a_damaged_step_does_not_count_among_those_that_stay(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"x": np.full(3, step)}, wait=True)
        if step > 1:
            (tmp_path / f"step_{step:08d}" / "manifest.json").unlink()
    checkpoint.save(tmp_path, 4, {"x": np.full(3, 4)}, keep=2, wait=True)
    (tmp_path / "step_00000004" / "data-00000-000000.bin").write_bytes(b"x")
    with pytest.warns(UserWarning, match="step 1 is restored"):
        assert checkpoint.restore(tmp_path).step == 1


def test_an_error_in_the_background_comes_with_the_next_save_and_with_join(tmp_path: Path) -> None:
    path = tmp_path / "run"
    for finish in (lambda: checkpoint.save(path, 2, {"x": 1}, wait=True), checkpoint.join, lambda: checkpoint.restore(path)):
        shutil.rmtree(path, ignore_errors=True)
        path.write_text("a file where the folder should be")
        checkpoint.save(path, 1, {"x": 1})
        with pytest.raises(spmd.CheckpointError, match="step 1 was not saved"):
            finish()
        path.unlink()
    checkpoint.save(path, 3, {"x": 1}, wait=True)
    assert checkpoint.restore(path).step == 3


def test_an_interrupted_save_leaves_nothing_that_counts_and_is_cleared(tmp_path: Path) -> None:
    checkpoint.save(tmp_path, 1, {"x": 1}, wait=True)
    (tmp_path / ".writing_step_00000002").mkdir()
    (tmp_path / ".deleting_step_00000000").mkdir()
    assert checkpoint.restore(tmp_path).step == 1
    checkpoint.save(tmp_path, 2, {"x": 1}, wait=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step_00000001", "step_00000002"]


def test_large_shards_are_cut_and_small_arrays_share_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mesh_4x2: mesh.Mesh) -> None:
    monkeypatch.setattr(checkpoint._snapshot, "PACK_BYTES", 1000)
    x = spmd.mark_sharding(torch.randn(40, 30).to("jax"), mesh_4x2, (None, "model"))
    state = {"x": x, **{f"small{i}": torch.full((3,), i) for i in range(50)}}
    checkpoint.save(tmp_path, 0, state, wait=True)
    manifest = checkpoint.steps(tmp_path)[0].manifest
    assert manifest is not None and len(manifest.files) < 10 and len(manifest.arrays[0].pieces) > 2
    assert all(file.nbytes <= 1000 for file in manifest.files)
    found = checkpoint.restore(tmp_path, {"x": torch.zeros(40, 30)}).state["x"]
    assert torch.equal(found, x.cpu())


def test_a_process_reads_only_the_pieces_that_its_devices_hold(tmp_path: Path, mesh_4x2: mesh.Mesh) -> None:
    x = spmd.mark_sharding(torch.arange(64.0).reshape(8, 8).to("jax"), mesh_4x2, ("data", None))
    checkpoint.save(tmp_path, 0, {"x": x}, wait=True)
    half = mesh.Mesh(range(2), (2,), ("data",))
    target = spmd.mark_sharding(torch.zeros(8, 8).to("jax"), half, ("data", None))
    assert checkpoint.restore(tmp_path, {"x": target}).bytes_read == 256  # each piece once, whatever overlaps it
    assert np.array_equal(np.asarray(load(target)), np.arange(64.0).reshape(8, 8))


class Counting:
    """A loader's place or the like: whatever says its state."""

    def __init__(self) -> None:
        self.position, self.table = 0, torch.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "table": self.table}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.table = state["position"], state["table"]


def test_any_object_with_a_state_dict_is_saved(tmp_path: Path) -> None:
    one, other = Counting(), Counting()
    one.position, one.table = 7, torch.ones(2)
    checkpoint.save(tmp_path, 0, [one], wait=True)
    assert checkpoint.restore(tmp_path, [other]).state == [other]
    assert other.position == 7 and other.table.tolist() == [1, 1]


@pytest.mark.parametrize(("before", "after"), [("4x2", "1x8"), ("1x8", "4x2"), ("4x2", "1x1"), ("1x1", "1x8")])
def test_uneven_dims_are_saved_without_padding_and_restored_with_it(before: str, after: str, tmp_path: Path) -> None:
    def made(where: str) -> tuple[torch.nn.Linear, torch.optim.Optimizer]:
        model = torch.nn.Linear(5, 9).to("jax")
        spmd.mark_sharding(model.weight, grid(where), ("data", "model"))
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(2, 5).to("jax")).square().sum().backward()
        return model, optimizer

    model, optimizer = made(before)
    optimizer.step()
    checkpoint.save(tmp_path / "run", 0, {"model": model, "optimizer": optimizer}, wait=True)
    checkpoint.save_safetensors(tmp_path / "out", model)
    manifest = checkpoint.steps(tmp_path / "run")[0].manifest
    assert manifest is not None and manifest.arrays[0].shape == (9, 5)
    for load_it in (
        lambda twin, other: checkpoint.restore(tmp_path / "run", {"model": twin, "optimizer": other}),
        lambda twin, other: checkpoint.load_safetensors(tmp_path / "out", twin),
    ):
        twin, other = made(after)
        load_it(twin, other)
        assert torch.equal(twin.weight.cpu(), model.weight.cpu()) and tuple(twin.weight.partition_spec) == ("data", "model")
        if other.state:
            assert torch.equal(other.state[twin.weight]["exp_avg"].cpu(), optimizer.state[model.weight]["exp_avg"].cpu())
        other.step()


def test_a_step_may_be_any_integer(tmp_path: Path) -> None:
    step: Any = np.int64(3)
    checkpoint.save(tmp_path, step, {"x": 1}, keep=1, wait=True)
    assert checkpoint.restore(tmp_path).step == 3


@pytest.mark.parametrize(
    ("step", "state", "text"),
    [
        (True, {}, "got True"),
        (np.bool_(True), {}, "got a bool"),
        (1.0, {}, "got 1.0"),
        ("1", {}, "got '1'"),
        (None, {}, "got None"),
        (torch.tensor(1), {}, "got a Tensor"),
        (np.array(1), {}, "got a ndarray"),
        ({"x": 1}, 3, "got a dict"),
        (torch.nn.Linear(2, 2), 3, "got the module Linear"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_step_that_is_no_integer_is_refused_before_anything_is_written(step: Any, state: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(spmd.CheckpointError) as raised:
        checkpoint.save(tmp_path / "run", step, state, wait=True)
    assert f"step of save must be an integer, {text}" in str(raised.value) and "save(path, step, state)" in str(raised.value)
    assert not (tmp_path / "run").exists()


def test_other_wrong_arguments_of_save_are_refused(tmp_path: Path) -> None:
    keep: Any = 1.5
    with pytest.raises(spmd.CheckpointError, match="keep of save must be an integer, got 1.5"):
        checkpoint.save(tmp_path / "run", 1, {}, keep=keep)
    path: Any = 1
    with pytest.raises(spmd.CheckpointError, match="save takes the path of a folder first, got 1\n"):
        checkpoint.save(path, 1, {})
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"step": "10"}, r"step of restore must be an integer or None, got '10'\n.*\n  fix: .*step=10\)"),
        ({"step": True}, "step of restore must be an integer or None, got True"),
        ({"step": 1.0}, "step of restore must be an integer or None, got 1.0"),
        ({"cast": "no"}, "cast of restore must be True or False, got 'no'"),
        ({"random": None}, "random of restore must be True or False, got None"),
    ],
)
def test_wrong_arguments_of_restore_are_refused(options: dict[str, Any], text: str, tmp_path: Path) -> None:
    checkpoint.save(tmp_path / "run", 10, {"n": 3}, wait=True)
    with pytest.raises(spmd.CheckpointError, match=text):
        checkpoint.restore(tmp_path / "run", {"n": 0}, **options)
    swapped: Any = {"n": 0}
    with pytest.raises(spmd.CheckpointError, match="restore takes the path of a folder first, got a dict\n"):
        checkpoint.restore(swapped, str(tmp_path / "run"))


def test_a_save_inside_a_compiled_function_is_refused(tmp_path: Path) -> None:
    x = torch.ones(4).to("jax")

    @spmd.compile
    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        checkpoint.save(tmp_path / "run", 1, {"y": y}, wait=True)
        return y

    with pytest.raises(spmd.TraceError, match="save was called inside a compiled function(?s:.*)test_save(?s:.*)fix: save after the call"):
        step(x)
    assert not (tmp_path / "run").exists()
    checkpoint.save(tmp_path / "run", 1, {"x": x}, wait=True)


def looped(kind: str) -> Any:
    listed: list[Any] = [1]
    listed.append({"again": listed} if kind == "dict" else listed)
    return listed


class Loops:
    def state_dict(self) -> dict[str, Any]:
        return {"loop": looped("dict")}

    def load_state_dict(self, state: Any) -> None:
        raise NotImplementedError


@pytest.mark.parametrize(
    ("state", "text"),
    [
        ({"part": looped("list")}, "the state contains itself: part/1 is a list that contains it"),
        ({"part": looped("dict")}, "the state contains itself: part/1/again is a list that contains it"),
        ({"part": Loops()}, "nested more than 200 levels deep at part/loop/1/again/1/again"),
    ],
    ids=["list", "dict", "object"],
)
def test_a_state_that_contains_itself_is_refused(state: Any, text: str, tmp_path: Path) -> None:
    with pytest.raises(spmd.CheckpointError, match=text):
        checkpoint.save(tmp_path / "run", 1, state, wait=True)
    assert not (tmp_path / "run").exists()


def test_a_container_may_occur_twice(tmp_path: Path) -> None:
    shared = [1, 2]
    checkpoint.save(tmp_path, 1, {"a": shared, "b": [shared, shared]}, wait=True)
    assert checkpoint.restore(tmp_path).state == {"a": [1, 2], "b": [[1, 2], [1, 2]]}
