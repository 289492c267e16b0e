"""What a compiled function prints, logs and writes with numbers of the device: by every call, as Python does."""

import contextlib
import csv
import io
import json
import logging
import os
import pathlib
import pprint
import sys
import types
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from tqdm import tqdm

import spmd

logger = logging.getLogger("tests.pending")
INPUTS = ([0.25, -1.3, 2.0], [3.75, 1.1, -0.5], [-0.125, 0.5, 0.7])


class Config:
    def __init__(self) -> None:
        self.shown = 0

    def __str__(self) -> str:
        return "a config"


class Meter:
    value = 0.0

    def __repr__(self) -> str:
        return f"<{self.value:.2f}>"


def among_others(s: Any, x: Any) -> None:
    print("begin", x.shape)
    print(x.max().item())
    print("between")
    print(round(x.max().item(), 1), end=";")
    print("end")


def a_counter(s: Any, x: Any) -> None:
    s.steps += 1
    print("step", s.steps, x.max().item())
    print(f"step {s.steps}: {x.max().item():.2f}")


def in_a_function(text: str) -> None:
    logger.warning(text, stacklevel=2)


def logged(s: Any, x: Any) -> None:
    logger.info("loss %.4f of %s", x.max().item(), "a")
    logger.info("static")
    logger.debug("not shown %s", x.max().item())


def written_anew(s: Any, x: Any) -> None:
    with open(s.path, "w") as file:
        file.write("header\n")
        file.write(f"{x.max().item():.3f}\n")
        print("more", x.argmax().item(), file=file)


def appended(s: Any, x: Any) -> int:
    with open(s.path, "a", encoding="latin-1") as file:
        return file.write(f"é {x.max().item():.3f}\n")


def appended_twice(s: Any, x: Any) -> None:
    for name in ("a", "b"):
        with open(s.path, "a") as file:
            json.dump({name: x.max().item()}, file)
            file.write("\n")


def rows_appended(s: Any, x: Any) -> None:
    with open(s.path, "a", newline="") as file:
        rows = csv.writer(file, delimiter=";", lineterminator="\n")
        rows.writerow(["é", x.max().item()])
        rows.writerows([[1, "a b"], [round(x[0].item(), 2), None]])
        csv.DictWriter(file, ["a", "b"], restval="-").writerow({"a": x.argmax().item()})


def rows_of_the_host(s: Any, x: Any) -> None:
    s.steps += 1
    with open(s.path, "w", newline="") as file:
        rows = csv.DictWriter(file, ["step", "half"], dialect="unix")
        rows.writeheader()
        rows.writerow({"step": s.steps, "half": s.steps * 0.5})


def with_newlines(s: Any, x: Any) -> None:
    for newline in ("\r\n", "\r", "\n", "", None):
        with open(s.path, "a", newline=newline) as file:
            file.write(f"a\n{x.max().item():.3f}\r\n")


def redirected(s: Any, x: Any) -> None:
    with contextlib.redirect_stdout(sys.stderr):
        print(x.max().item())


def in_order(s: Any, x: Any) -> None:
    print("a", x.max().item())
    sys.stderr.write("b")
    logger.info("c")
    print("d", file=sys.stderr)
    s.log.append(round(x.max().item(), 1))
    print(s.log[-1], f"{s.log[-1]:>8}")


OUTPUTS: dict[str, Callable[[Any, Any], Any]] = {
    "print": lambda s, x: print("loss", x.max().item(), x.argmax().item(), sep="|"),
    "f-string": lambda s, x: print(f"loss {x.max().item():.4f}", flush=True),
    "object": lambda s, x: print(s.config, [1, x[0].item()], {"a": round(x[1].item(), 1)}),
    "object with a number": lambda s, x: (setattr(s.meter, "value", x.max().item()), print("m", s.meter, sep="="))[1],
    "among others": among_others,
    "counter": a_counter,
    "logger": logged,
    "logger with an object": lambda s, x: logger.info("%s %.1f", s.config, x.max().item()),
    "logger in a function": lambda s, x: in_a_function(f"loss {x.max().item():.2f}"),
    "module of loggers": lambda s, x: logging.warning(f"loss {x.max().item():.2f}"),
    "warning": lambda s, x: warnings.warn(f"loss {x.max().item():.1f}", stacklevel=1),
    "standard output": lambda s, x: sys.stdout.write(f"{x.max().item():.3f}\n"),
    "pprint": lambda s, x: pprint.pprint({"loss": x.max().item()}),
    "open file": lambda s, x: (s.file.write(f"{x.max().item():.3f}\n"), s.file.flush())[0],
    "file that is opened": written_anew,
    "file that is appended to": appended,
    "file that is opened twice": appended_twice,
    "rows in a file that is opened": rows_appended,
    "rows of the host in one": rows_of_the_host,
    "newlines of a file that is opened": with_newlines,
    "path": lambda s, x: pathlib.Path(s.path).write_text(f"{x.max().item():.3f}"),
    "csv": lambda s, x: (s.rows.writerow([x.max().item(), round(x[0].item(), 2), "a"]), None)[1],
    "csv of dicts": lambda s, x: (s.dicts.writerow({"a": x.max().item(), "b": 1}), None)[1],
    "progress bar": lambda s, x: (s.bar.set_postfix(loss=round(x.max().item(), 3)), s.bar.update(1))[0],
    "redirected": redirected,
    "in order": in_order,
}


@pytest.fixture
def shown(tmp_path: pathlib.Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Callable[..., Any]]:
    """Runs a function over the inputs, and returns all that it has written, with the number of traces."""
    handler = logging.Handler()
    formatter = logging.Formatter("%(levelname)s %(filename)s:%(lineno)d %(funcName)s %(message)s")
    handler.emit = lambda record: print(formatter.format(record)) if "test_" in record.filename else None
    logger.addHandler(handler)
    logging.getLogger().addHandler(handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False

    def run(fn: Callable[[Any, Any], Any], device: str) -> Any:
        drawn: Any = io.StringIO()
        path, other = tmp_path / "opened", tmp_path / "other"
        path.unlink(missing_ok=True)
        with open(other, "w") as file, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            bar: Any = tqdm(total=3, file=drawn, mininterval=0, ncols=60, bar_format="{n}/{total}{postfix}")
            s = types.SimpleNamespace(steps=0, log=[], config=Config(), meter=Meter(), path=path, file=file, bar=bar)
            s.rows, s.dicts = csv.writer(file), csv.DictWriter(file, ["a", "b"])
            step: Any = (lambda x: fn(s, x)) if device == "cpu" else spmd.compile(lambda x: fn(s, x))
            results = [step(torch.tensor(values).to(device)) for values in INPUTS]
            bar.close()
            warned = [(str(w.message), pathlib.Path(w.filename).name, w.lineno, w.category) for w in caught]
        written = path.read_bytes() if path.exists() else b"", other.read_text(), drawn.getvalue()
        return (results, capsys.readouterr(), warned, written), None if device == "cpu" else step.num_traces

    yield run
    logger.removeHandler(handler)
    logging.getLogger().removeHandler(handler)


@pytest.mark.parametrize("name", OUTPUTS)
def test_every_call_writes_what_python_writes(name: str, shown: Callable[..., Any]) -> None:
    expected, _ = shown(OUTPUTS[name], "cpu")
    found, num_traces = shown(OUTPUTS[name], "jax")
    assert found == expected
    assert num_traces <= 2


def test_output_goes_to_the_standard_output_of_each_call(capsys: pytest.CaptureFixture[str]) -> None:
    step = spmd.compile(lambda x: print(x.max().item()))
    step(torch.ones(2).to("jax"))
    with contextlib.redirect_stdout(io.StringIO()) as other:
        step(torch.full((2,), 2.0).to("jax"))
    step(torch.full((2,), 3.0).to("jax"))
    assert capsys.readouterr().out == "1.0\n3.0\n" and other.getvalue() == "2.0\n"
    assert step.num_traces == 1


def test_output_before_one_of_the_device_is_written_once_by_the_first_call(capsys: pytest.CaptureFixture[str]) -> None:
    def fn(x: Any) -> None:
        print("first")
        print(x.max().item())

    step = spmd.compile(fn)
    step.prepare(torch.ones(2).to("jax"))
    for value in (1.0, 2.0):
        step(torch.full((2,), value).to("jax"))
    assert capsys.readouterr().out == "first\n1.0\nfirst\n2.0\n"


def test_an_error_of_output_is_raised_when_the_call_ends(tmp_path: pathlib.Path) -> None:
    with open(tmp_path / "closed", "w") as file:
        step = spmd.compile(lambda x: (file.write(f"{x.max().item()}"), None)[1])
        step(torch.ones(2).to("jax"))
    with pytest.raises(ValueError, match="closed file"):
        step(torch.ones(2).to("jax"))


def in_a_branch(x: Any) -> Any:
    def printed(x: Any) -> Any:
        print(x.max().item())
        return x + 1

    return torch.cond(x.sum() > 0, printed, lambda x: x - 1, (x,))


def in_memory(x: Any) -> str:
    file = io.StringIO()
    file.write("a")
    print(x.max().item(), file=file)
    return file.getvalue()


def redirected_and_read(x: Any) -> str:
    with contextlib.redirect_stdout(io.StringIO()) as file:
        print(x.max().item())
    return file.getvalue()


def logged_to(file: io.StringIO) -> logging.Logger:
    logger = logging.Logger("a")
    logger.addHandler(logging.StreamHandler(file))
    return logger


def logged_and_read(x: Any) -> str:
    file = io.StringIO()
    logged_to(file).info("%.2f", x.max().item())
    return file.getvalue()


def rows_and_read(x: Any) -> str:
    file = io.StringIO()
    csv.writer(file).writerow([x.max().item()])
    return file.getvalue()


def logged_and_written(x: Any) -> None:
    FILE.write("loss")
    LOGGER.info("%.2f", x.max().item())
    FILE.write("end")


FILE = io.StringIO()
LOGGER = logged_to(FILE)
REFUSED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "body": (in_a_branch, "in the body of a branch or loop"),
    "file in memory": (in_memory, "to a file in memory"),
    "lines": (lambda x: FILE.writelines([f"{x.max().item():.2f}"]), "to a file in memory"),
    "logged to one": (logged_and_read, "to a file in memory"),
    "logged between": (logged_and_written, "to a file in memory"),
    "rows to one": (rows_and_read, "to a file in memory"),
    "redirected to one": (redirected_and_read, "to a file in memory"),
    "object in json": (lambda x: json.dump([x.max().item(), Config()], sys.stdout), "may change"),
    "tensor": (lambda x: print(x, x.max().item()), "a tensor of the traced program"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_output_that_no_call_can_repeat_is_refused(name: str) -> None:
    fn, what = REFUSED[name]
    with pytest.raises(spmd.TraceError, match=what) as raised:
        spmd.compile(fn)(torch.ones(2).to("jax"))
    assert "fix: " in str(raised.value)


def told(s: Any, file: Any, x: Any) -> None:
    file.write(f"{x.max().item():.3f}")
    s.position = file.tell()


def told_before(s: Any, file: Any, x: Any) -> None:
    s.position = file.tell()
    csv.writer(file).writerow([x.max().item()])


def sought(s: Any, file: Any, x: Any) -> None:
    file.seek(2)
    print(x.max().item(), file=file)


def truncated(s: Any, file: Any, x: Any) -> None:
    file.truncate(0)
    logged_to(file).info("%s", x.max().item())


@pytest.mark.parametrize("is_opened", [False, True])
@pytest.mark.parametrize("use", [told, told_before, sought, truncated])
def test_the_position_in_a_file_that_is_written_when_the_call_ends_is_refused(use: Any, is_opened: bool, tmp_path: pathlib.Path) -> None:
    state, path = types.SimpleNamespace(position=0), tmp_path / "losses.txt"

    def step(x: Any) -> None:
        with open(path, "a") as opened:
            use(state, opened if is_opened else file, x)

    with open(path, "a") as file, pytest.raises(spmd.TraceError, match="the position in a file is asked for or set") as raised:
        spmd.compile(step)(torch.ones(2).to("jax"))
    assert "fix: " in str(raised.value) and state.position == 0


@pytest.mark.parametrize("mode", ["a", "w"])
@pytest.mark.parametrize("is_opened", [False, True])
def test_the_position_after_a_number_of_the_host_is_that_of_python(mode: str, is_opened: bool, tmp_path: pathlib.Path) -> None:
    found = []
    for device in ("cpu", "jax"):
        state, path = types.SimpleNamespace(n=0, position=0), tmp_path / f"{device}.txt"
        with open(tmp_path / f"{device}_other.txt", mode) as outer:

            def step(x: Any, state: Any = state, path: Any = path, outer: Any = outer) -> Any:
                state.n += 1
                with open(path, mode) as opened:
                    file = opened if is_opened else outer
                    file.write(f"{state.n * 50}\n")
                    state.position = file.tell()
                return x * state.n

            run: Any = step if device == "cpu" else spmd.compile(step)
            found.append([(run(torch.ones(1).to(device)).tolist(), state.position, path.read_text()) for _ in range(5)])
    assert found[1] == found[0]


def printed_to(path: pathlib.Path, file: Any, x: Any) -> None:
    print(x.max().item(), file=file)


def logged_to_it(path: pathlib.Path, file: Any, x: Any) -> None:
    logged_to(file).info("%.2f", x.max().item())


def row_of_it(path: pathlib.Path, file: Any, x: Any) -> None:
    csv.writer(file).writerow([x.max().item()])


def dict_row_of_it(path: pathlib.Path, file: Any, x: Any) -> None:
    csv.DictWriter(file, ["loss"]).writerow({"loss": x.max().item()})


def text_of_it(path: pathlib.Path, file: Any, x: Any) -> None:
    path.write_text(f"{x.max().item():.2f}")


def contents(path: pathlib.Path) -> bytes:
    with open(path, "rb") as file:
        return file.read()


@pytest.mark.parametrize("read", [lambda path: path.read_text(), contents, lambda path: path.stat().st_size, os.path.getsize])
@pytest.mark.parametrize("write", [printed_to, logged_to_it, row_of_it, dict_row_of_it, text_of_it])
def test_a_file_that_is_written_when_the_call_ends_is_not_read_before(write: Any, read: Any, tmp_path: pathlib.Path) -> None:
    path, other = tmp_path / "losses.txt", tmp_path / "other.txt"
    other.write_text("others")
    with open(path, "a") as file:
        with pytest.raises(spmd.TraceError, match=r"losses\.txt' is read after .* of a number of the device"):
            spmd.compile(lambda x: (write(path, file, x), read(path)))(torch.ones(2).to("jax"))
        assert path.read_text() == ""
        step = spmd.compile(lambda x: (write(path, file, x), read(other))[1])
        assert step(torch.ones(2).to("jax")) == read(other)


def test_several_steps_per_call_are_refused() -> None:
    step = spmd.compile(lambda x: (print(x.sum().item()), x * 2)[1], steps_per_call=2)
    with pytest.raises(spmd.TraceError, match="steps_per_call"):
        step(torch.ones(2, 3).to("jax"))
