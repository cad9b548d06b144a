"""The built book behind a local server, and a browser that can reach nothing else.

Files here are named check_*.py, so that `make test` leaves them alone: `make test-book` names them.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

ROOT = Path(__file__).resolve().parents[2]
BOOK = Path(os.environ.get("FA_BOOK", ROOT / "book" / "_build" / "html"))


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args: object) -> None:
        pass


@pytest.fixture(scope="session")
def address() -> Iterator[str]:
    """Where this process serves the book."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(_Quiet, directory=str(BOOK)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}/"
    server.shutdown()


@pytest.fixture(scope="session")
def browser():
    from find_browser import find_or_install
    from selenium import webdriver

    chrome, driver = find_or_install()
    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    for argument in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        # Every other host is unknown: a page that needs one shows an error in its console.
        "--host-resolver-rules=MAP * ~NOTFOUND , EXCLUDE 127.0.0.1",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    session = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    session.set_script_timeout(60)
    yield session
    session.quit()
