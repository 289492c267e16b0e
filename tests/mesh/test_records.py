"""A record that is read while it is written is the old one or the new one."""

import threading
from pathlib import Path

import pytest

from mesh.job._records import write_record

TEXTS = ("a" * 5000, "b" * 9000)


def test_a_reader_finds_one_record_or_the_other_and_nothing_in_between(tmp_path: Path) -> None:
    path, is_done = tmp_path / "pids.json", threading.Event()
    write_record(path, TEXTS[0])
    found: set[str] = set()

    def read() -> None:
        while not is_done.is_set():
            found.add(path.read_text(encoding="utf-8"))

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(500):
        write_record(path, TEXTS[number % 2])
    is_done.set()
    reader.join()
    assert found and found <= set(TEXTS)
    assert list(tmp_path.iterdir()) == [path]


def test_what_cannot_be_written_leaves_what_was_there(tmp_path: Path) -> None:
    path = tmp_path / "saved"
    write_record(path, "7")
    with pytest.raises(UnicodeEncodeError):
        write_record(path, "\udc80")
    assert path.read_text(encoding="utf-8") == "7"
