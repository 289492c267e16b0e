"""Loads damaged and hostile files, and checks that none loads silently, crashes, executes code or accesses files outside its folder.

    python benchmarks/damage.py                                    # 2,000 damaged checkpoints, 10,000 hostile inputs
    python benchmarks/damage.py --damaged 100 --hostile 500 --json /tmp/damage.json

A damaged checkpoint has two steps, of which the later is damaged in one of many ways. A restore must return the earlier step, bit for
bit, with a warning. A hostile input is a safetensors file, an index, a manifest with a correct checksum, a state or another library's
checkpoint that is made to do harm. The only allowed outcomes are a result or a CheckpointError. An audit hook reports files that are
opened and code that is executed meanwhile. Results are written to benchmarks/results/damage.json, and a table is printed.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import random
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import rich
import rich.table
import torch
import tyro

from spmd import checkpoint
from spmd.base._errors import CheckpointError
from spmd.checkpoint import _manifest, _snapshot

ROOT = Path(__file__).resolve().parents[1]
DAMAGED_STEP = "step_00000002"


@dataclass(frozen=True)
class Options:
    """Options of the run."""

    damaged: int = 2000
    """Number of damaged checkpoints."""
    hostile: int = 10_000
    """Number of hostile inputs."""
    seed: int = 0
    """Seed of the random choices."""
    json: Path = ROOT / "benchmarks" / "results" / "damage.json"
    """File for the results."""


def state(step: int) -> dict[str, Any]:
    """The state of a step, with several arrays, so that there are several files and several pieces of one size."""
    rng = np.random.default_rng(step)
    arrays = {f"layer.{i}": rng.standard_normal((16, 32)).astype(np.float32) for i in range(6)}
    return {**arrays, "counts": rng.integers(0, 9, 11), "step": step, "rate": 0.1 * step}


def is_step(found: Any, step: int) -> bool:
    expected = state(step)
    return found.keys() == expected.keys() and all(np.array_equal(found[key], expected[key]) for key in expected)


def template(folder: Path) -> Path:
    """Save an intact checkpoint of steps 1 and 2, each in several files."""
    kept, _snapshot.PACK_BYTES = _snapshot.PACK_BYTES, 5000
    try:
        for step in (1, 2):
            checkpoint.save(folder, step, state(step), wait=True)
    finally:
        _snapshot.PACK_BYTES = kept
    return folder


# Each function damages the step in `folder / DAMAGED_STEP`.


def files_of(folder: Path, pattern: str = "data-*") -> list[Path]:
    return sorted((folder / DAMAGED_STEP).glob(pattern))


def flip(path: Path, rng: random.Random, bits: int = 1) -> None:
    data = bytearray(path.read_bytes())
    for _ in range(bits):
        at = rng.randrange(len(data))
        data[at] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def flipped_data(folder: Path, rng: random.Random) -> None:
    flip(rng.choice(files_of(folder)), rng)


def flipped_twice(folder: Path, rng: random.Random) -> None:
    path = rng.choice(files_of(folder))
    before = path.read_bytes()
    while path.read_bytes() == before:
        flip(path, rng, 2)


def flipped_manifest(folder: Path, rng: random.Random) -> None:
    flip(folder / DAMAGED_STEP / _manifest.NAME, rng)


def truncated(folder: Path, rng: random.Random) -> None:
    path = rng.choice(files_of(folder, "*"))
    os.truncate(path, rng.randrange(path.stat().st_size))


def extended(folder: Path, rng: random.Random) -> None:
    path = rng.choice(files_of(folder, "*"))
    path.write_bytes(path.read_bytes() + rng.randbytes(rng.randrange(1, 100)))


def zeroed(folder: Path, rng: random.Random) -> None:
    path = rng.choice(files_of(folder))
    data = bytearray(path.read_bytes())
    at = rng.randrange(len(data) - 64)
    data[at : at + 64] = bytes(64)
    path.write_bytes(data)


def missing(folder: Path, rng: random.Random) -> None:
    rng.choice(files_of(folder, "*")).unlink()


def swapped_pieces(folder: Path, rng: random.Random) -> None:
    path = rng.choice([p for p in files_of(folder) if p.stat().st_size >= 4096])
    data = path.read_bytes()
    path.write_bytes(data[2048:4096] + data[:2048] + data[4096:])


def swapped_files(folder: Path, rng: random.Random) -> None:
    one, other = rng.sample([p for p in files_of(folder) if p.stat().st_size == 4096], 2)
    content = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(content)


def of_another_step(folder: Path, rng: random.Random) -> None:
    path = rng.choice(files_of(folder))
    shutil.copy(folder / "step_00000001" / path.name, path)


def manifest_of_another_step(folder: Path, rng: random.Random) -> None:
    shutil.copy(folder / "step_00000001" / _manifest.NAME, folder / DAMAGED_STEP / _manifest.NAME)


def empty_step(folder: Path, rng: random.Random) -> None:
    shutil.rmtree(folder / DAMAGED_STEP)
    (folder / DAMAGED_STEP).mkdir()


def linked_step(folder: Path, rng: random.Random) -> None:
    shutil.move(folder / DAMAGED_STEP, folder / "elsewhere")
    (folder / DAMAGED_STEP).symlink_to("elsewhere")


def linked_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice(files_of(folder, "*"))
    shutil.move(path, folder / "elsewhere")
    path.symlink_to(folder / "elsewhere")


def renamed_step(folder: Path, rng: random.Random) -> None:
    shutil.rmtree(folder / DAMAGED_STEP)
    shutil.copytree(folder / "step_00000001", folder / DAMAGED_STEP)


def pipe_for_a_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice(files_of(folder, "*"))
    path.unlink()
    os.mkfifo(path)


def folder_for_a_file(folder: Path, rng: random.Random) -> None:
    path = rng.choice(files_of(folder, "*"))
    path.unlink()
    path.mkdir()


def other_model(folder: Path, rng: random.Random) -> None:
    shutil.rmtree(folder / DAMAGED_STEP)
    other = {**state(2), "layer.0": np.zeros((8, 8), np.float32)} if rng.random() < 0.5 else {"weights": np.ones(3)}
    checkpoint.save(folder, 2, other, wait=True)


DAMAGES: tuple[Callable[[Path, random.Random], None], ...] = (
    flipped_data,
    flipped_twice,
    flipped_manifest,
    truncated,
    extended,
    zeroed,
    missing,
    swapped_pieces,
    swapped_files,
    of_another_step,
    manifest_of_another_step,
    empty_step,
    linked_step,
    linked_file,
    renamed_step,
    pipe_for_a_file,
    folder_for_a_file,
    other_model,
)


def damaged(sound: Path, base: Path, number: int, rng: random.Random) -> tuple[str, str]:
    """Restore one damaged checkpoint. Returns the damage and the outcome, which must be "found"."""
    damage = DAMAGES[number % len(DAMAGES)]
    folder = base / f"damaged{number}"
    shutil.copytree(sound, folder)
    try:
        damage(folder, rng)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = checkpoint.restore(folder, state(0), random=False)
        if found.step == 1 and is_step(found.state, 1):
            has_warning = damage is linked_step or any(
                "newer steps that are damaged or do not match the program" in str(w.message) for w in caught
            )
            return damage.__name__, "found" if has_warning else "fell back without a warning"
        return damage.__name__, "loaded" if found.step == 2 else "wrong values"
    except CheckpointError:
        return damage.__name__, "gave up"
    finally:
        shutil.rmtree(folder)


# Hostile inputs. Each function creates one in `folder` and loads it.

NUMBERS = (-1, 0, 1, 2**31, 2**62, 2**63, 2**64, 10**30, 1.5, float("inf"), True)
TEXTS = ("", "../../etc/passwd", "/etc/passwd", "..\\..\\x", "a\0b", "\ud800", "x" * 5000, "__metadata__", "bfloat16", "F32", "os.system")


def odd(rng: random.Random) -> Any:
    """A random unexpected value."""
    kind = rng.randrange(6)
    if kind == 0:
        return rng.choice(NUMBERS)
    if kind == 1:
        return rng.choice(TEXTS)
    return (None, [], {}, [rng.choice(NUMBERS)] * rng.randrange(1, 70))[kind - 2]


def mutated(value: Any, rng: random.Random) -> Any:
    """JSON data with one random node replaced, removed or repeated."""
    if not isinstance(value, dict | list) or not value or rng.random() < 0.15:
        return odd(rng)
    if isinstance(value, dict):
        key = rng.choice(list(value))
        changed = {k: v for k, v in value.items() if k != key or rng.random() < 0.9}
        return {**changed, (str(odd(rng)) if rng.random() < 0.1 else key): mutated(value[key], rng)}
    at = rng.randrange(len(value))
    if rng.random() < 0.1:
        return value[:at] + value[at + 1 :]
    if rng.random() < 0.1:
        return [*value, value[at]]
    return [*value[:at], mutated(value[at], rng), *value[at + 1 :]]


def read_model(path: Path) -> None:
    checkpoint.load_safetensors(path, torch.nn.Linear(4, 4), strict=False)


def random_safetensors(folder: Path, rng: random.Random, sound: Path) -> None:
    data = rng.randbytes(rng.randrange(200))
    if rng.random() < 0.5:
        data = rng.randrange(2 ** rng.randrange(1, 64)).to_bytes(8, "little") + data
    (folder / "model.safetensors").write_bytes(data)
    read_model(folder)


def mutated_header(folder: Path, rng: random.Random, sound: Path) -> None:
    header: Any = {
        "weight": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 64]},
        "bias": {"dtype": "F32", "shape": [4], "data_offsets": [64, 80]},
    }
    for _ in range(rng.randrange(1, 4)):
        header = mutated(header, rng)
    text = json.dumps(header).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(80))
    read_model(folder)


def deep_header(folder: Path, rng: random.Random, sound: Path) -> None:
    text = (rng.choice([b"[", b'{"a":']) * rng.choice([10, 1000, 200_000])) + b"1"
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text)
    read_model(folder)


def climbing_index(folder: Path, rng: random.Random, sound: Path) -> None:
    name = rng.choice([*TEXTS, "../model.safetensors", "/tmp/model.safetensors", "a/../../x.safetensors", "..", ".", "~/x.safetensors"])
    index: Any = {"weight_map": {"weight": name, "bias": "model.safetensors"}}
    if rng.random() < 0.5:
        index = mutated(index, rng)
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    read_model(folder)


def mutated_manifest(folder: Path, rng: random.Random, sound: Path) -> None:
    """A manifest with a correct checksum and wrong content."""
    shutil.copytree(sound, folder, dirs_exist_ok=True)
    shutil.rmtree(folder / "step_00000001")
    path = folder / DAMAGED_STEP / _manifest.NAME
    content: Any = json.loads(path.read_bytes().partition(b"\n")[2])
    for _ in range(rng.randrange(1, 4)):
        content = mutated(content, rng)
    body = json.dumps(content).encode()
    path.write_bytes(b"spmd-checkpoint 1 sha256 %s %d\n" % (hashlib.sha256(body).hexdigest().encode(), len(body)) + body)
    checkpoint.steps(folder)
    checkpoint.restore(folder, state(0) if rng.random() < 0.5 else None, random=False)


def random_manifest(folder: Path, rng: random.Random, sound: Path) -> None:
    (folder / DAMAGED_STEP).mkdir()
    body = rng.choice([rng.randbytes(rng.randrange(300)), b"[" * 100_000, b'{"step":' + b"9" * 5000 + b"}", Bomb.pickled(folder)])
    first = b"spmd-checkpoint 1 sha256 %s %d\n" % (hashlib.sha256(body).hexdigest().encode(), len(body))
    (folder / DAMAGED_STEP / _manifest.NAME).write_bytes(first + body if rng.random() < 0.8 else body)
    checkpoint.verify(folder)
    checkpoint.restore(folder)


def climbing_names(folder: Path, rng: random.Random, sound: Path) -> None:
    """A state whose names are paths. They must not be used as paths, and must be restored unchanged."""
    name = rng.choice([text for text in TEXTS if text != "\ud800"])
    given = {name: {name: np.ones(3, np.float32)}}
    checkpoint.save(folder / "run", 1, given, wait=True)
    found = checkpoint.restore(folder / "run").state
    if list(found) != [name]:
        raise AssertionError(f"{name!r} came back as {list(found)}")


def foreign_pickle(folder: Path, rng: random.Random, sound: Path) -> None:
    """Pickles under file names that other libraries unpickle."""
    name = rng.choice([".metadata", "__0_0.distcp", "pytorch_model.bin", "model.safetensors", "data.pkl", "_METADATA"])
    (folder / name).write_bytes(Bomb.pickled(folder))
    if rng.random() < 0.5:
        checkpoint.restore(folder)
    else:
        read_model(folder if rng.random() < 0.5 else folder / name)


class Bomb:
    """An object that creates a folder when it is unpickled."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (self.path,)

    @staticmethod
    def pickled(folder: Path) -> bytes:
        return pickle.dumps(Bomb(str(folder / "executed")))


HOSTILE: tuple[Callable[[Path, random.Random, Path], None], ...] = (
    random_safetensors,
    mutated_header,
    mutated_header,
    deep_header,
    climbing_index,
    mutated_manifest,
    mutated_manifest,
    random_manifest,
    climbing_names,
    foreign_pickle,
)


class Watch:
    """Audit hook that records files opened outside `inside`, and executed code, while a hostile input is loaded."""

    def __init__(self) -> None:
        self.inside: tuple[str, ...] | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, args: tuple[Any, ...]) -> None:
        if self.inside is None:
            return
        if event == "open" and isinstance(args[0], str | bytes):
            path = os.path.realpath(os.fsdecode(args[0]))
            is_library = path.startswith((sys.prefix, sys.base_prefix, str(ROOT), "/proc/", "/dev/", "/sys/"))
            if not path.startswith(self.inside) and not is_library:
                self.seen.append(f"opened {path}")
        elif event in ("pickle.find_class", "os.system", "subprocess.Popen", "os.exec", "socket.connect"):
            self.seen.append(event)


def hostile(sound: Path, base: Path, number: int, rng: random.Random, watch: Watch) -> tuple[str, str]:
    """Load one hostile input. Returns its kind and the outcome, which must be "refused" or "read"."""
    attack = HOSTILE[number % len(HOSTILE)]
    folder = base / "hostile"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    before = set(os.listdir(base))
    watch.inside, watch.seen = (os.path.realpath(folder), os.path.realpath(sound)), []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attack(folder, rng, sound)
        outcome = "read"
    except CheckpointError:
        outcome = "refused"
    except Exception as error:  # a failure: the loader must raise a CheckpointError
        outcome = f"{type(error).__name__}: {error}"[:200]
    finally:
        watch.inside = None
    if (folder / "executed").exists() or watch.seen:
        outcome = f"executed or escaped: {watch.seen[:3]}"
    if set(os.listdir(base)) != before:
        outcome = "wrote outside of its folder"
    return attack.__name__, outcome


def main(options: Options) -> int:
    rng = random.Random(options.seed)
    report: dict[str, Any] = {}
    table = rich.table.Table("what", "cases", "outcomes")
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        sound = template(base / "sound")
        checkpoint.save_safetensors(base / "outside", torch.nn.Linear(4, 4))  # files that a path traversal would reach
        shutil.copy(base / "outside" / "model.safetensors", base / "model.safetensors")
        watch = Watch()
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        for title, count, one, right in (
            ("damaged", options.damaged, lambda n: damaged(sound, base, n, rng), ("found",)),
            ("hostile", options.hostile, lambda n: hostile(sound, base, n, rng, watch), ("refused", "read")),
        ):
            start = time.perf_counter()
            outcomes = Counter(one(number) for number in range(count))
            for (kind, outcome), number in sorted(outcomes.items()):
                table.add_row(f"{title}: {kind}", str(number), outcome)
                wrong += [f"{title}: {kind}: {number} x {outcome}"] if outcome not in right else []
            bad = sum(number for (_, outcome), number in outcomes.items() if outcome not in right)
            kinds = {f"{kind}: {outcome}": number for (kind, outcome), number in sorted(outcomes.items())}
            report[title] = {"cases": count, "wrong": bad, "seconds": round(time.perf_counter() - start, 1), "outcomes": kinds}
        grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory) / 1024
        report["memory_grown_mib"] = round(grown)
    options.json.write_text(json.dumps(report, indent=1) + "\n")
    rich.print(table, f"memory grew by {grown:.0f} MiB", *wrong)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options)))
