"""Files for schedulers: what their own schemas and parsers say of them, and the jobs that they start, beside commands that stand in."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from mesh import DeviceError
from mesh.launch._emit import emit
from mesh.launch._emit_options import KINDS
from mesh.launch._launch_options import parse
from mesh.schedulers._scheduled_job import Code
from mesh.schedulers._tpu_slice import TpuSlice
from tests.later import jsonschema
from tests.launched import environ
from tests.ports import reserve_port

SCHEMAS = Path(__file__).parent / "schemas"
GIT = "git+https://example.com/me/train.git@v1"

# What a user may ask for, by the kind of file; each is checked whole.
LINES: dict[str, list[str]] = {
    "slurm": [
        "-n 2",
        "-n 4 --hosts a,b --gpus H100:8 --cpus 16 --memory 128 --sbatch partition=gpu --sbatch time=24:00:00 --sbatch exclusive",
        f"-n 2 --code {GIT} --install x --secret HF_TOKEN --restarts 3 --job-dir logs",
    ],
    "jobset": [
        "-n 2 --image me/train:1",
        "--tpu v5e:4x4 --image me/train:1 --volume checkpoints:/checkpoints --secret HF_TOKEN --restarts 3",
        f"-n 2 --gpus H100:8 --cpus 16 --memory 128 --image me/train:1 --code {GIT} --install x",
    ],
    "tpu-vm": [
        "-n 4",
        "--tpu v5e:4x4 --volume 10.0.0.2:/share:/checkpoints --secret HF_TOKEN --restarts 3",
        f"--tpu v4:2x2x4 --code {GIT} --install x",
    ],
    "skypilot": [
        "-n 2",
        "--tpu v5e:4x4 --volume gs://bucket:/checkpoints --secret HF_TOKEN --restarts 3",
        f"-n 2 --gpus H100:8 --cpus 16 --memory 128 --image me/train:1 --code {GIT}",
    ],
}
CASES = [pytest.param(kind, line, id=f"{kind} {i}") for kind, lines in LINES.items() for i, line in enumerate(lines)]


def emitted(kind: str, line: str, out: Path, program: tuple[str, ...] = ("train.py", "--text", "it's $HOME and $(HOME)\nand more")) -> Path:
    (path,) = emit(parse(["--emit", kind, "--out", str(out), *line.split(), *program], "spmd launch", ()))
    return path


def in_container(kind: str, path: Path) -> tuple[str, dict[str, Any]]:
    """The text of the shell that starts a process, or its words; and what is around it in the file."""
    document: dict[str, Any] = yaml.safe_load(path.read_text(encoding="utf-8"))
    if kind == "skypilot":
        return document["run"], document
    (job,) = document["spec"]["replicatedJobs"]
    (container,) = job["template"]["spec"]["template"]["spec"]["containers"]
    return "\n".join(container["command"]), container


@pytest.mark.parametrize("kind", KINDS)
def test_every_option_is_tried(kind: str) -> None:
    assert len(LINES[kind]) == 3


@pytest.mark.parametrize(("kind", "line"), CASES)
def test_a_file_is_what_its_scheduler_takes(kind: str, line: str, tmp_path: Path) -> None:
    path = emitted(kind, line, tmp_path)
    text = path.read_text(encoding="utf-8")
    shells = [text]
    if path.suffix == ".yaml":
        document = yaml.safe_load(text)
        jsonschema.validate(document, json.loads((SCHEMAS / f"{kind}.json").read_text(encoding="utf-8")))
        shells = [in_container(kind, path)[0], document.get("setup", "")] if kind == "skypilot" else []
        if kind == "jobset" and "bash" in in_container(kind, path)[1]["command"]:
            shells = [in_container(kind, path)[1]["command"][-1]]
    for shell in shells:
        done = subprocess.run(["bash", "-n"], input=shell, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert "mesh.launch" in text and "--join" in text and "train.py" in text and "75" in text


@pytest.mark.parametrize(
    ("program", "name"),
    [
        (("train.py",), "train"),
        (("My_Folder/Train_2.py",), "train-2"),
        (("-m", "spmd.train", "gpt2.toml"), "spmd-train"),
        (("01.py",), "job-01"),
        ((f"{'long' * 20}.py",), "long" * 10),
        (("--name", "llama-3", "train.py"), "llama-3"),
    ],
)
def test_a_job_has_a_name_that_every_scheduler_takes(program: tuple[str, ...], name: str, tmp_path: Path) -> None:
    path = emitted("jobset", "--image i", tmp_path, program)
    assert path.name == f"{name}.jobset.yaml"
    assert f"{name}-host-0-0.{name}:8476" in path.read_text(encoding="utf-8")


def directives(path: Path) -> dict[str, str]:
    lines = path.read_text(encoding="utf-8").splitlines()
    heads = [line for line in lines if line.startswith("#SBATCH ")]
    # sbatch stops reading at the first command.
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    assert all(lines.index(line) < first for line in heads)
    found: dict[str, str] = {}
    for line in heads:
        match = re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line)
        assert match and match[1] not in found, line
        found[match[1]] = match[2]
    return found


def test_slurm_is_asked_for_the_hosts(tmp_path: Path) -> None:
    path = emitted("slurm", LINES["slurm"][1], tmp_path)
    found = directives(path)
    assert "SRUN_CPUS_PER_TASK" in path.read_text(encoding="utf-8")
    wanted = {"nodes": "2", "ntasks-per-node": "2", "cpus-per-task": "8", "mem": "128G", "gpus-per-node": "h100:8", "partition": "gpu"}
    assert found.items() >= {**wanted, "time": "24:00:00", "exclusive": None, "signal": "TERM@120", "requeue": None}.items()


def test_a_jobset_has_a_pod_per_host_of_the_slice(tmp_path: Path) -> None:
    path = emitted("jobset", LINES["jobset"][1], tmp_path)
    document = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert document["spec"]["failurePolicy"]["maxRestarts"] == 3
    job = document["spec"]["replicatedJobs"][0]["template"]["spec"]
    assert job["parallelism"] == job["completions"] == 4
    pod = job["template"]["spec"]
    assert pod["nodeSelector"]["cloud.google.com/gke-tpu-accelerator"] == "tpu-v5-lite-podslice"
    assert pod["containers"][0]["resources"]["limits"] == {"google.com/tpu": 4}
    assert pod["containers"][0]["volumeMounts"][0]["name"] == pod["volumes"][0]["name"]


@pytest.mark.parametrize("kind", KINDS)
def test_no_file_holds_a_secret(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_never_written")
    line = next(line for line in LINES[kind] if "--secret" in line)
    text = emitted(kind, line, tmp_path).read_text(encoding="utf-8")
    assert "HF_TOKEN" in text and "hf_never_written" not in text


@pytest.mark.parametrize(
    ("name", "chips", "hosts", "accelerator"),
    [
        ("v5e:1x1", 1, 1, "v5litepod-1"),
        ("v5e:2x4", 8, 1, "v5litepod-8"),
        ("v5e:16x16", 256, 64, "v5litepod-256"),
        ("v4:2x2x4", 16, 4, "v4-32"),
        ("v5p:2x2x1", 4, 1, "v5p-8"),
        ("v6e:4x8", 32, 8, "v6e-32"),
    ],
)
def test_a_slice_has_hosts_and_a_name_for_those_who_lend_it(name: str, chips: int, hosts: int, accelerator: str) -> None:
    found = TpuSlice.parse(name)
    assert (found.num_chips, found.num_hosts, found.accelerator) == (chips, hosts, accelerator)


@pytest.mark.parametrize("name", ["v5e:4x5", "v6e:3x4", "v5e:32x32", "v4:2x2x3", "v5p:4x4x6"])
def test_a_slice_that_does_not_exist_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match=f"there is no TPU slice '{name}'\n  a dim of (.*)\n  fix: write {name[:3].rstrip(':')}:4x4"):
        TpuSlice.parse(name)


@pytest.mark.parametrize("name", ["v5e", "v5e:4", "v4:4x4", "v5e:0x4", "v9:4x4", "v5e:4x4x"])
def test_a_slice_that_is_none_is_refused(name: str) -> None:
    with pytest.raises(DeviceError, match="is not a TPU slice\n  fix: write the chips and their grid, as in v4:4x4x4, v5e:4x4"):
        TpuSlice.parse(name)


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ("here", Code()),
        ("git+https://example.com/a.git", Code("git", "https://example.com/a.git")),
        ("git+https://example.com/a.git@3f2a", Code("git", "https://example.com/a.git", "3f2a")),
        ("git+ssh://git@example.com/a.git", Code("git", "ssh://git@example.com/a.git")),
        ("git+ssh://git@example.com/a.git@feature/x", Code("git", "ssh://git@example.com/a.git", "feature/x")),
        ("git+/srv/a.git@main", Code("git", "/srv/a.git", "main")),
    ],
)
def test_code_is_named_as_pip_names_it(text: str, code: Code) -> None:
    assert Code.parse(text) == code


# What the job of these tests is: each process says where it stands and what it was told, and leaves as it is told to.
PROGRAM = """
import os, sys
import mesh
host = mesh.init()
mesh.barrier("both are here")
with open(f"{sys.argv[1]}/process-{host.index}", "a") as file:
    file.write(f"{host.count} {host.found_by} {os.environ.get('HF_TOKEN')}\\n")
sys.exit(int(sys.argv[2]))
"""
SRUN = """#!{python}
import os, subprocess, sys
words = sys.argv[1:]
while words[0].startswith("--"):
    words.pop(0)
count = int(os.environ["SLURM_JOB_NUM_NODES"])
common = {{**os.environ, "SLURM_STEP_NODELIST": "localhost", "SLURM_STEP_NUM_TASKS": str(count), "SLURM_STEP_TASKS_PER_NODE": str(count)}}
jobs = [subprocess.Popen(words, env={{**common, "SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)}}) for i in range(count)]
sys.exit(max(job.wait() for job in jobs))
"""
GCLOUD = """#!{python}
import os, subprocess, sys
print(*sys.argv[1:], file=open(os.environ["SAID"], "a"))
if sys.argv[1] == "secrets":
    print("from the manager")
elif sys.argv[4] == "scp":
    for i in range(2):
        home = f"{{os.environ['HOSTS']}}/{{i}}"
        os.makedirs(home, exist_ok=True)
        subprocess.run(["cp", sys.argv[5], home + "/code.tgz"], check=True)
elif sys.argv[4] == "ssh":
    names = {{"TPU_WORKER_HOSTNAMES": "localhost,localhost"}}
    homes = [f"{{os.environ['HOSTS']}}/{{i}}" for i in range(2)]
    jobs = [
        subprocess.Popen(["sh", "-c", sys.argv[-1]], cwd=home, env={{**os.environ, **names, "TPU_WORKER_ID": str(i), "HOME": home}})
        for i, home in enumerate(homes)
    ]
    sys.exit(max(job.wait() for job in jobs))
"""
SCONTROL = '#!/bin/sh\necho "$@" > "$SAID"\n'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Where a job is started: its program, and `bin` with this Python and stand-ins for the commands of schedulers."""
    commands = tmp_path / "bin"
    commands.mkdir()
    python = f'#!/bin/sh\nexec {sys.executable} -W ignore::UserWarning "$@"\n'
    for name, text in {"srun": SRUN, "gcloud": GCLOUD, "scontrol": SCONTROL, "python": python}.items():
        (commands / name).write_text(text.replace("{python}", sys.executable).replace("{{", "{").replace("}}", "}"), encoding="utf-8")
        (commands / name).chmod(0o755)
    (tmp_path / "train.py").write_text(PROGRAM, encoding="utf-8")
    (tmp_path / "out").mkdir()
    return tmp_path


def around(folder: Path, **more: str) -> dict[str, str]:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return {**environ(), "PATH": path, "HOME": str(folder), "SAID": str(folder / "said"), "HF_TOKEN": "a secret", **more}


def what_they_said(folder: Path) -> list[list[str]]:
    return [path.read_text(encoding="utf-8").splitlines() for path in sorted((folder / "out").iterdir())]


def run_in_bash(script: str, cwd: Path, env: Mapping[str, str]) -> Callable[[], tuple[int, str]]:
    job = subprocess.Popen(["bash", "-c", script], cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)

    def ended() -> tuple[int, str]:
        said, _ = job.communicate(timeout=200)
        return job.returncode, said

    return ended


@pytest.mark.parametrize("code", [0, pytest.param(3, marks=pytest.mark.slow), pytest.param(75, marks=pytest.mark.slow)])
def test_slurm_starts_processes_that_find_each_other_restarts_and_requeues(code: int, folder: Path) -> None:
    script = emitted("slurm", "-n 2 --restarts 1 --secret HF_TOKEN", folder, ("train.py", str(folder / "out"), str(code)))
    env = around(folder, SLURM_JOB_ID="17", SLURM_SUBMIT_DIR=str(folder), SLURM_JOB_NUM_NODES=directives(script)["nodes"])
    left, said = run_in_bash(script.read_text(encoding="utf-8"), folder, env)()
    assert left == (0 if code == 75 else code), said
    attempts = 2 if code == 3 else 1
    assert what_they_said(folder) == [["2 SLURM a secret"] * attempts] * 2, said
    assert (folder / "said").exists() == (code == 75)
    if code == 75:
        assert (folder / "said").read_text(encoding="utf-8") == "requeue 17\n"


def test_slurm_without_its_secret_ends_before_the_program(folder: Path) -> None:
    script = emitted("slurm", "-n 2 --secret WANDB_API_KEY", folder)
    left, said = run_in_bash(script.read_text(encoding="utf-8"), folder, around(folder))()
    assert left != 0 and "WANDB_API_KEY: export it before sbatch" in said


def pod_environment(container: dict[str, Any], index: int) -> dict[str, str]:
    """What the kubelet makes of `env`; the name of pod 0 is in the cluster's DNS alone."""
    fields = {
        "metadata.annotations['batch.kubernetes.io/job-completion-index']": str(index),
        "metadata.labels['jobset.sigs.k8s.io/jobset-uid']": "1b2c",
        "metadata.labels['jobset.sigs.k8s.io/restart-attempt']": "0",
    }
    found: dict[str, str] = {}
    for each in container["env"]:
        source = each.get("valueFrom", {})
        found[each["name"]] = fields[source["fieldRef"]["fieldPath"]] if "fieldRef" in source else each.get("value", "of the cluster")
    return found


@pytest.mark.parametrize("code", [pytest.param("image", marks=pytest.mark.slow), "git"])
def test_pods_of_a_jobset_find_each_other(code: str, folder: Path) -> None:
    subprocess.run(["git", "-C", folder, "init", "-q", "-b", "main"], check=True)
    subprocess.run(["git", "-C", folder, "add", "train.py"], check=True)
    as_somebody = ["-c", "user.name=a", "-c", "user.email=a@example.com"]
    subprocess.run(["git", "-C", folder, *as_somebody, "commit", "-q", "-m", "program"], check=True)
    line = f"-n 2 --image i --secret HF_TOKEN {f'--code git+{folder}@main --install true' if code == 'git' else ''}"
    path = emitted("jobset", line, folder, ("train.py", str(folder / "out"), "0"))
    port = reserve_port()
    running: list[subprocess.Popen[str]] = []
    for index in range(2):
        _, container = in_container("jobset", path)
        env = {**around(folder), **pod_environment(container, index), "SPMD_COORDINATOR": f"127.0.0.1:{port}"}
        words = [word.replace("/tmp/code", str(folder / f"code-{index}")) for word in container["command"]]
        running.append(subprocess.Popen(words, cwd=folder, env=env, text=True))
    assert [job.wait(timeout=200) for job in running] == [0, 0]
    assert what_they_said(folder) == [["2 launcher of the cluster"]] * 2
    assert (folder / "code-1" / "train.py").exists() == (code == "git")


def test_nodes_of_skypilot_find_each_other(folder: Path) -> None:
    path = emitted("skypilot", "-n 2 --secret HF_TOKEN", folder, ("train.py", str(folder / "out"), "0"))
    activate = folder / "env" / "bin" / "activate"
    activate.parent.mkdir(parents=True)
    activate.touch()
    run, _ = in_container("skypilot", path)
    port = reserve_port()
    nodes = {"SKYPILOT_NODE_IPS": "127.0.0.1\n127.0.0.1", "SKYPILOT_TASK_ID": "sky-1"}
    shell = run.replace(":8476", f":{port}")
    running = [run_in_bash(shell, folder, around(folder, **nodes, SKYPILOT_NODE_RANK=str(rank))) for rank in range(2)]
    for ended in running:
        left, said = ended()
        assert left == 0, said
    assert what_they_said(folder) == [["2 launcher a secret"]] * 2


def test_a_tpu_vm_is_made_and_its_hosts_find_each_other(folder: Path) -> None:
    path = emitted("tpu-vm", "--tpu v5e:4x4 --secret HF_TOKEN --install true", folder, ("train.py", str(folder / "out"), "0"))
    text = path.read_text(encoding="utf-8").replace("command -v uv", "true").replace("uv venv --quiet --seed --python 3.12 ~/env", "fake")
    fake = folder / "bin" / "fake"
    fake.write_text("#!/bin/sh\nmkdir -p ~/env/bin && touch ~/env/bin/activate\n", encoding="utf-8")
    fake.chmod(0o755)
    env = around(folder, HOSTS=str(folder / "hosts"), SPMD_COORDINATOR=f"127.0.0.1:{reserve_port()}")
    left, said = run_in_bash(text.replace("${1:?TPU_NAME}", "mine").replace("${2:?ZONE}", "here"), folder, env)()
    assert left == 0, said
    assert what_they_said(folder) == [["2 TPU from the manager"]] * 2
    told = (folder / "said").read_text(encoding="utf-8").splitlines()
    assert told[0] == "compute tpus tpu-vm describe mine --zone here"
