"""Sphinx: the project's pages and its public docstrings as a site that is read offline.

sphinx-build -c docs . build/site, in the project's root: pages outside of this folder belong to it.
"""

project = "precision-runner"
author = "The authors of precision-runner"
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx_copybutton"]
root_doc = "docs/index"
include_patterns = ["*.md", "docs/*.md", "bench/results/**.md"]
html_theme = "furo"
html_title = project
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_js_files = ["site.js"]
html_show_copyright = False
html_show_sourcelink = False
# A link to a heading is the one that GitHub makes of it.
myst_heading_anchors = 4
autodoc_member_order = "bysource"
autodoc_typehints_format = "short"
