"""`spmd ops` and docs/ops.md say of every operator what computes it."""

import re
from pathlib import Path
from typing import get_args

import pytest
import torch

from spmd import cli, ops
from spmd.base._errors import UnsupportedOpError

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "ops.md"
ALL = ops.coverage()
BY_NAME = {operator.name: operator for operator in ALL}


@pytest.mark.skipif(
    f"in torch {torch.__version__.partition('+')[0]} that" not in PAGE.read_text(encoding="utf-8"),
    reason="docs/ops.md was written for another version of torch, which has other operators",
)
def test_page_is_up_to_date() -> None:
    assert PAGE.read_text(encoding="utf-8") == ops.markdown(ALL), "fix: make docs"


@pytest.mark.parametrize(
    ("name", "how", "where"),
    [
        ("add.Tensor", "rule", "spmd/lowering/pointwise.py"),
        ("matmul", "rule", "spmd/lowering/matmul.py"),
        ("max_pool2d_with_indices", "rule", "spmd/lowering/pool.py"),
        ("clone", "device", "spmd/device/_copy.py"),
        ("view", "view", "spmd/device/_aliases.py"),
        ("transpose.int", "view", ""),
        ("chunk", "view", ""),
        ("kron", "composite", ""),
        ("isin.Tensor_Tensor", "decomposition", "torch/_decomp/decompositions.py"),
    ],
)
def test_each_way_is_told_with_its_file(name: str, how: str, where: str) -> None:
    assert BY_NAME[name].how == how
    assert BY_NAME[name].where.rpartition(":")[0] == where


def test_rule_lines_define_or_register_the_rule() -> None:
    wrong = []
    for operator in ALL:
        if operator.how == "rule":
            file, _, number = operator.where.rpartition(":")
            line = (ROOT / file).read_text(encoding="utf-8").splitlines()[int(number) - 1]
            packet = operator.name.partition(".")[0]
            if not re.search(rf"@?\blower\(|\bdef \w+\(|\blambda\b|\b{packet}\b", line):
                wrong.append(f"{operator.where}: {line}")
    assert not wrong


def test_in_place_and_out_forms_are_counted_with_the_functional_one() -> None:
    assert set(BY_NAME["add.Tensor"].variants) == {"add.out", "add_.Tensor"}
    assert not {variant for operator in ALL for variant in operator.variants} & set(BY_NAME)


def test_backwards_and_operators_out_of_scope_are_left_out() -> None:
    assert not [name for name in BY_NAME if "backward" in name or "sparse" in name or "quantized" in name]
    assert {"quantile", "tril_indices", "linalg_solve", "max_pool3d_with_indices"} <= set(BY_NAME)
    assert set(ops.left_out()) <= {*ops.OUT_OF_SCOPE, "named dims and raw storages"}


def test_counts_add_up() -> None:
    counts = ops.counts(ALL)
    assert tuple(counts) == get_args(ops.How) == tuple(ops.MEANING)
    assert sum(count for count, _ in counts.values()) == len(ALL)


def test_what_the_table_calls_unsupported_raises() -> None:
    assert BY_NAME["_dirichlet_grad"].how == "unsupported"
    with pytest.raises(UnsupportedOpError, match="_dirichlet_grad"):
        torch._dirichlet_grad(*(torch.ones(3, device="jax"),) * 3)


def test_command_prints_overloads_that_match_and_a_summary(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["ops", "^add.Tensor$"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    assert re.search(r"add\.Tensor +rule +spmd/lowering/pointwise\.py:\d+ +add\.out", shown)
    assert re.search(r"total +1 +2", shown)


@pytest.mark.parametrize(("pattern", "text"), [("no_such_operator", "no operator name matches"), ("(", "is not a regular expression")])
def test_command_fails_when_nothing_is_found(pattern: str, text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["ops", pattern])
    assert ended.value.code == 2
    assert text in capsys.readouterr().err


def test_command_writes_the_page(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["ops", "--markdown"])
    assert capsys.readouterr().out == ops.markdown(ALL)


@pytest.mark.parametrize(
    ("name", "mechanism"),
    [
        ("clone", "device"),
        ("view", "view"),
        ("_linalg_det", "strides"),
        ("zeros", "filled"),
        ("matmul", "whole"),
        ("add.Tensor", "rule"),
        ("transpose.int", "composite"),
        ("isin.Tensor_Tensor", "decomposition"),
    ],
)
def test_the_mechanism_that_serves_it_is_printed(name: str, mechanism: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert BY_NAME[name].mechanism == mechanism in ops.MECHANISMS
    with pytest.raises(SystemExit):
        cli.main(["ops", f"^{re.escape(name)}$"])
    assert re.search(rf"^ *{mechanism} +{re.escape(name)} ", capsys.readouterr().out, re.MULTILINE)
