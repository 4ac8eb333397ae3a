"""Configuration of sphinx."""

import os
from pathlib import Path

# One thread gives the same figures and results everywhere, and is the faster for small data.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from sklearn_mr2 import __version__

project = "sklearn-mr2"
author = "The sklearn-mr2 developers"
copyright = "The sklearn-mr2 developers"
release = version = __version__

extensions = [
    "myst_parser",
    "numpydoc",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.doctest",
    "sphinx.ext.mathjax",
    "sphinx_gallery.gen_gallery",
]
exclude_patterns = ["_build", "examples", "images/*.md"]
templates_path = ["_templates"]

myst_enable_extensions = ["colon_fence", "deflist", "dollarmath"]
myst_heading_anchors = 3

autosummary_generate = True
autodoc_typehints = "none"  # numpydoc's sections have them, in words
numpydoc_show_class_members = False

# The code of the user guide is run by `sphinx-build -b doctest`; that of docstrings by pytest.
doctest_test_doctest_blocks = ""
doctest_global_setup = f"""
import torch
from pathlib import Path

torch.set_num_threads(1)
DOCS = Path({str(Path(__file__).parent)!r})
"""

sphinx_gallery_conf = {
    "examples_dirs": "examples",
    "gallery_dirs": "auto_examples",
    "backreferences_dir": "api/generated/backreferences",
    "doc_module": ("sklearn_mr2",),
    "reference_url": {"sklearn_mr2": None},
    "show_memory": False,
    "write_computation_times": False,
    "copyfile_regex": r".*\.rst",
}

html_theme = "pydata_sphinx_theme"
html_title = "sklearn-mr2"
html_static_path = ["_static"]
html_css_files = ["custom.css"]
html_show_sourcelink = False
html_theme_options = {
    "show_prev_next": False,
    "navigation_with_keys": False,
    "header_links_before_dropdown": 6,
    "footer_start": ["copyright"],
    "footer_end": [],
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
}
html_sidebars = {page: [] for page in ("index", "quickstart", "faq", "glossary", "mathematics")}
toc_object_entries_show_parents = "hide"


def skip_foreign_members(app, what, name, obj, skip, options):
    """Document what the package defines, not what its classes inherit from others."""
    function = getattr(obj, "fget", obj)
    module = getattr(function, "__module__", None) or "sklearn_mr2"
    return True if what == "class" and not module.startswith("sklearn_mr2") else skip


def setup(app):
    app.connect("autodoc-skip-member", skip_foreign_members)
