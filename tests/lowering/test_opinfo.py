"""Every operator that the device computes as torch's CPU does must go on doing so; `benchmarks.ops` finds which those are.

`benchmarks/results/ops.json` is the record. The quick slice runs one sample of each op's forward and one of its gradient in
float32; `-m slow` runs every recorded dtype, in-place and out= form with all samples.
"""

import json
from pathlib import Path

import pytest
import torch

from tests.lowering import opinfo

RECORD = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "ops.json"
RESULTS: dict[str, dict[str, dict[str, str]]] = json.loads(RECORD.read_text(encoding="utf-8"))
PASSING = [
    pytest.param(name, dtype, kind, id=f"{name}-{dtype}-{kind}")
    for name, by_dtype in sorted(RESULTS.items())
    for dtype, by_kind in by_dtype.items()
    for kind, result in by_kind.items()
    if result == "pass"
]
QUICK = {
    name: [kind for kind in ("forward", "grad") if by_dtype.get("float32", {}).get(kind) == "pass"]
    for name, by_dtype in sorted(RESULTS.items())
}


@pytest.mark.parametrize("name", [name for name, kinds in QUICK.items() if kinds])
def test_op_and_its_gradient_equal_cpu(name: str) -> None:
    found = {kind: opinfo.check(opinfo.by_name(name), torch.float32, kind, limit=1) for kind in QUICK[name]}
    assert found == dict.fromkeys(QUICK[name])


# Ops of whose error inputs some are refused for their values alone, which nobody knows here before the device computed them.
REFUSED_BY_VALUE = {
    "masked_fill": "a complex number with an imaginary part for integers",
}
WITH_ERRORS = [name for name in opinfo.names() if opinfo.has_error_inputs(opinfo.by_name(name))]


@pytest.mark.parametrize("name", [name for name in WITH_ERRORS if name not in REFUSED_BY_VALUE])
def test_op_refuses_what_cpu_refuses(name: str) -> None:
    assert opinfo.check(opinfo.by_name(name), torch.float32, "error") is None


@pytest.mark.parametrize("name", sorted(REFUSED_BY_VALUE))
def test_op_refuses_what_cpu_refuses_without_its_values(name: str) -> None:
    found = opinfo.check(opinfo.by_name(name), torch.float32, "error")
    assert isinstance(found, str) and "overflow" in found


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """The whole sweep is ten thousand cases, which take seconds to collect: only where they are asked for."""
    if "kind" in metafunc.fixturenames:
        metafunc.parametrize(("name", "dtype", "kind"), [] if metafunc.config.option.markexpr == "not slow" else PASSING)


@pytest.mark.slow
def test_op_equals_cpu_in_every_form(name: str, dtype: str, kind: str) -> None:
    assert opinfo.check(opinfo.by_name(name), getattr(torch, dtype), kind) is None


def test_record_names_ops_that_torch_has() -> None:
    assert set(RESULTS) <= set(opinfo.names())


@pytest.mark.parametrize(
    ("actual", "expected", "text"),
    [
        (torch.ones(2), torch.zeros(2), "not close"),
        (torch.ones(2), torch.ones(2, dtype=torch.float64), "dtype"),
        (torch.ones(1, 2), torch.ones(2), "shape"),
        ((torch.ones(2),), (torch.ones(2), torch.ones(2)), "1 results, expected 2"),
        (torch.tensor([torch.nan]), torch.tensor([1.0]), "not close"),
    ],
)
def test_oracle_sees_a_difference(actual: object, expected: object, text: str) -> None:
    with pytest.raises(AssertionError, match=text):
        opinfo.compare("add", actual, expected)


def test_oracle_ignores_values_of_random_ops_but_not_their_shape() -> None:
    opinfo.compare("randn_like", torch.ones(2), torch.zeros(2))
    with pytest.raises(AssertionError, match="expected"):
        opinfo.compare("randn_like", torch.ones(3), torch.zeros(2))


def test_mapped_keeps_strides_sharing_conj_and_requires_grad() -> None:
    base = torch.arange(12.0).reshape(3, 4)
    column, row = base[:, 1].detach().requires_grad_(), base[1]
    on_device = opinfo.mapped((column, row, torch.tensor([1 + 2j]).conj()), "jax")
    assert [t.device.type for t in on_device] == ["jax"] * 3
    assert on_device[0].stride() == column.stride() and on_device[0].requires_grad and not on_device[1].requires_grad
    on_device[1].zero_()
    torch.testing.assert_close(on_device[0].detach().cpu(), torch.tensor([1.0, 0.0, 9.0]))
    assert on_device[2].is_conj() and on_device[2].cpu().item() == 1 - 2j
