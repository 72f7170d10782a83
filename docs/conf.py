"""The documentation site: `nox -s docs` builds it, with every example executed and every warning an error."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.pycode import ModuleAnalyzer

from flexdilated import __version__

DOCS = str(Path(__file__).parent)
sys.path.insert(0, DOCS)
import outputs  # noqa: E402
import vision  # noqa: E402, F401

project = "flexdilated"
author = "the maintainers of flexdilated"
version = release = __version__

extensions = [
    "myst_nb",  # pages are Markdown; their code cells run when the site is built
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx.ext.viewcode",
    "sphinx_design",
    "sphinx_copybutton",
    "sphinx_llm.txt",  # every page as Markdown too, and llms.txt
]
exclude_patterns = ["_build", "jupyter_execute"]

# -- pages --------------------------------------------------------------------------------------------------------------------

myst_enable_extensions = ["attrs_block", "attrs_inline", "colon_fence", "deflist"]
myst_heading_anchors = 3
nb_execution_mode = "force"
nb_execution_raise_on_error = True
nb_execution_show_tb = True
nb_execution_timeout = 1800  # of a cell that hangs: a busy machine is slow
nb_merge_streams = True
nb_ipywidgets_js: dict[str, dict[str, str]] = {}  # no scripts from another host
nb_render_markdown_format = "myst"  # tables that cells compute
nb_mime_priority_overrides = [("llms-markdown", "text/plain", 1)]
# Pages of every folder import `kept` and `commands` from this one.
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (DOCS, os.environ.get("PYTHONPATH"))))
llms_txt_description = (
    "Dilated attention (LongNet) for PyTorch: exact outputs and gradients, on any device."  # else all of the README
)
llms_txt_build_parallel = False  # after the pages, from the same doctrees: every example runs once
llms_txt_suppress_unknown_node_warnings = ["abbreviation", "PassthroughTextElement"]

# -- docstrings ---------------------------------------------------------------------------------------------------------------

default_role = "code"  # docstrings put names between single backticks
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
python_use_unqualified_type_names = True
python_maximum_signature_line_length = 88

nitpicky = True
suppress_warnings = ["ref.python"]  # `MultiheadDilatedAttention` is a name of `flexdilated.compat` too
# Types of other packages: their documentation is not fetched, so that the site builds without a network.
nitpick_ignore_regex = [
    (r"py:.*", r"(torch|numpy|np|npt|matplotlib|rich|typer|transformers|collections|pathlib|os|typing|enum|dist|nn)(\..*)?"),
    (r"py:.*", r"(Tensor|Module|BlockMask|DeviceMesh|ProcessGroup|Figure|Path|Sequence|Callable|Mapping|Iterator|NDArray)"),
    (r"py:.*", r"(Any|Literal|SupportsIndex|Self|optional|Ellipsis|abc\..*|ScoreMod|MaskMod|Curve|Activation|Branch|HeadRun)"),
    (r"py:.*", r"(datetime\..*|Lengths)"),
    (r"py:.*", r"flexdilated\.(core\.branch\.\w+|tuning\.run\.Tuning)"),
    (r"py:.*", r"flexdilated\.(reference\..*|nn\.position\.Rotation|distributed\.sharding\.Batch)"),
]

# -- the site -----------------------------------------------------------------------------------------------------------------

html_theme = "pydata_sphinx_theme"
html_title = "flexdilated"
copybutton_prompt_text = r"\$ "
copybutton_prompt_is_regexp = True
copybutton_line_continuation_character = "\\"  # else a command of several lines is copied up to its first line end
html_static_path = ["_static"]
html_favicon = "_static/favicon.svg"
html_context = {"default_mode": "auto"}  # else the theme writes an error to the console
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_sourcelink = False
html_theme_options = {
    "logo": {"text": f"flexdilated {release}"},
    "icon_links": [{"name": "Repository", "url": "https://flexdilated.example/", "icon": "fa-brands fa-git-alt"}],
    "external_links": [{"name": "MIT licence", "url": "https://flexdilated.example/LICENSE"}],
    "header_links_before_dropdown": 5,
    "navigation_with_keys": False,
    "show_prev_next": True,
    "show_toc_level": 2,
    "pygments_light_style": "a11y-high-contrast-light",
    "pygments_dark_style": "a11y-high-contrast-dark",
    "footer_start": ["copyright"],
    "footer_end": ["theme-version"],
}
ALONE = ("start", "why", "explorer", "performance", "evidence", "changelog", "coming-from/*")  # room for wide tables
html_sidebars: dict[str, list[str]] = {page: [] for page in ALONE}
linkcheck_ignore = [r"https?://"]  # `nox -s docs` checks the links inside the site, and needs no network


def _analyze_without_overloads(self: ModuleAnalyzer) -> None:
    _analyze(self)
    self.overloads = {}  # two signatures of twenty lines that differ in one word


_analyze = ModuleAnalyzer.analyze


def _copy_explorer(app: Any, exception: Exception | None) -> None:
    # html_extra_path would put its index.html in the place of the site's own.
    if app.builder.format == "html" and exception is None:
        shutil.copytree(Path(app.srcdir).parent / "flexdilated" / "explorer", Path(app.outdir, "explorer"), dirs_exist_ok=True)


def _mark_links_inside_a_page(app: Any, doctree: nodes.document, name: str) -> None:
    # The Markdown pages would have empty addresses for links without this mark.
    for node in doctree.findall(nodes.reference):
        if "refid" in node:
            node["internal"] = True


def setup(app: Any) -> None:
    ModuleAnalyzer.analyze = _analyze_without_overloads
    app.connect("source-read", outputs.hide)
    app.connect("doctree-resolved", _mark_links_inside_a_page)
    app.connect("build-finished", _copy_explorer)
