"""Print the single-page book to book/_build/pdf/fa-study.pdf, through the browser: `make pdf`."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from find_browser import find_or_install

BUILD = Path(__file__).resolve().parents[2] / "book" / "_build"


def print_to_pdf(page: Path, out: Path) -> None:
    """Let a headless browser open `page`, wait for its scripts, and print it to `out`."""
    browser, _ = find_or_install()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as profile:
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-background-networking",
            f"--user-data-dir={profile}",
            # Simulated time: it passes only while nothing is left to draw.
            "--virtual-time-budget=60000",
            "--no-pdf-header-footer",
            f"--print-to-pdf={out}",
            page.as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True, timeout=600)
    if not out.exists() or not out.read_bytes().startswith(b"%PDF"):
        sys.exit(f"the browser printed no PDF from {page}")


if __name__ == "__main__":
    target = BUILD / "pdf" / "fa-study.pdf"
    print_to_pdf(BUILD / "singlehtml" / "index.html", target)
    print(f"The book as PDF: {target} ({target.stat().st_size / 1e6:.1f} MB)")
