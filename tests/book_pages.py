"""What can be said of built pages without a browser: what they load, where their links lead, how heavy they are."""

from __future__ import annotations

import re
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

# A page may weigh this much; scripts shared by all pages are loaded once and do not count.
LARGEST_PAGE = 1_500_000

# Elements that make a browser fetch something, with the attributes that say what. <a> only leads somewhere.
_LOADING = {
    "script": ["src"],
    "img": ["src", "srcset"],
    "iframe": ["src"],
    "source": ["src", "srcset"],
    "video": ["src", "poster"],
    "audio": ["src"],
    "embed": ["src"],
    "object": ["data"],
    "input": ["src"],
    "image": ["href", "xlink:href"],
    "use": ["href", "xlink:href"],
}
_FETCHED_LINKS = {
    "stylesheet",
    "icon",
    "preload",
    "prefetch",
    "modulepreload",
    "preconnect",
    "dns-prefetch",
    "manifest",
}
_IN_CSS = re.compile(r"""(?:url\(\s*|@import\s+)["']?((?:https?:)?//[^"')\s]+)""")


class Page(HTMLParser):
    """The elements of one HTML file."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self.text = path.read_text()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    @property
    def anchors(self) -> set[str]:
        names = {attrs[key] for _, attrs in self.elements for key in ("id", "name") if key in attrs}
        return names | {""}

    @property
    def links(self) -> list[str]:
        return [attrs["href"] for tag, attrs in self.elements if tag == "a" and "href" in attrs]

    @property
    def resources(self) -> list[str]:
        """Every address that a browser fetches on its own when it opens the page."""
        found = []
        for tag, attrs in self.elements:
            found += [attrs[name] for name in _LOADING.get(tag, []) if name in attrs]
            if tag == "link" and _FETCHED_LINKS & set(attrs.get("rel", "").lower().split()):
                found.append(attrs.get("href", ""))
            found += _IN_CSS.findall(attrs.get("style", ""))
        styles = re.findall(r"<style[^>]*>(.*?)</style>", self.text, flags=re.DOTALL)
        return found + [address for style in styles for address in _IN_CSS.findall(style)]


@cache
def read_page(path: Path) -> Page:
    return Page(path)


def html_files(book: Path) -> list[Path]:
    return [path for path in sorted(book.rglob("*.html")) if "_static" not in path.relative_to(book).parts]


def external_resources(book: Path) -> list[str]:
    """Everything that the pages and style sheets of `book` would load from another host."""
    found = [
        f"{path.relative_to(book)}: {address}"
        for path in html_files(book)
        for address in read_page(path).resources
        if urlsplit(address).netloc
    ]
    for path in sorted(book.rglob("*.css")):
        found += [f"{path.relative_to(book)}: {address}" for address in _IN_CSS.findall(path.read_text())]
    return found


def broken_links(book: Path) -> list[str]:
    """Every link inside `book`, and every local resource, that leads to no file or to no anchor in it."""
    found = []
    for path in html_files(book):
        page = read_page(path)
        for address in sorted({*page.links, *page.resources}):
            parts = urlsplit(address)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{path.relative_to(book)}: {address} leads to no file")
            elif target.suffix == ".html" and unquote(parts.fragment) not in read_page(target).anchors:
                found.append(f"{path.relative_to(book)}: {address} leads to no anchor")
    return found


def heavy_pages(book: Path) -> list[str]:
    return [f"{p.relative_to(book)}: {p.stat().st_size}" for p in html_files(book) if p.stat().st_size > LARGEST_PAGE]


def charts_without_fallback(book: Path) -> list[str]:
    """Pages where some chart lacks its static picture, or a picture of a chart lacks its text alternative."""
    found = []
    for path in html_files(book):
        text = read_page(path).text
        charts = text.count('class="fa-chart"')
        static = re.findall(r'<noscript><div role="img" aria-label="([^"]+)"><svg .*?</svg>', text, flags=re.DOTALL)
        if charts != len(static):
            found.append(f"{path.relative_to(book)}: {charts} charts, {len(static)} described static pictures")
    return found
