"""What the command `spmd` makes of wrong command lines: one line that says what is wrong, exit code 2, and nothing done."""

import re
import runpy
import sys
import tomllib
from pathlib import Path

import pytest

import spmd
from mesh.launch._launch_options import parse
from spmd import cli

ROOT = Path(__file__).parents[1]

# argv -> the line; {tmp} is an empty folder with a file `file`
WRONG = {
    "": "spmd: choose one of doctor, ckpt, ops, launch, train, bench, demo",
    "dmo": "spmd: no argument or command 'dmo'; did you mean 'demo'?",
    "trian": "spmd: no argument or command 'trian'; did you mean 'train'?",
    "--versoin": "spmd: no option '--versoin'",
    "doctor --all": "spmd doctor: no option '--all'",
    "doctor now": "spmd doctor: no argument or command 'now'",
    "demo --stpes 3": "spmd demo: no option '--stpes'; did you mean '--steps'?",
    "demo --head 2": "spmd demo: no option '--head'; did you mean '--heads'?",
    "demo 7": "spmd demo: no argument or command '7'",
    "demo --steps": "spmd demo: --steps takes a value",
    "demo --steps many": "spmd demo: --steps takes a whole number, not 'many'",
    "demo --steps 5.5": "spmd demo: --steps takes a whole number, not '5.5'",
    "demo --dropout x": "spmd demo: --dropout takes a number, not 'x'",
    "demo --steps 0": "spmd demo: --steps must be at least 1, got 0",
    "demo --steps -3": "spmd demo: --steps must be at least 1, got -3",
    "demo --batch 0": "spmd demo: --batch must be at least 1, got 0",
    "demo --devices -1": "spmd demo: --devices must be at least 0, got -1",
    "demo --sample -1": "spmd demo: --sample must be at least 0, got -1",
    "demo --dropout 1": "spmd demo: --dropout is a probability below 1, not 1",
    "demo --dropout nan": "spmd demo: --dropout must be at least 0, got nan",
    "demo --heads 3": "spmd demo: --heads 3 does not divide --width 128; 1, 2, 4, 8, 16, 32, 64 do",
    "demo --mesh dta=4": "spmd demo: --mesh 'dta=4': no axis 'dta'; did you mean 'data'?",
    "demo --mesh pipeline=4": "spmd demo: --mesh 'pipeline=4': no axis 'pipeline', only data and model",
    "demo --mesh data": "spmd demo: --mesh 'data' is not a mesh: write axes and their sizes, like data=4,model=2",
    "demo --mesh data=0": "spmd demo: --mesh 'data=0' is not a mesh: write axes and their sizes, like data=4,model=2",
    "demo --mesh data=2,data=2": "spmd demo: --mesh 'data=2,data=2' names axis 'data' twice",
    "demo --mesh data=16": "spmd demo: --mesh 'data=16' has 16 devices, but --devices is 8",
    "demo --out {tmp}": "spmd demo: --out {tmp} cannot be written: Is a directory",
    "demo --out {tmp}/file/x.pt": "spmd demo: --out {tmp}/file/x.pt cannot be written: {tmp}/file is not a folder",
    "bench": "spmd bench: {megatron,gpt2,resnet50} is missing: The benchmark.",
    "bench gpt3": "spmd bench: name is one of megatron, gpt2, resnet50, not 'gpt3'; did you mean 'gpt2'?",
    "bench gpt2 --preset huge": "spmd bench: --preset of gpt2 is one of tiny, small, full, not 'huge'",
    "bench gpt2 --preset smal": "spmd bench: --preset of gpt2 is one of tiny, small, full, not 'smal'; did you mean 'small'?",
    "bench gpt2 --variant seq": "spmd bench: --variant of gpt2 is one of own, hf, not 'seq'",
    "bench gpt2 --mesh modle=2": "spmd bench: --mesh 'modle=2': no axis 'modle'; did you mean 'model'?",
    "bench gpt2 --against jaxx": "spmd bench: --against takes jax, torchax, torch, torch.compile, fsdp, not 'jaxx'; did you mean 'jax'?",
    "bench gpt2 --platform tpu": "spmd bench: --platform is one of cpu, gpu, not 'tpu'; did you mean 'gpu'?",
    "bench gpt2 --topology v5e": "spmd bench: --topology 'v5e' is not a topology: write the chips and their grid, as in v5e:2x4",
    "bench gpt2 --rounds 0": "spmd bench: --rounds must be at least 1, got 0",
    "bench gpt2 --batch -8": "spmd bench: --batch must be at least 0, got -8",
    "bench gpt2 --weights {tmp}/no": "spmd bench: --weights {tmp}/no: no such file or folder",
    "bench gpt2 --json {tmp}": "spmd bench: --json {tmp} cannot be written: Is a directory",
    "ops nosuchop": "spmd ops: no operator name matches 'nosuchop'",
    "ops sofmax": "spmd ops: no operator name matches 'sofmax'; did you mean 'softmax'?",
    "ops (": "spmd ops: '(' is not a regular expression: missing ), unterminated subpattern at position 0",
    "ops --markdwon": "spmd ops: no option '--markdwon'; did you mean '--markdown'?",
    "ckpt": "spmd ckpt: choose one of ls, verify, reshard",
    "ckpt lst": "spmd ckpt: no argument or command 'lst'; did you mean 'ls'?",
    "ckpt verfy": "spmd ckpt: no argument or command 'verfy'; did you mean 'verify'?",
    "ckpt ls": "spmd ckpt: PATH is missing: Folder of the checkpoints.",
    "ckpt ls {tmp}/no": "spmd ckpt: PATH {tmp}/no: no such folder",
    "ckpt verify {tmp}/file": "spmd ckpt: PATH {tmp}/file: no such folder",
    "ckpt verify {tmp} --step x": "spmd ckpt: --step takes a whole number, not 'x'",
    "ckpt reshard {tmp} {tmp}/new --mesh 4x2": "spmd ckpt: --mesh '4x2' is not a mesh: write axes and their sizes, like data=4,model=2",
    "launch": "spmd launch: no program to run: pass a script with its arguments, or -m and a module",
    "launch -m": "spmd launch: no program to run: pass a script with its arguments, or -m and a module",
    "launch -n 0 {tmp}/file": "spmd launch: -n must be at least 1, got 0",
    "launch -n -3 {tmp}/file": "spmd launch: -n must be at least 1, got -3",
    "launch -n two {tmp}/file": "spmd launch: --processes takes a whole number, not 'two'",
    "launch --proceses 2 {tmp}/file": "spmd launch: no option '--proceses'; did you mean '--processes'?",
    "launch --devices-per-process 0 {tmp}/file": "spmd launch: --devices-per-process must be at least 1, got 0",
    "launch --restarts -1 {tmp}/file": "spmd launch: --restarts must be at least 0, got -1",
    "launch --watchdog 0 {tmp}/file": "spmd launch: --watchdog must be a positive number of seconds, got 0",
    "launch --timeout soon {tmp}/file": "spmd launch: --timeout takes a number, not 'soon'",
    "launch {tmp}/no.py": "spmd launch: there is no script '{tmp}/no.py'",
    "launch -m no_such_module": "spmd launch: there is no module 'no_such_module'",
    "launch --preload torhc {tmp}/file": "spmd launch: --preload: there is no module 'torhc'",
    "launch --hostfile {tmp}/no {tmp}/file": "spmd launch: --hostfile {tmp}/no cannot be read: No such file or directory",
    "launch --hostfile {tmp}/file {tmp}/file": "spmd launch: --hostfile {tmp}/file contains no host names",
    "launch --hosts a,b -n 3 {tmp}/file": "spmd launch: -n 3 does not divide over 2 hosts: give a multiple of 2",
    "launch --hosts a,a -n 2 {tmp}/file": "spmd launch: a host is named twice; pass -n to run several processes on each",
    "launch --coordinator host1 {tmp}/file": "spmd launch: --coordinator takes a name and a port, as in host1:8476, not 'host1'",
    "launch --emit slrum x.py": "spmd launch: --emit is one of slurm, jobset, tpu-vm, skypilot, not 'slrum'; did you mean 'slurm'?",
    "launch --emit jobset x.py": "spmd launch: --emit jobset needs --image, a container with Python and this package",
    "launch --emit slurm --image i x.py": "spmd launch: --image has no effect without --emit jobset or skypilot",
    "launch --tpu v5e:4x4 x.py": "spmd launch: --tpu has no effect without --emit jobset or tpu-vm or skypilot",
    "launch --emit tpu-vm --tpu v5e:4 x.py": "spmd launch: --tpu 'v5e:4' is not a TPU slice: write the chips and their grid, as in",
    "launch --emit tpu-vm --tpu v5e:4x4 -n 2 x.py": "spmd launch: -n 2 does not fit --tpu v5e:4x4, which has 4 hosts: omit -n",
    "launch --emit slurm --name A_b x.py": "spmd launch: --name takes up to 40 lower-case letters, digits and dashes, beginning with",
    "launch --emit slurm --gpus 8 x.py": "spmd launch: --gpus takes a type of GPU and its number on each host, as in H100:8, not '8'",
    "launch --emit slurm --cpus 0 x.py": "spmd launch: --cpus must be at least 1, got 0",
    "launch --emit slurm --code svn x.py": "spmd launch: --code is here, image or git+URL@REF, not 'svn'",
    "launch --emit slurm --code image x.py": "spmd launch: --code image is not possible with --emit slurm, only here and git",
    "launch --emit slurm --secret A=b x.py": "spmd launch: --secret takes the name of a variable without its value, not 'A=...'",
    "launch --emit slurm --sbatch --x=1 x.py": "spmd launch: argument --sbatch: expected one argument",
    "launch --emit tpu-vm --volume data x.py": "spmd launch: --volume takes a source and a folder, as in checkpoints:/checkpoints",
    "launch --job-dir {tmp}/file/x {tmp}/file": "spmd launch: --job-dir {tmp}/file/x is not a writable folder: Not a directory",
    "launch --emit slurm --out {tmp}/file {tmp}/file": "spmd launch: --out {tmp}/file is not a writable folder: File exists",
}


def test_the_launcher_takes_a_module_after_its_options() -> None:
    assert parse(["-n", "2", "-m", "json.tool", "-n", "7"], "launch", ()).program == ("-m", "json.tool", "-n", "7")
    assert parse(["--emit=slurm", "-m", "a.b"], "launch", ()).program == ("-m", "a.b")


def test_there_are_fifty_of_them() -> None:
    assert len(WRONG) >= 50


@pytest.mark.parametrize("line", WRONG)
def test_a_wrong_command_line_gets_one_line_and_exit_code_2(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    argv = [word.replace("{tmp}", str(tmp_path)) for word in line.split()]
    with pytest.raises(SystemExit) as left:
        cli.main(argv)
    assert left.value.code == 2
    said = capsys.readouterr()
    assert said.out == ""
    (text,) = said.err.splitlines()
    expected = WRONG[line].replace("{tmp}", str(tmp_path))
    assert text.startswith(expected)
    assert "did you mean" in expected or "did you mean" not in text
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("module", ["spmd", "spmd.cli"])
@pytest.mark.parametrize("option", ["--version", "-V"])
@pytest.mark.filterwarnings("ignore:'spmd.cli' found in sys.modules:RuntimeWarning")
def test_the_version_is_that_of_the_package(
    module: str, option: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", [module, option])
    with pytest.raises(SystemExit) as left:
        runpy.run_module(module, run_name="__main__")
    assert left.value.code == 0
    assert capsys.readouterr().out == f"spmd {spmd.__version__}\n"


def test_the_changelog_begins_with_this_version() -> None:
    headings = re.findall(r"^## \[([^]]+)\]", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert headings[0] == spmd.__version__


def test_the_version_has_one_place() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" not in project["project"]
    assert (
        (ROOT / project["tool"]["hatch"]["version"]["path"]).read_text(encoding="utf-8").endswith(f'__version__ = "{spmd.__version__}"\n')
    )
