"""A Trainer that asks for `xla_fsdp_v2` runs under torch_xla's names as on CPU torch."""

import json
from pathlib import Path

import pytest

from tests.beside import run_with

pytestmark = pytest.mark.slow


def test_what_is_logged_is_what_cpu_torch_logs(tmp_path: Path) -> None:
    got, wanted = (json.loads(run_with(".", "tests/huggingface/compare_fsdp_v2.py", where, cwd=tmp_path)) for where in ("xla", "cpu"))
    assert [entry[:2] for entry in got] == [entry[:2] for entry in wanted]
    assert [entry[2] for entry in got] == pytest.approx([entry[2] for entry in wanted], rel=1e-5)
    assert (tmp_path / "xla/last/pytorch_model.bin").is_file()
