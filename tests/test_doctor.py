"""`spmd doctor`: every fact of the report from made-up machines, then one run on this machine."""

import io
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from rich.console import Console

import mesh
from spmd import cli, doctor


@dataclass(frozen=True)
class FakeDevice:
    platform: str
    device_kind: str
    stats: dict[str, Any] | Exception | None = None
    id: int = 0
    process_index: int = 0

    def memory_stats(self) -> dict[str, Any] | None:
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


TPU = FakeDevice("tpu", "TPU v5 lite", {"bytes_limit": 16 * 2**30})
CPU = FakeDevice("cpu", "cpu")


def rendered(report: doctor.Report) -> str:
    console = Console(file=io.StringIO(), width=160, markup=False, highlight=False)
    cli.show_report(report, console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def healthy(name: str) -> str | None:
    versions = {"torch": "2.13.0+cpu", "jax": "0.10.2", "jaxlib": "0.10.2", "libtpu": "0.0.51", "spmd-mesh": "0.1.0"}
    return versions.get(name)


def test_supported_ranges_are_those_of_pyproject() -> None:
    project = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["tpu"], f"python{project['requires-python']}"]
    ranges = {one.name: one.specifier for one in map(Requirement, lines)}
    assert {name: ranges[name] for name in doctor.SUPPORTED} == {name: SpecifierSet(of) for name, of in doctor.SUPPORTED.items()}


@pytest.mark.parametrize("found", ["2.11.0", "2.13.0+cpu", "2.14.0.dev20261101", "3.0"])
def test_version_in_range_is_no_problem(found: str) -> None:
    assert doctor.check_version("torch", found, ">=2.11").problem is None


@pytest.mark.parametrize(("found", "problem"), [("2.9.1", "torch 2.9.1 is outside >=2.11"), (None, "torch is not installed")])
def test_version_outside_range_comes_with_the_command_that_fixes_it(found: str | None, problem: str) -> None:
    check = doctor.check_version("torch", found, ">=2.11")
    assert (check.problem, check.fix) == (problem, "pip install 'torch>=2.11'")


def test_absent_libtpu_is_no_problem_and_an_old_one_is() -> None:
    assert doctor.check_libtpu(None).problem is None
    assert doctor.check_libtpu("0.0.51").problem is None
    assert doctor.check_libtpu("0.0.30").problem == "libtpu 0.0.30 is outside >=0.0.42"


@pytest.mark.parametrize("name", doctor.CONFLICTING)
def test_rival_for_the_device_slot_is_a_problem(name: str) -> None:
    check = doctor.check_conflict(name, "0.0.13")
    assert "device slot" in (check.problem or "")
    assert (check.fix or "").startswith(f"pip uninstall {name}")
    assert doctor.check_conflict(name, None).problem is None


def test_problem_without_a_fix_cannot_be_made() -> None:
    with pytest.raises(ValueError, match="needs both a problem and a fix"):
        doctor.Check(name="torch", found="1.0", problem="too old")


def test_devices_are_counted_by_kind_with_memory_where_known() -> None:
    groups = doctor.group_devices([TPU, TPU, CPU])
    assert [(one.platform, one.num_devices, one.memory_bytes) for one in groups] == [("tpu", 2, 16 * 2**30), ("cpu", 1, None)]


@pytest.mark.parametrize("stats", [None, {}, RuntimeError("unimplemented"), NotImplementedError()])
def test_device_without_memory_statistics_is_listed(stats: dict[str, Any] | Exception | None) -> None:
    assert doctor.memory_bytes(FakeDevice("cpu", "cpu", stats)) is None


def test_failing_device_discovery_is_a_problem_not_a_crash(monkeypatch: pytest.MonkeyPatch) -> None:
    def devices() -> list[FakeDevice]:
        raise RuntimeError("Unable to initialize backend 'tpu'\nlong trace")

    monkeypatch.setattr(doctor.mesh, "devices", devices)
    groups, check = doctor.see_devices()
    assert groups == ()
    assert check is not None and check.problem == "jax cannot list its devices: Unable to initialize backend 'tpu'"


def test_report_names_every_fact_and_no_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "installed_version", healthy)
    monkeypatch.setattr(doctor.mesh, "devices", lambda: [TPU] * 4)
    report = doctor.examine()
    assert report.problems == ()
    text = rendered(report)
    for fact in ("python", "2.13.0+cpu", ">=2.11", "0.0.51", "torchax", "4 x tpu (TPU v5 lite), 16 GiB each", "core"):
        assert fact in text
    assert "problem" not in text


def test_report_shows_each_problem_with_its_fix() -> None:
    checks = (doctor.check_version("torch", "2.9.0", ">=2.11"), doctor.check_conflict("torchax", "0.0.13"))
    text = rendered(doctor.Report(checks=checks, devices=()))
    assert text.count("fix: ") == 2
    assert "torch 2.9.0 is outside >=2.11\n  fix: pip install 'torch>=2.11'" in text


def test_missing_libtpu_hint_survives_rendering() -> None:
    assert "spmd-mesh[tpu]" in rendered(doctor.Report(checks=(doctor.check_libtpu(None),), devices=()))


@pytest.mark.parametrize(("rival", "code"), [(None, 0), ("0.0.13", 1)])
def test_exit_code_says_whether_there_is_a_problem(monkeypatch: pytest.MonkeyPatch, rival: str | None, code: int) -> None:
    monkeypatch.setattr(doctor, "installed_version", lambda name: rival if name == "torchax" else healthy(name))
    with pytest.raises(SystemExit) as left:
        cli.main(["doctor"])
    assert left.value.code == code


def test_doctor_runs_on_this_machine(num_devices: int) -> None:
    report = doctor.examine()
    assert sum(group.num_devices for group in report.devices) == num_devices
    assert "spmd" in rendered(report)


def test_what_libtpu_logs_is_not_shown(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    def devices() -> tuple[mesh.Device, ...]:
        os.write(2, b"WARNING: could not determine TPU accelerator type\n")
        return ()

    monkeypatch.setattr(doctor.mesh, "devices", devices)
    doctor.examine()
    os.write(2, b"afterwards\n")
    assert capfd.readouterr().err == "afterwards\n"


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as left:
        cli.main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert all(name in text for name in cli.COMMANDS)
