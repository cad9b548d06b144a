"""Put Vega and MathJax, taken from installed packages, beside the built pages: they load nothing from elsewhere.

The files go straight into the output folder: Jupyter Book would add every script under book/_static to every page in
no fixed order, and nothing of them belongs in git.
"""

from importlib.metadata import files
from pathlib import Path

import vl_convert
from sphinx.application import Sphinx

VEGA = "vendor/vega-embed.js"
MATHJAX = "vendor/tex-svg.js"


def write_scripts(app: Sphinx) -> None:
    if app.builder.format != "html":
        return
    folder = Path(app.outdir) / "_static" / "vendor"
    folder.mkdir(parents=True, exist_ok=True)
    # The bundle declares names that collide with other scripts of the page unless a function encloses them.
    bundle = "(function(){" + vl_convert.javascript_bundle(vl_version="6.4") + "})();"
    mathjax = next(file for file in files("sphinx-mathjax-offline") if file.name == "tex-svg.js")
    for name, text in ((VEGA, bundle), (MATHJAX, Path(mathjax.locate()).read_text())):
        (Path(app.outdir) / "_static" / name).write_text(text)
    app.add_js_file(VEGA, priority=100)


def setup(app: Sphinx) -> dict:
    app.connect("builder-inited", write_scripts)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
