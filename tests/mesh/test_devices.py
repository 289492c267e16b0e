import os
import platform
import subprocess
import sys
import textwrap
from pathlib import Path

import jax
import pytest

import mesh
from mesh import _devices
from mesh.platform._threads import count_in_flags, provide_threads

ROOT = Path(__file__).resolve().parents[2]


def run_fresh(program: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run a program in a process where jax has not started; `env`: its whole environment, if not this one's."""
    command = [sys.executable, "-W", "error", "-c", textwrap.dedent(program)]
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=120)


def test_virtual_devices_exist_in_a_fresh_process_and_second_call_is_harmless() -> None:
    done = run_fresh(
        """
        import jax, mesh
        jax.config.update("jax_platforms", "cpu")  # what a machine with an accelerator needs to be silent
        mesh.virtual_devices(2)
        mesh.virtual_devices(3)
        assert mesh.device_count() == 3
        mesh.virtual_devices(3)
        assert [d.id for d in mesh.devices()] == [0, 1, 2]
        assert {d.platform for d in mesh.devices()} == {"cpu"}
        """
    )
    assert done.returncode == 0, done.stderr


def test_virtual_devices_after_jax_has_started_is_refused_with_the_fix() -> None:
    done = run_fresh(
        """
        import jax, mesh
        jax.config.update("jax_platforms", "cpu")
        jax.numpy.zeros(())
        mesh.virtual_devices(4)
        """
    )
    assert done.returncode == 1
    assert "DeviceError: virtual_devices(4) was called too late: jax has already initialized its devices" in done.stderr
    assert "1 exist on platform 'cpu', 4 virtual CPU devices were requested" in done.stderr
    assert "fix: call mesh.virtual_devices(4) at the top of the program" in done.stderr


def test_importing_and_asking_for_devices_starts_no_backend() -> None:
    done = run_fresh(
        """
        import mesh
        from mesh import _devices
        for is_started in (_devices._backends_are_initialized, _devices._cpu_count_is_frozen):
            assert not is_started()
        import jax
        jax.config.update("jax_platforms", "cpu")
        mesh.virtual_devices(2)
        for is_started in (_devices._backends_are_initialized, _devices._cpu_count_is_frozen):
            assert not is_started()
        assert mesh.device_count() == 2
        for is_started in (_devices._backends_are_initialized, _devices._cpu_count_is_frozen):
            assert is_started()
        """
    )
    assert done.returncode == 0, done.stderr


def test_same_number_is_accepted_and_another_refused_in_this_process() -> None:
    count = mesh.device_count()
    mesh.virtual_devices(count)
    with pytest.raises(mesh.DeviceError, match=f"{count} exist on platform 'cpu', {count + 1} virtual CPU devices"):
        mesh.virtual_devices(count + 1)
    assert mesh.device_count() == count


@pytest.mark.parametrize("n", [0, -1, True, 2.0, "8"])
def test_no_number_of_devices_is_refused(n: object) -> None:
    with pytest.raises(mesh.DeviceError, match=r"is not a positive int\n  fix: mesh.virtual_devices\(8\)"):
        mesh.virtual_devices(n)  # type: ignore[arg-type]


def test_backend_state_is_known_without_the_private_function(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh.devices()
    monkeypatch.setattr(_devices, "backends_are_initialized", None)
    assert _devices._backends_are_initialized()
    assert mesh.device_count() == len(mesh.devices())


def test_devices_are_all_devices_ordered_by_id() -> None:
    assert set(mesh.devices()) == set(jax.devices())
    assert [device.id for device in mesh.devices()] == sorted(device.id for device in jax.devices())


@pytest.mark.parametrize(
    ("file", "kind"), [("nvidia0", "NVIDIA GPU"), ("accel0", "TPU"), ("vfio/3", "TPU"), ("nvidiactl", None), ("accel/accel0", None)]
)
def test_accelerator_is_found_by_its_device_file(tmp_path: Path, file: str, kind: str | None) -> None:
    (tmp_path / file).parent.mkdir(exist_ok=True)
    (tmp_path / file).touch()
    assert _devices._accelerators(tmp_path) == ([f"{kind} ({tmp_path / file})"] if kind else [])


@pytest.mark.parametrize("platforms", [None, "cuda,cpu"])
def test_idle_accelerator_is_named_with_the_way_to_use_it(monkeypatch: pytest.MonkeyPatch, platforms: str | None) -> None:
    confined_to: list[int] = []
    monkeypatch.setattr(_devices, "_backends_are_initialized", lambda: False)
    monkeypatch.setattr(_devices, "_accelerators", lambda: ["NVIDIA GPU (/dev/nvidia0)"])
    monkeypatch.setattr(_devices, "_confine_to_cpu", confined_to.append)
    monkeypatch.setattr(type(jax.config), "values", {"jax_platforms": platforms})
    with pytest.warns(mesh.AcceleratorIdle, match=r"leaves this machine's NVIDIA GPU \(/dev/nvidia0\) alone") as caught:
        mesh.virtual_devices(8)
    assert "fix: to use the real devices, remove the call to mesh.virtual_devices" in str(caught[0].message)
    assert caught[0].filename == __file__
    assert confined_to == [8]


def test_accelerator_that_the_user_already_left_alone_is_not_mentioned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_devices, "_backends_are_initialized", lambda: False)
    monkeypatch.setattr(_devices, "_accelerators", lambda: ["TPU (/dev/accel0)"])
    monkeypatch.setattr(_devices, "_confine_to_cpu", lambda n: None)
    monkeypatch.setattr(type(jax.config), "values", {"jax_platforms": "cpu"})
    mesh.virtual_devices(8)  # a warning would be an error


FAULTS_OF_A_SECOND_BLOCK = """
    import ctypes, resource
    import jax, mesh
    jax.config.update("jax_platforms", "cpu")
    mesh.virtual_devices(1)
    libc = ctypes.CDLL(None)
    libc.malloc.restype = ctypes.c_void_p
    def faults_of_one():
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        block = ctypes.c_void_p(libc.malloc(1 << 26))
        ctypes.memset(block, 1, 1 << 26)
        libc.free(block)
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
    faults_of_one()
    print(faults_of_one())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="another C library keeps memory as it likes")
@pytest.mark.parametrize(("setting", "is_kept"), [({}, True), ({"MALLOC_TOP_PAD_": "131072"}, False)])
def test_virtual_devices_keep_freed_memory_unless_the_environment_sets_the_allocator(setting: dict[str, str], is_kept: bool) -> None:
    ours = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_") and name != "GLIBC_TUNABLES"}
    done = run_fresh(FAULTS_OF_A_SECOND_BLOCK, env=ours | setting)
    assert done.returncode == 0, done.stderr
    assert (int(done.stdout) < 16) == is_kept, done.stdout


@pytest.mark.parametrize(
    ("given", "num_devices", "threads"),
    [(None, 8, "32"), ("4", 8, "32"), ("100", 8, "100"), ("many", 2, "8"), (None, 1, None)],
)
def test_threads_of_the_cpu_client_are_four_for_each_device_at_least(
    given: str | None, num_devices: int, threads: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    if given is None:
        monkeypatch.delenv("PJRT_NPROC", raising=False)
    else:
        monkeypatch.setenv("PJRT_NPROC", given)
    provide_threads(num_devices)
    assert os.environ.get("PJRT_NPROC") == threads


@pytest.mark.parametrize(("flags", "count"), [("", 1), ("--a=2 --xla_force_host_platform_device_count=4", 4)])
def test_devices_that_flags_ask_for_are_counted(flags: str, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XLA_FLAGS", flags)
    assert count_in_flags() == count


def test_virtual_devices_have_threads() -> None:
    assert _devices.started_with_threads() or mesh.device_count() == 1


def test_there_is_a_cpu_device_beside_those_of_the_mesh() -> None:
    found = _devices.host_device()
    assert found is not None
    assert found.platform == "cpu"
