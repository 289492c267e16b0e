"""`make site`: every page is in the site's contents, and what is built asks nothing of the network."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
SPHINX = ROOT / ".venv-site"


def test_every_page_is_in_the_contents() -> None:
    blocks = re.findall(r"```\{toctree\}\n(.*?)```", (DOCS / "index.md").read_text(encoding="utf-8"), re.DOTALL)
    listed = [line for block in blocks for line in block.split("\n\n", 1)[1].splitlines() if line]
    assert sorted(listed) == sorted(page.stem for page in DOCS.glob("*.md") if page.stem != "index")


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
