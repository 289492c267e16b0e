"""Every Python block of the pages in docs/ runs as it stands after the page's preamble, and prints what the page shows.

Other tests run those of checkpoints, extending, migration and recipes. Blocks of `FRAGMENTS` go into a reader's own script.
"""

import contextlib
import io
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from mesh.launch._emit import emit
from mesh.launch._launch_options import parse

DOCS = Path(__file__).parents[1] / "docs"
FRAGMENTS = {"ecosystem.md", "generation.md", "reliability.md", "training.md"}
ELSEWHERE = {"checkpoints.md", "extending.md", "migration.md", "recipes.md"}
PAGES = sorted(
    page.name for page in DOCS.glob("*.md") if page.name not in FRAGMENTS | ELSEWHERE and "```python" in page.read_text(encoding="utf-8")
)
BLOCK = re.compile(r"```python\n(.*?)```(?:\n+```text\n(.*?)```)?", re.DOTALL)


def snippets() -> list[Any]:
    """(preamble, code, what it prints) of each block, named after its page and the heading above it."""
    found: list[Any] = []
    for page in PAGES:
        text = (DOCS / page).read_text(encoding="utf-8")
        preamble = re.search(r"```python preamble\n(.*?)```", text, re.DOTALL)
        for match in BLOCK.finditer(text):
            heading = re.findall(r"^#+ (.*)$", text[: match.start()], re.MULTILINE)[-1]
            line = text.count("\n", 0, match.start()) + 1
            marks = [pytest.mark.slow] if "topology=" in match[1] or "transformers" in match[1] else []  # ten seconds of a compiler
            found.append(pytest.param(preamble[1] if preamble else "", match[1], match[2], id=f"{page}:{line} {heading}", marks=marks))
    return found


@pytest.mark.multidevice(num=8)
@pytest.mark.filterwarnings("ignore::mesh.AcceleratorIdle")
@pytest.mark.parametrize(("preamble", "code", "printed"), snippets())
def test_a_snippet_runs_and_prints_what_the_page_shows(
    preamble: str, code: str, printed: str | None, num_devices: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if num_devices != 8:
        pytest.skip("the pages' meshes have 8 devices")
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, Any] = {"__name__": "snippet"}
    exec(compile(preamble, "preamble", "exec"), namespace)
    with contextlib.redirect_stdout(io.StringIO()) as out:
        exec(compile(code, "snippet", "exec"), namespace)
    if printed is not None:
        assert out.getvalue().rstrip() == printed.rstrip()


EMITTED = re.compile(r"```sh\nspmd launch (--emit [^\n]*)\n```\n\n`([^`]*)`:\n\n```\w+\n(.*?)```", re.DOTALL)


@pytest.mark.parametrize(("line", "name", "text"), EMITTED.findall((DOCS / "quickstart.md").read_text(encoding="utf-8")))
def test_a_file_for_a_scheduler_is_what_the_command_writes(line: str, name: str, text: str, tmp_path: Path) -> None:
    (path,) = emit(parse(["--out", str(tmp_path), *shlex.split(line)], "spmd launch", ()))
    assert path.name == name
    assert path.read_text(encoding="utf-8") == text


def test_every_kind_of_file_is_shown() -> None:
    assert len(EMITTED.findall((DOCS / "quickstart.md").read_text(encoding="utf-8"))) == 4


def test_every_page_is_linked_from_the_readme_or_from_a_page_that_is() -> None:
    def linked(path: Path) -> set[str]:
        return set(re.findall(r"\]\((?:docs/|\.\./docs/)?(\w+\.md)[#)]", path.read_text(encoding="utf-8")))

    first = linked(DOCS.parent / "README.md")
    found = first.union(*(linked(DOCS / name) for name in first if (DOCS / name).exists()))
    pages = {page.name for page in DOCS.glob("*.md")} - {"index.md"}  # the site's first page, which is the README
    assert sorted(pages - found) == []
