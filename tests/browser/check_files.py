"""The files of the built book: they load nothing from elsewhere, every link leads somewhere, no page is heavy."""

import book_pages
from conftest import BOOK


def test_the_book_is_built():
    assert (BOOK / "index.html").exists(), "build the book first: make book"


def test_no_page_loads_anything_from_another_host():
    assert book_pages.external_resources(BOOK) == []


def test_every_internal_link_and_anchor_resolves():
    assert book_pages.broken_links(BOOK) == []


def test_no_page_is_heavy():
    assert book_pages.heavy_pages(BOOK) == []


def test_every_chart_has_a_described_static_picture():
    assert book_pages.charts_without_fallback(BOOK) == []
