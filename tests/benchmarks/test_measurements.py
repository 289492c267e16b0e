"""Benchmarks whose records are taken by hand still run, at tiny sizes: what they count and compare. Times are not asserted."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from benchmarks import checkpoint_speed, host_time, lazy
from tests.later import Later

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benchmarks"))  # depth.py is a script that imports its neighbours
# They import transformers, all but dynamo.
depth, dynamo, dynamo_models = Later("benchmarks.depth"), Later("benchmarks.dynamo"), Later("benchmarks.dynamo_models")
generate, memory, recipe, trainer = (Later(f"benchmarks.{name}") for name in ("generate", "memory", "recipe", "trainer"))
second_process = Later("benchmarks.second_process")
pytestmark = pytest.mark.multidevice(num=8)


def test_a_checkpoint_is_timed_beside_tensorstore_and_its_memory_is_that_of_one_copy(tmp_path: Path) -> None:
    arrays = checkpoint_speed.state(1)
    found = checkpoint_speed.measured(tmp_path, arrays, 1)
    assert {name: len(seconds) for name, seconds in found.items()} == dict.fromkeys(("plain", "wait", "blocked", "async", "restore"), 1)
    grown = {kind: checkpoint_speed.memory(kind, tmp_path / kind, arrays) for kind in ("wait", "async")}
    assert max(grown.values()) < 2 * 16 * checkpoint_speed.MIB, grown


def test_a_lazy_loop_is_timed_beside_the_compiled_step() -> None:
    found = lazy.measured("megatron", "tiny", "data=4,model=2", 1, 1)
    assert (found["programs"], found["equal_losses"].rpartition(" ")[2]) == (2, "4")
    assert found["ratio"] == pytest.approx(found["lazy_ms"] / found["compiled_ms"])


def test_host_time_is_that_of_one_program() -> None:
    found = host_time.measure(4, 40, 1)  # which asserts that nothing was traced again
    assert (found["arrays"], found["guarded"], sorted(found["seconds"])) == (4, 40, ["jax", "ours", "rolled"])


def test_generation_by_hand_and_ours_give_the_cpus_tokens() -> None:
    found = generate.measured("1 device", 1, 2, 1)
    assert found["equal_to_cpu_torch"] and found["by_hand_equal_to_cpu_torch"]
    assert (found["programs"], found["compilations_of_the_second_call"]) == (2, 0)


def test_the_page_of_models_under_torch_compile_is_that_of_the_record() -> None:
    record = json.loads(dynamo_models.RESULTS.read_text(encoding="utf-8"))
    assert dynamo_models.table(record) == dynamo_models.TABLE.read_text(encoding="utf-8")


@pytest.mark.slow
def test_a_recipe_is_timed_beside_its_loop_by_hand(tmp_path: Path) -> None:
    out = tmp_path / "recipe.json"
    recipe.run(recipe.Options(pairs=3, steps=1, rows=8, layers=1, width=32, positions=8, json=out))
    found = json.loads(out.read_text(encoding="utf-8"))
    assert [len(found[clock]["ratios"]) for clock in ("clock", "cpu")] == [1, 1]
    assert 0 < found["data"]["part"] < 1


@pytest.mark.slow
def test_the_trainer_is_timed_beside_the_compiled_step(tmp_path: Path) -> None:
    out = tmp_path / "trainer.json"
    trainer.run(trainer.Options(steps=9, rows=4, layers=1, width=32, positions=8, json=out))
    found = json.loads(out.read_text(encoding="utf-8"))
    assert (found["steps"], found["programs"]) == (1, 5)
    assert found["losses"][1] < found["losses"][0] and found["compiled_losses"][1] < found["compiled_losses"][0]


@pytest.mark.slow
def test_memory_is_that_of_the_program_by_hand() -> None:
    ours, hand = (memory.temporaries(who, 1, 128, 8, "cpu") for who in ("ours", "by hand"))
    assert ours["arguments"] == pytest.approx(hand["arguments"], rel=1e-3)
    assert ours["temporaries"] > 0 < hand["temporaries"]


@pytest.mark.slow
def test_memory_has_a_row_for_every_phase() -> None:
    found = memory.measured("phases", memory.Options(layers=2, width=128, positions=64))  # in a process of its own: all arrays count
    assert len(found["phases"]) == 10
    for name, row in found["phases"].items():  # a device more or less keeps a batch, a loss, a random key
        assert 0 <= row["devices"] - row["stays"] < 32_768, name


@pytest.mark.slow
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_depth_trains_what_jax_by_hand_trains(model: str) -> None:
    def losses(contender: str) -> Any:
        task = depth.Task(model, 2, "data=2,model=4", contender, 128, 8, 1)
        return (depth.by_hand if contender.endswith("by hand") else depth.ours)(task)["losses"]

    assert losses("rolled") == pytest.approx(losses("scan by hand"), rel=1e-4)


@pytest.mark.slow
def test_dynamos_graphs_are_timed_beside_jax_jit() -> None:
    found = dynamo.host()
    assert found["graph above jax.jit"]["median"] == pytest.approx(found["graph"]["median"] - found["jax.jit"]["median"])


@pytest.mark.slow
def test_a_model_under_torch_compile_is_one_graph_that_gives_what_cpu_torch_gives() -> None:
    found = dynamo_models.check("ResNet")
    assert [found[column] for column in dynamo_models.COLUMNS] == ["pass", "pass"]
    assert [found[f"{column}_graphs"]["graphs"] for column in dynamo_models.COLUMNS] == [1, 1]


@pytest.mark.slow
def test_a_second_process_traces_and_compiles_nothing() -> None:
    found = second_process.measure(f"gpt2 4 128 rolled {second_process.ONE}")
    assert found["first"]["compiled"] > 0 == found["second"]["compiled"]
    assert found["first"]["traces"] == 1
    assert found["second"]["traces"] == 0
    assert found["first"]["loss"] == found["second"]["loss"]
