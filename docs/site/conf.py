"""Sphinx's settings: docs/ as offline HTML, `make site`."""

from spmd import __version__

project = "spmd"
version = release = __version__
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]
source_suffix = {".md": "markdown"}
root_doc = "index"
html_theme = "furo"
html_title = f"spmd {__version__}"
html_copy_source = False
myst_heading_anchors = 3
autodoc_typehints = "signature"
autodoc_member_order = "bysource"
add_module_names = False
napoleon_use_ivar = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 100
# Pages link to files of the repository (examples, records), which are no pages.
suppress_warnings = ["myst.xref_missing", "docutils", "autodoc", "ref.python"]
