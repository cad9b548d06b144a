"""The book's own machinery on a book of two pages, built with the real configuration and extensions.

What the real pages look like in a browser is tested by `make test-book`.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import book_pages
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
BOOK = ROOT / "book"
_JUPYTER_BOOK = "import sys; from jupyter_book.cli.main import main; sys.exit(main())"
FRONT = """---
jupytext:
  text_representation: {extension: .md, format_name: myst}
kernelspec: {display_name: Python 3, language: python, name: python3}
---
"""
INDEX = """# A book

Forty characters and more of opening words, with a formula $x^2$ & a {ref}`link <second>`.
"""
CELL = """
# A chart

(second)=
## Second

```{code-cell} ipython3
import altair as alt
import pandas as pd

from fa_study import figures

figures.use_book_renderer()
frame = pd.DataFrame({"a": [1, 2], "b": ["x", "</script>"]})
chart = alt.Chart(frame).mark_bar().encode(x="a:Q", y="b:N", tooltip="a:Q")
figures.theme.describe(chart, 'Two "bars"')
```
"""


class TinyBook:
    """The book's configuration around two pages, beside a stand-in of the package that may change."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        self.source = folder / "book"
        shutil.copytree(BOOK / "_ext", self.source / "_ext", ignore=shutil.ignore_patterns("__pycache__"))
        shutil.copytree(BOOK / "_static", self.source / "_static")
        for name in ("_config.yml", "references.bib"):
            shutil.copy(BOOK / name, self.source)
        (self.source / "_toc.yml").write_text("format: jb-book\nroot: index\nchapters: [{file: notebooks/chart}]\n")
        (self.source / "notebooks").mkdir()
        (self.source / "index.md").write_text(INDEX)
        self.notebook.write_text(FRONT + CELL)
        (folder / "fa_study").mkdir()
        self.module.write_text("VALUE = 1\n")

    @property
    def notebook(self) -> Path:
        return self.source / "notebooks" / "chart.md"

    @property
    def module(self) -> Path:
        """A file that the fingerprint watches."""
        return self.root / "fa_study" / "module.py"

    @property
    def html(self) -> Path:
        return self.source / "_build" / "html"

    def build(self) -> subprocess.CompletedProcess:
        command = [sys.executable, "-c", _JUPYTER_BOOK, "build", "-W", "-n", "--keep-going", str(self.source)]
        environment = os.environ | {"NO_COLOR": "1", "PYTHONPATH": str(ROOT)}
        return subprocess.run(command, capture_output=True, text=True, env=environment, check=False)


@pytest.fixture(scope="module")
def book(tmp_path_factory) -> TinyBook:
    tiny = TinyBook(tmp_path_factory.mktemp("tiny"))
    result = tiny.build()
    assert result.returncode == 0, result.stdout + result.stderr
    return tiny


def test_pages_load_nothing_from_other_hosts(book):
    assert book_pages.external_resources(book.html) == []
    scripts = [address for address in book_pages.read_page(book.html / "index.html").resources if "vendor" in address]
    assert len(scripts) == 2, "Vega and MathJax"
    assert all((book.html / script.split("?")[0]).stat().st_size > 100_000 for script in scripts)


def test_the_list_of_resources_is_not_blind(tmp_path):
    (tmp_path / "a.html").write_text(
        '<a href="https://a.example">fine</a><link rel="canonical" href="https://b.example">'
        '<script src="https://c.example/x.js"></script><link rel="stylesheet" href="//d.example/x.css">'
        '<style>@import url("https://e.example/f.css");</style><p style="background: url(https://f.example)">'
    )
    (tmp_path / "b.css").write_text("@font-face { src: url('https://g.example/font.woff2'); }")
    found = " ".join(book_pages.external_resources(tmp_path))
    assert [host for host in "abcdefg" if f"{host}.example" in found] == ["c", "d", "e", "f", "g"]


def test_links_resolve_and_a_broken_one_is_seen(book, tmp_path):
    assert book_pages.broken_links(book.html) == []
    (tmp_path / "a.html").write_text(
        '<a href="#here">x</a><a href="b.html#there">y</a><a href="c.html">z</a><i id="here">'
    )
    (tmp_path / "b.html").write_text("<p>nothing</p>")
    assert [line.rsplit(" leads", 1)[0] for line in book_pages.broken_links(tmp_path)] == [
        "a.html: b.html#there",
        "a.html: c.html",
    ]


def test_charts_have_a_static_picture_and_a_description(book):
    assert book_pages.charts_without_fallback(book.html) == []
    text = (book.html / "notebooks" / "chart.html").read_text()
    assert text.count('aria-label="Two &quot;bars&quot;"') == 2
    assert text.split("vegaEmbed(s.")[1].split("document.currentScript")[0].count("</script>") == 0


def test_pages_are_described_for_search_engines(book):
    base = yaml.safe_load((BOOK / "_config.yml").read_text())["html"]["baseurl"]
    metas = [attrs for tag, attrs in book_pages.read_page(book.html / "index.html").elements if tag == "meta"]
    named = {attrs.get("name") or attrs.get("property"): attrs.get("content") for attrs in metas}
    assert named["description"] == named["og:description"]
    assert named["description"].startswith("Forty characters and more")
    assert named["og:url"] == base + "index.html"
    assert f"<loc>{base}notebooks/chart.html</loc>" in (book.html / "sitemap.xml").read_text()
    assert (book.html / "_static" / "card.png").read_bytes().startswith(b"\x89PNG")


def test_only_a_change_runs_the_notebooks_again_and_an_unknown_reference_fails(book):
    executed = "Executing notebook"
    assert executed not in book.build().stdout
    book.module.write_text("VALUE = 2\n")
    (book.source / "index.md").write_text(INDEX.replace("<second>", "<nowhere>"))
    result = book.build()
    assert executed in result.stdout
    assert result.returncode != 0
    assert "nowhere" in result.stdout + result.stderr


def test_a_failing_cell_fails_the_build(book):
    page = FRONT + "# Page\n\n(second)=\n## S\n\n```{code-cell} ipython3\nraise OSError('broken')\n```\n"
    book.notebook.write_text(page)
    result = book.build()
    assert result.returncode != 0
    # The traceback is coloured.
    assert "OSError: broken" in re.sub(r"\x1b\[[0-9;]*m", "", result.stdout + result.stderr)


def test_nothing_stops_a_slow_notebook_or_reuses_an_old_result():
    config = yaml.safe_load((BOOK / "_config.yml").read_text())
    assert config["execute"] == {"execute_notebooks": "force", "timeout": -1}
    assert config["sphinx"]["config"]["nb_execution_raise_on_error"] is True


def test_every_file_of_the_table_of_contents_exists():
    def files(node: object) -> list[str]:
        if isinstance(node, list):
            return [name for child in node for name in files(child)]
        if isinstance(node, dict):
            return [node[key] for key in ("file", "root") if key in node] + files(list(node.values()))
        return []

    named = files(yaml.safe_load((BOOK / "_toc.yml").read_text()))
    assert [name for name in named if not (BOOK / f"{name}.md").exists()] == []
    assert len(named) == len(set(named))
