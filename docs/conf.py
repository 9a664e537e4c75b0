"""The documentation site: `make docs` builds it into build/docs, with every warning as an error.

Pages are Markdown (MyST) that also reads well where there is no Sphinx. Nothing is loaded from another host: the theme
brings its own styles, and formulas become MathML, which browsers draw by themselves.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import MathError
from docutils.utils.math.latex2mathml import tex2mathml
from sphinx.application import Sphinx
from sphinx.util import logging

sys.path.insert(0, str(Path(__file__).parent))  # for command_line.py

project = "gradprobe_hf"
author = "the gradprobe_hf authors"
extensions = [
    "myst_parser",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
    "sphinxarg.ext",
]
highlight_language = "text"  # where a block does not say: usages on the command-line page

# Markdown: `$...$` is a formula, and a heading can be linked to as `page.md#heading`.
myst_enable_extensions = ["alert", "dollarmath"]
myst_heading_anchors = 3

# Docstrings are written in Google's style, with single backquotes around code.
default_role = "code"
napoleon_numpy_docstring = False
autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented"
autodoc_preserve_defaults = True

# Quotes and dots may become typographic; `--output` has to keep both of its hyphens.
smartquotes_action = "qe"

html_math_renderer = "mathml"
html_theme = "furo"
html_title = "gradprobe_hf"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sphinx = False
html_show_copyright = False
copybutton_exclude = ".linenos, .gp, .go"

logger = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_html_math_renderer("mathml", inline_renderers=(draw_formula, None), block_renderers=(draw_formula, None))
    app.connect("autodoc-process-docstring", indent_fences)
    app.connect("doctree-resolved", set_dashes)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


def draw_formula(translator: Any, node: nodes.Element) -> None:
    """LaTeX -> MathML, by docutils: the same for `$...$` and `$$...$$`."""
    is_block = isinstance(node, nodes.math_block)
    try:
        formula = tex2mathml(node.astext(), as_block=is_block)
    except MathError as error:
        logger.warning("formula %r: %s", node.astext(), error, location=node)
        formula = translator.encode(node.astext())
    translator.body.append(f'<div class="formula">{formula}</div>' if is_block else formula)
    raise nodes.SkipNode


def indent_fences(_app: Sphinx, _what: str, _name: str, _documented: Any, _options: Any, lines: list[str]) -> None:
    """Docstrings fence code as Markdown does; Sphinx reads a directive with its body indented."""
    fence = None
    for number, line in enumerate(lines):
        if not line.strip().startswith("```"):
            lines[number] = line if fence is None else f"   {line}"
        elif fence is None:
            fence = line.replace("```", "").strip() or "text"
            lines[number] = f"{line[: line.index('`')]}.. code-block:: {fence}\n"
        else:
            fence, lines[number] = None, ""
    lines[:] = "\n".join(lines).split("\n")


def set_dashes(_app: Sphinx, tree: nodes.document, _page: str) -> None:
    """Sphinx writes ` -- ` between a parameter and its description, for smart quotes to make a dash of."""
    for text in list(tree.findall(nodes.Text)):
        if text == " -- ":
            text.parent.replace(text, nodes.Text(" \N{EN DASH} "))
