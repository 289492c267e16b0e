"""What modules see, and are seen to do, while a compiled function is traced."""

import pytest
import torch
import torch.nn as nn

import spmd


class Careful(nn.Module):
    """Looks at values unless it is being compiled, as transformers does with masks."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling() and bool((x > 0).all()):
            return x
        return torch.where((x > 0).all(), x, x * self.weight)


def test_a_module_that_asks_whether_it_is_compiled_does_not_look_at_values() -> None:
    model = Careful().to("jax")
    step = spmd.compile(lambda x: model(x))
    x = torch.tensor([1.0, -2.0, 3.0])
    torch.testing.assert_close(step(x.to("jax")).detach().cpu(), x)
    assert not torch.compiler.is_compiling()


def test_the_answer_is_as_before_after_a_module_that_raises() -> None:
    class Raises(Careful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError("not here")

    model = Raises().to("jax")
    with pytest.raises(KeyError, match="not here"):
        spmd.compile(lambda x: model(x))(torch.ones(3, device="jax"))
    assert not torch.compiler.is_compiling()


def test_a_module_that_raises_inside_another_leaves_no_name_behind() -> None:
    class Falls(Careful):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            raise KeyError

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = Falls(), nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            try:
                return self.first(x)
            except KeyError:
                return self.second(x)

    model = Outer().to("jax")
    step = spmd.compile(lambda x: model(x))
    step(torch.ones(3, device="jax"))
    assert "second" in step.hlo() and "first/second" not in step.hlo()
