"""Cases of the process: output, settings, meshes, options of a step, steps in steps. See `stored_harness`."""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import io
import locale
import logging
import os
import sys
import tempfile
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mesh
import spmd
from tests.program.stored_harness import Values, calls, case, inputs, train, trained

log = logging.getLogger("stored_process_cases")
TOTAL = 0.0
ITEMS: list[Any] = []


def mlp(device: str) -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)


class Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.kept: list[Any] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append((record.getMessage(), record.levelname, getattr(record, "user", None), bool(record.exc_info)))


@contextlib.contextmanager
def logged(level: int = logging.NOTSET) -> Any:
    handler = Kept()
    log.addHandler(handler)
    log.setLevel(level)
    try:
        yield handler.kept
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)


def _with_output(device: str, wrap: Any, write: Any, redirect: Any) -> Values:
    def step(x: torch.Tensor) -> torch.Tensor:
        write("a line")
        return x + 1

    with redirect(io.StringIO()) as shown:
        found = calls(wrap(step), device, 1)
    return [*found, shown.getvalue()]


def _write_error(text: str) -> None:
    sys.stderr.write(text)


@case
def printed_text(device: str, wrap: Any, changed: bool) -> Values:
    return _with_output(device, wrap, print, contextlib.redirect_stdout)


@case
def text_written_to_stderr(device: str, wrap: Any, changed: bool) -> Values:
    return _with_output(device, wrap, _write_error, contextlib.redirect_stderr)


@case
def a_file_that_is_written(device: str, wrap: Any, changed: bool) -> Values:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "log.txt"

        def step(x: torch.Tensor) -> torch.Tensor:
            with open(os.path.join(LOG_FOLDER[0], "log.txt"), "a") as file:
                file.write("a line\n")
            return x + 1

        LOG_FOLDER[:] = [folder]
        return [*calls(wrap(step), device, 1), path.read_text()]


LOG_FOLDER = [""]


@case
def a_record_with_more(device: str, wrap: Any, changed: bool) -> Values:
    def step(x: torch.Tensor) -> torch.Tensor:
        log.warning("a %s", "line", extra={"user": "me"})
        return x + 1

    with logged() as kept:
        return [*calls(wrap(step), device, 1), kept]


@case
def the_level_of_a_logger(device: str, wrap: Any, changed: bool) -> Values:
    def step(x: torch.Tensor) -> torch.Tensor:
        log.info("a line")
        return x + 1

    with logged(logging.INFO if changed else logging.WARNING) as kept:
        return [*calls(wrap(step), device, 1), kept]


@case
def the_filters_of_warnings(device: str, wrap: Any, changed: bool) -> Values:
    def step(x: torch.Tensor) -> torch.Tensor:
        return functional.softmax(x)  # warns of the missing dim

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always" if changed else "ignore")
        found = calls(wrap(step), device, 1)
    return [*found, sum("Implicit" in str(w.message) for w in shown)]


@case
def a_warning_of_the_user(device: str, wrap: Any, changed: bool) -> Values:
    def step(x: torch.Tensor) -> torch.Tensor:
        warnings.warn("be careful", DeprecationWarning, stacklevel=2)
        return x + 1

    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter("always")
        found = calls(wrap(step), device, 1)
    return [*found, [str(w.message) for w in shown if w.category is DeprecationWarning]]


@case
def arguments_of_the_process(device: str, wrap: Any, changed: bool) -> Values:
    before = sys.argv
    sys.argv = ["script", "3" if changed else "2"]
    try:
        return calls(wrap(lambda x: x * int(sys.argv[1])), device)
    finally:
        sys.argv = before


@case
def the_working_folder(device: str, wrap: Any, changed: bool) -> Values:
    before = os.getcwd()
    os.chdir("/tmp" if changed else "/")
    try:
        return calls(wrap(lambda x: x * len(os.getcwd())), device)
    finally:
        os.chdir(before)


@case
def a_file_that_is_read(device: str, wrap: Any, changed: bool) -> Values:
    path = Path(tempfile.gettempdir()) / "stored_cases_scale.txt"
    path.write_text("3.0" if changed else "2.0")
    return calls(wrap(lambda x: x * float(path.read_text())), device)


@case
def the_locale(device: str, wrap: Any, changed: bool) -> Values:
    before = locale.setlocale(locale.LC_ALL)
    locale.setlocale(locale.LC_ALL, "C.UTF-8" if changed else "C")
    try:
        return calls(wrap(lambda x: x * len(locale.setlocale(locale.LC_CTYPE))), device)
    finally:
        locale.setlocale(locale.LC_ALL, before)


@case
def deterministic_algorithms(device: str, wrap: Any, changed: bool) -> Values:
    torch.use_deterministic_algorithms(changed)
    try:
        return calls(wrap(lambda x: x * (3 if torch.are_deterministic_algorithms_enabled() else 2)), device)
    finally:
        torch.use_deterministic_algorithms(False)


@case
def a_default_device(device: str, wrap: Any, changed: bool) -> Values:
    compiled = wrap(lambda x: x + torch.ones(4, device=None if changed else x.device).to(x.device))
    with torch.device(device) if changed else contextlib.nullcontext():
        return calls(compiled, device)


@case
def inference_mode(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    compiled = wrap(lambda x: model(x) * (3 if torch.is_inference_mode_enabled() else 2))
    with torch.inference_mode(changed):
        return [v.detach().clone() for v in calls(compiled, device)]


@case
def a_mode_of_the_user(device: str, wrap: Any, changed: bool) -> Values:
    class Twice(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            found = func(*args, **(kwargs or {}))
            return found * (3 if changed else 2) if func is torch.sin else found

    compiled = wrap(lambda x: torch.sin(x))
    with Twice():
        return calls(compiled, device)


def _marked(wrap: Any, device: str, changed: bool, grid: Any, *specs: Any) -> Values:
    model = mlp(device)
    if device == "jax":
        over = grid()
        for tensor, spec in zip((model[0].weight, model[2].weight), specs, strict=True):
            spmd.mark_sharding(tensor, over, spec)
    made: list[Any] = []

    def wrapped(fn: Any) -> Any:
        made.append(wrap(fn))
        return made[-1]

    found = trained(model, torch.optim.SGD(model.parameters(), lr=0.1), wrapped, device, 2)
    if device == "jax":
        assert made[0].mesh == grid()
    return found


@case
def the_shape_of_a_mesh(device: str, wrap: Any, changed: bool) -> Values:
    shape = (2, 4) if changed else (4, 2)
    return _marked(wrap, device, changed, lambda: mesh.Mesh(range(8), shape, ("a", "b")), ("a", None), (None, "b"))


@case
def the_spec_of_a_parameter(device: str, wrap: Any, changed: bool) -> Values:
    spec = (None, "a") if changed else ("a", None)
    return _marked(wrap, device, changed, lambda: mesh.Mesh(range(8), (2, 4), ("a", "b")), spec, (None, "b"))


@case
def the_order_of_devices(device: str, wrap: Any, changed: bool) -> Values:
    order = [*range(8)][:: -1 if changed else 1]
    return _marked(wrap, device, changed, lambda: mesh.Mesh(order, (2, 4), ("a", "b")), ("a", None), (None, "b"))


@case
def the_names_of_axes(device: str, wrap: Any, changed: bool) -> Values:
    names = ("x", "y") if changed else ("a", "b")
    return _marked(wrap, device, changed, lambda: mesh.Mesh(range(8), (2, 4), names), (names[0], None), (None, names[1]))


@case
def a_constraint_in_the_step(device: str, wrap: Any, changed: bool) -> Values:
    grid = mesh.Mesh(range(8), (2, 4), ("a", "b"))
    spec = (None, "b") if changed else (None, "a")

    def step(x: torch.Tensor) -> torch.Tensor:
        y = x * 2
        if y.device.type == "jax":
            y = spmd.constrain(y, grid, spec) if hasattr(spmd, "constrain") else y
        return y + 1

    return calls(wrap(step), device)


@case
def a_marked_argument(device: str, wrap: Any, changed: bool) -> Values:
    x = inputs(device)
    if device == "jax":
        spmd.mark_sharding(x, mesh.Mesh(range(8), (2, 4), ("a", "b")), (None, "a" if changed else "b"))
    compiled = wrap(lambda x: x * 2)
    return [compiled(x) for _ in range(2)]


@case
def several_steps_in_a_call(device: str, wrap: Any, changed: bool) -> Values:
    model, count = mlp(device), 3 if changed else 2
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)

    def step(x: torch.Tensor) -> torch.Tensor:
        return train(model, optimizer, x)

    stacked = torch.stack([inputs(device) + i for i in range(count)])
    if device == "cpu":
        found = torch.stack([step(x) for x in stacked])
    else:
        found = wrap(step, steps_per_call=count)(stacked)
    return [found, *(p.detach() for p in model.parameters())]


@case
def checked_indices(device: str, wrap: Any, changed: bool) -> Values:
    table = torch.arange(12.0).reshape(6, 2).to(device)

    def step(i: torch.Tensor) -> torch.Tensor:
        return table[i]

    compiled = wrap(step, check_indices=changed)
    return [compiled(torch.tensor([0, 5, 2]).to(device)) for _ in range(2)]


@case
def checked_results(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    return [v.detach() for v in calls(wrap(lambda x: model(x), debug_nans=changed), device)]


@case
def an_exception(device: str, wrap: Any, changed: bool) -> Values:
    limit = 1.0 if changed else 100.0

    def step(x: torch.Tensor) -> torch.Tensor:
        if limit < 10:
            raise ValueError("too low")
        return x * limit

    try:
        return calls(wrap(step), device)
    except ValueError as error:
        return [str(error)]


@case
def a_step_in_a_step(device: str, wrap: Any, changed: bool) -> Values:
    scale = 3.0 if changed else 2.0
    inner = wrap(lambda x: x * scale)
    outer = wrap(lambda x: inner(x) + 1)
    return [*calls(outer, device), *calls(inner, device)]


@case
def a_method_as_the_function(device: str, wrap: Any, changed: bool) -> Values:
    class Model:
        def __init__(self, scale: float) -> None:
            self.scale = scale

        def step(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    return calls(wrap(Model(3.0 if changed else 2.0).step), device)


class Trainer:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def step(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


@case
def a_method_of_a_class_of_the_module(device: str, wrap: Any, changed: bool) -> Values:
    return calls(wrap(Trainer(3.0 if changed else 2.0).step), device)


@case
def a_module_as_the_function(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    if changed:
        model[1] = nn.ReLU()
    return [v.detach() for v in calls(wrap(model), device)]


@case
def the_same_class_of_module_twice(device: str, wrap: Any, changed: bool) -> Values:
    models = mlp(device), nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).to(device)
    return [v.detach() for model in models[:: -1 if changed else 1] for v in calls(wrap(model), device)]


@case
def traced_again_after_a_stored_trace(device: str, wrap: Any, changed: bool) -> Values:
    global TOTAL
    model = mlp(device)

    def step(x: torch.Tensor) -> torch.Tensor:
        return model(x).detach() * (TOTAL if TOTAL > 0 else 2 * TOTAL)

    compiled, x, found = wrap(step), inputs(device), []
    for total in (1.0, 2.0, 3.0, -1.0, 4.0):
        TOTAL = total
        found.append(compiled(x))
    model.train(False)
    return [*found, compiled(x)]


@case
def few_programs(device: str, wrap: Any, changed: bool) -> Values:
    compiled = wrap(lambda x, n: x * n, max_programs=1)
    return [compiled(inputs(device), n) for n in (2, 3, 2, 2.0, True, 1)]


class Mode(enum.Enum):
    LOW = 1
    HIGH = 2


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float
    mode: Mode
    names: list[str]


@case
def objects_as_arguments(device: str, wrap: Any, changed: bool) -> Values:
    def step(batch: Batch) -> Batch:
        scale = batch.scale if batch.mode is Mode.HIGH else 1.0
        return Batch(batch.x * scale + len(batch.names), batch.scale, batch.mode, batch.names)

    batch = Batch(inputs(device), 3.0 if changed else 2.0, Mode.HIGH, ["a"])
    found = [wrap(step)(batch) for _ in range(2)]
    return [part for b in found for part in (b.x, b.scale, b.mode, b.names)]


@case
def arguments_of_many_kinds(device: str, wrap: Any, changed: bool) -> Values:
    def step(x: torch.Tensor, *rest: Any, **named: Any) -> Any:
        total = x * named["scale"]
        for value in rest:
            total = total + (len(value) if isinstance(value, str) else 0 if value is None else value)
        return total, rest

    compiled = wrap(step)
    given = (1, 2.5, True, None, "abc") if changed else (2, 2.5, False, None, "ab")
    return [v for _ in range(2) for v in compiled(inputs(device), *given, scale=3)]


@case
def written_globals(device: str, wrap: Any, changed: bool) -> Values:
    global TOTAL
    TOTAL, ITEMS[:] = 5.0, []

    def step(x: torch.Tensor) -> torch.Tensor:
        global TOTAL
        TOTAL = 7.0 if changed else 6.0
        ITEMS.append(x.sum())
        ITEMS.append("done")
        return x + 1

    found = calls(wrap(step), device)
    return [*found, TOTAL, *ITEMS]


@case
def a_number_of_the_program(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    kept: dict[str, Any] = {}

    def step(x: torch.Tensor) -> dict[str, Any]:
        loss = model(x).detach().sum()
        kept["loss"] = loss
        return {"loss": loss, "rows": x.shape[0], "name": f"step {1 if changed else 2}"}

    found = wrap(step)(inputs(device))
    return [found["loss"], found["rows"], found["name"], kept["loss"]]


@case
def a_scaler(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    scaler = torch.amp.GradScaler(device, init_scale=4.0 if changed else 2.0, enabled=device == "jax")

    def step(x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(x) ** 2).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        return loss.detach()

    return [*calls(wrap(step), device, 3), *(p.detach() for p in model.parameters())]


@case
def many_hooks_of_python(device: str, wrap: Any, changed: bool) -> Values:
    model = mlp(device)
    return trained(model, torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5 if changed else 0.1), wrap, device)
