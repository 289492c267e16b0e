"""Each example of docs/extending.md runs as it stands; and what it says of wrong registrations."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn as nn

import mesh
import spmd
from mesh.job import _clusters
from spmd.device._storage import buffer_of

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
TEXT = PAGE.read_text(encoding="utf-8")
EXAMPLES = re.findall(r"```python\n(.*?)```", TEXT, re.DOTALL)
HEADINGS = [re.findall(r"^##+ (.*)$", TEXT[: TEXT.index(code)], re.MULTILINE)[-1] for code in EXAMPLES]


@pytest.mark.multidevice(num=8)
@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=[f"{i}-{h}" for i, h in enumerate(HEADINGS)])
def test_the_example_runs(number: int) -> None:
    exec(compile(EXAMPLES[number], f"{PAGE.name}, example {number}", "exec"), {"__name__": "example"})


def test_every_public_name_of_the_page_exists() -> None:
    for name in set(re.findall(r"`((?:spmd|mesh)(?:\.\w+)+)`", TEXT)):
        found: Any = {"spmd": spmd, "mesh": mesh}[name.partition(".")[0]]
        for part in name.split(".")[1:]:
            found = getattr(found, part)


class TestPresets:
    @pytest.mark.parametrize("name", ["fsdp", "auto", "a+b", ""])
    def test_a_name_that_cannot_be_used_is_refused(self, name: str) -> None:
        with pytest.raises(spmd.SpmdError, match="cannot be the name of a preset"):
            spmd.rules.register_preset(name)

    def test_registered_presets_are_among_the_known(self) -> None:
        spmd.rules.register_preset("tests-known")(lambda model, grid: mesh.Rules())
        with pytest.raises(spmd.SpmdError, match="'unheard-of' is not a preset\n  known: .*'tests-known'"):
            spmd.shard_module(nn.Linear(2, 2), mesh.Mesh(range(1), (1,), ("model",)), "unheard-of")
        with pytest.raises(spmd.SpmdError, match="taken: .*tests-known"):
            spmd.rules.register_preset("tests-known")


class TestClusters:
    def test_a_registered_one_is_asked_behind_the_launcher_and_before_others(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(_clusters, "READERS", dict(_clusters.READERS))

        @mesh.register_cluster("tests-batch")
        def read(environ: Any) -> mesh.Host | None:
            return mesh.Host(index=1, count=2, coordinator="a:1", found_by="tests") if "TESTS_RANK" in environ else None

        slurm = {"SLURM_PROCID": "0", "SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "n[0-1]", "SLURM_STEP_NUM_TASKS": "2"}
        ours = {"SPMD_COORDINATOR": "b:1", "SPMD_PROCESS": "0", "SPMD_PROCESSES": "2"}
        found = [_clusters.detect(e) for e in (slurm, {**slurm, "TESTS_RANK": "1"}, {**slurm, **ours, "TESTS_RANK": "1"})]
        assert [host and host.found_by for host in found] == ["SLURM", "tests", "launcher"]
        with pytest.raises(mesh.JobError, match="a cluster named 'tests-batch' is already registered"):
            mesh.register_cluster("tests-batch")


class TestOptimizerState:
    def test_a_second_rule_and_a_class_that_is_no_optimizer_are_refused(self) -> None:
        class Mine(torch.optim.SGD):
            pass

        spmd.register_state_rule(Mine)(lambda parameter, key, value: None)
        with pytest.raises(spmd.SpmdError, match="the state of Mine already has a rule"):
            spmd.register_state_rule(Mine)(lambda parameter, key, value: None)
        with pytest.raises(spmd.SpmdError, match="is not an optimizer class"):
            spmd.register_state_rule(nn.Linear)  # pyright: ignore[reportArgumentType]

    @pytest.mark.multidevice(num=8)
    @pytest.mark.parametrize("how", ["default", "rule", "set_state_sharding", "by hand"])
    def test_where_state_lies(self, how: str, mesh_4x2: mesh.Mesh) -> None:
        class Averaged(torch.optim.Adam):
            pass

        w = spmd.mark_sharding(nn.Parameter(torch.ones(8, 4).to("jax")), mesh_4x2, ("model", None))
        optimizer = Averaged([w], lr=0.1)
        if how == "rule":
            spmd.register_state_rule(Averaged)(lambda p, key, value: ("data", "model") if key == "exp_avg" else None)
        if how == "set_state_sharding":
            spmd.set_state_sharding(w, mesh_4x2, ("data", "model"))
        if how == "by hand":
            state = {"step": torch.tensor(0.0), "exp_avg": torch.zeros(8, 4).to("jax"), "exp_avg_sq": torch.zeros(8, 4).to("jax")}
            spmd.mark_sharding(state["exp_avg"], mesh_4x2, ("data", "model"))
            optimizer.state[w].update(state)

        def fn() -> None:
            optimizer.zero_grad()
            w.square().sum().backward()
            optimizer.step()

        step = spmd.compile(fn)
        for _ in range(2):
            step()
        spec = {key: tuple(buffer_of(optimizer.state[w][key]).value.sharding.spec) for key in ("exp_avg", "exp_avg_sq")}
        with_parameter, elsewhere = ("model",), ("data", "model")
        assert spec["exp_avg"][:2] == (elsewhere if how != "default" else (*with_parameter, *spec["exp_avg"][1:2]))
        assert spec["exp_avg_sq"][:1] == (elsewhere if how == "set_state_sharding" else with_parameter)[:1]
        assert step.num_traces == 1
