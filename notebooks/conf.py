"""The site of `make docs`: these guides, and the API from the docstrings."""

import os
import sys
from pathlib import Path

# `js.keras.BatchNormalization` is a class of Keras, which looks here when imported.
os.environ["KERAS_BACKEND"] = "jax"

from jaxstrategy import __version__

sys.path.insert(0, str(Path(__file__).parent / "_extensions"))

project = "jaxstrategy"
author = "the authors of jaxstrategy"
version = release = __version__
html_title = "jaxstrategy"

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.autosummary",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinx_design",
    # Of this folder:
    "api_entries",
    "api_links",
    "docstring_markup",
    "outer_links",
]
exclude_patterns = ["_extensions"]

# Guides. The outputs are the committed ones: tests/test_notebooks.py runs the cells.
nb_execution_mode = "off"
nb_merge_streams = True
nb_mime_priority_overrides = [("html", "text/html", 0), ("html", "image/svg+xml", 10)]
myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 4

# The API. In our docstrings backquotes hold code, as in Markdown.
default_role = "code"
autosummary_generate = False
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 80
napoleon_google_docstring = True
napoleon_numpy_docstring = False
napoleon_use_ivar = True
add_module_names = False
toc_object_entries_show_parents = "hide"

html_theme = "sphinx_book_theme"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_theme_options = {
    "show_navbar_depth": 1,
    "show_toc_level": 1,
    "navbar_persistent": [],
    "use_download_button": False,
    "use_fullscreen_button": False,
}
copybutton_prompt_text = r">>> |\.\.\. |\$ "
copybutton_prompt_is_regexp = True
