"""Repair what Sphinx and docutils write that a screen reader trips over (found by axe in `make test-book`)."""

import re

from docutils import nodes
from sphinx.application import Sphinx


def repair(app: Sphinx, page: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    body = context.get("body", "")
    # A list whose entries have the role of bibliography entries is no list.
    body = body.replace('<div role="list" class="citation-list">', '<div class="citation-list">')
    # A signature of several lines is a description list without terms.
    lines = re.compile(r"<dl>\s*((?:<dd>(?:(?!</?dl>).)*?</dd>\s*)+)</dl>", flags=re.DOTALL)
    context["body"] = lines.sub(
        lambda found: '<ul class="signature">' + re.sub(r"<(/?)dd>", r"<\1li>", found[1]) + "</ul>", body
    )


def setup(app: Sphinx) -> dict:
    app.connect("html-page-context", repair)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
