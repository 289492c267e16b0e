"""`make site`: every page is in the site's contents, and what is built asks nothing of the network."""

import ast
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from docs.site import error_index, gallery

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SPHINX = ROOT / ".venv-site"


def test_every_page_is_in_the_contents() -> None:
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.DOTALL)
    listed = [line for block in blocks for line in block.split("\n\n", 1)[1].splitlines() if line]
    made = ["_generated/errors", "_generated/first_day"]  # by docs/site/conf.py
    assert sorted(listed) == sorted([*made, *(page.stem for page in DOCS.glob("*.md") if page.stem != "index")])


def test_every_message_of_the_source_is_in_the_index_with_a_page() -> None:
    entries = error_index.entries()
    calls = [
        node
        for folder in ("mesh", "spmd")
        for path in (ROOT / folder).rglob("*.py")
        if "message(" in (text := path.read_text(encoding="utf-8"))
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", getattr(node.func, "attr", None)) == "message"
    ]
    assert len(entries) == len(calls) > 400
    page = error_index.markdown()
    for entry in entries:
        assert (DOCS / f"{entry.page}.md").is_file(), f"{entry.source}: name its page in docs/site/error_index.py"
        assert f"| {error_index._cell(entry.words)} " in page
    # A text that is made elsewhere is a dot in the index: nobody finds it there.
    assert sum(not any(letter.isalpha() for letter in entry.words) for entry in entries) < 12


@pytest.mark.parametrize(
    ("words", "page", "error"),
    [
        ("[data] paths: … names no file", "recipes", "RecipeError"),
        ("no Megatron rules are known for …", "sharding", "SpmdError"),
        ("the environment has no …", "reliability", "JobError"),
    ],
)
def test_a_message_is_found_by_its_words(words: str, page: str, error: str) -> None:
    assert [(entry.page, entry.error) for entry in error_index.entries() if entry.words == words] == [(page, error)]


@pytest.mark.multidevice(num=8)
def test_the_gallery_shows_what_its_code_draws(num_devices: int) -> None:
    if num_devices != 8:
        pytest.skip("the page's meshes have 8 devices")
    shown = gallery.pictures()
    assert sorted(path for _, path in shown) == sorted(f"images/gallery/{path.name}" for path in (DOCS / "images" / "gallery").iterdir())
    namespace: dict[str, Any] = {"__name__": "gallery"}
    exec(gallery.preamble(), namespace)
    for code, path in shown:
        assert (DOCS / path).read_text(encoding="utf-8") == gallery.drawn(code, namespace), (
            f"python docs/site/gallery.py writes {path} anew"
        )


@pytest.mark.slow
@pytest.mark.skipif(not SPHINX.is_dir(), reason="Sphinx lies in a folder of its own: make site")
def test_the_site_builds_without_a_warning_and_needs_no_network(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "-c", str(DOCS / "site"), str(DOCS), str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join([str(SPHINX), str(ROOT)]), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for page in tmp_path.glob("*.html"):
        text = page.read_text(encoding="utf-8")
        assert not re.findall(r'<(?:script|img|iframe)[^>]* src="(?:https?:)?//', text), page.name
        assert not re.findall(r'<link[^>]*rel="stylesheet"[^>]*href="(?:https?:)?//', text), page.name
    reference = (tmp_path / "reference.html").read_text(encoding="utf-8")
    assert "max_retraces" in reference and "progress_after_s" in reference
