"""What search engines and link previews read: description, social card, sitemap. All of it from `html.baseurl`."""

import re
from html import escape
from pathlib import Path
from xml.sax.saxutils import escape as escape_xml

import vl_convert
from docutils import nodes
from sphinx.application import Sphinx

CARD = "_static/card.png"
# How a citation reads on a page, such as [GHS+24].
_CITATION = re.compile(r" \[[A-Z]\w*\+?\d\d[a-z]?(, [A-Z]\w*\+?\d\d[a-z]?)*\]")
_CARD_SVG = """<svg xmlns="http://www.w3.org/2000/svg" width="1200" height="630" font-family="sans-serif">
<rect width="1200" height="630" fill="#ffffff"/>{tiles}
<text x="80" y="390" font-size="76" fill="#111111">{title}</text>
<text x="80" y="470" font-size="34" fill="#444444">Attention in tiles, rounded at every site, measured.</text></svg>"""


def card_png(title: str) -> bytes:
    """The picture that a link to the book shows: the tiles of Figure 1 and the title."""
    blues = ("#deebf7", "#9ecae1", "#4292c6", "#08519c")
    tiles = "".join(
        f'<rect x="{80 + 92 * i}" y="{90 + 60 * row}" width="86" height="54" fill="{blues[(i + row) % 4]}"/>'
        for row in range(3)
        for i in range(11)
    )
    return vl_convert.svg_to_png(_CARD_SVG.format(tiles=tiles, title=escape_xml(title)))


def first_paragraph(doctree: nodes.document) -> str:
    """The page's opening words without citations, at most 200 characters, cut between two words."""
    for paragraph in doctree.findall(nodes.paragraph):
        text = _CITATION.sub("", " ".join(paragraph.astext().split()))
        if len(text) > 40:
            return text if len(text) <= 200 else text[:200].rsplit(" ", 1)[0] + " ..."
    return ""


def add_metadata(app: Sphinx, page: str, template: str, context: dict, doctree: nodes.document | None) -> None:
    if doctree is None or app.builder.name != "html":
        return
    base = app.config.html_baseurl.rstrip("/") + "/"
    description = first_paragraph(doctree) or app.config.html_title
    tags = {
        "og:type": "article",
        "og:site_name": app.config.html_title,
        "og:title": context["title"],
        "og:description": description,
        "og:url": base + app.builder.get_target_uri(page),
        "og:image": base + CARD,
    }
    lines = [f'<meta name="description" content="{escape(description)}">']
    lines += [f'<meta property="{name}" content="{escape(text)}">' for name, text in tags.items()]
    lines.append('<meta name="twitter:card" content="summary_large_image">')
    context["metatags"] = context.get("metatags", "") + "\n".join(lines)


def write_site_files(app: Sphinx, exception: Exception | None) -> None:
    if exception or app.builder.name != "html":
        return
    base = app.config.html_baseurl.rstrip("/") + "/"
    pages = [base + app.builder.get_target_uri(page) for page in sorted(app.env.found_docs)]
    urls = "".join(f"<url><loc>{escape_xml(page)}</loc></url>\n" for page in pages)
    sitemap = f'<?xml version="1.0"?>\n<urlset xmlns="http://www.sitemaps.org/schemas/sitemap/0.9">\n{urls}</urlset>\n'
    out = Path(app.outdir)
    (out / "sitemap.xml").write_text(sitemap)
    (out / "robots.txt").write_text(f"User-agent: *\nSitemap: {base}sitemap.xml\n")
    (out / CARD).write_bytes(card_png(app.config.html_title))


def setup(app: Sphinx) -> dict:
    app.connect("html-page-context", add_metadata)
    app.connect("build-finished", write_site_files)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
