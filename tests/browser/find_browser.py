"""The browser and its driver for `make test-book`: what is installed, else Debian's, on Debian and as root only.

Run as a script it says which ones will be used. Selenium is always given both names, because without them it would
download a driver.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

# A driver belongs to one version of its browser: Debian's pair first, then what Google's packages install.
PAIRS = [
    ("/usr/bin/chromium", "/usr/bin/chromedriver"),
    ("chromium", "chromedriver"),
    ("chromium-browser", "chromedriver"),
    ("google-chrome", "chromedriver"),
    ("chrome", "chromedriver"),
]
MAC_CHROME = "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome"


def find() -> tuple[str, str] | None:
    """Browser and driver that are installed; FA_BROWSER and FA_DRIVER name others."""
    named = [(os.environ.get("FA_BROWSER", ""), os.environ.get("FA_DRIVER", ""))]
    for browser, driver in [*named, *PAIRS, (MAC_CHROME, "chromedriver")]:
        found = shutil.which(browser), shutil.which(driver)
        if found[0] and found[1]:
            return found[0], found[1]
    return None


def find_or_install() -> tuple[str, str]:
    found = find()
    if found is None and Path("/etc/debian_version").exists() and os.geteuid() == 0:
        packages = ["chromium", "chromium-driver", "fonts-dejavu-core"]
        subprocess.run(["apt-get", "update", "-qq"], check=True)
        subprocess.run(["apt-get", "install", "-qq", "-y", "--no-install-recommends", *packages], check=True)
        found = find()
    if found is None:
        sys.exit(
            "make test-book needs Chrome or Chromium and its chromedriver: install both, or name them in "
            "FA_BROWSER and FA_DRIVER"
        )
    return found


if __name__ == "__main__":
    print("Browser {}, driver {}".format(*find_or_install()))
