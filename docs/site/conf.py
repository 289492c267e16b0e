"""Sphinx's settings: docs/ as offline HTML, `make site`."""

import os
import subprocess
import sys
from pathlib import Path

from spmd import __version__

_SITE = Path(__file__).resolve().parent
_GENERATED = _SITE.parent / "_generated"
_GENERATED.mkdir(exist_ok=True)
for _program, *_arguments in (  # in processes of their own: a notebook chooses its devices
    ("error_index.py", _GENERATED / "errors.md"),
    ("notebook_page.py", _SITE.parents[1] / "examples" / "first_day.ipynb", _GENERATED / "first_day.md"),
):
    subprocess.run([sys.executable, _SITE / _program, *_arguments], check=True, env={**os.environ, "PYTHONPATH": str(_SITE.parents[1])})

project = "spmd"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
root_doc = "index"
html_theme = "furo"
html_title = f"spmd {__version__}"
html_copy_source = False
html_static_path = ["static"]
html_css_files = ["wide.css"]
default_role = "code"  # what docstrings have in single backticks
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
add_module_names = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# Pages link to files of the repository (examples, records), which are no pages.
suppress_warnings = ["myst.xref_missing", "docutils", "autodoc", "ref.python"]
