"""Read every notebook again when something that it shows has changed although its own text has not.

Sphinx looks at a page's source only. What a page shows also depends on the package, the stored tables, the installed
versions and the reader's own runs: a fingerprint of these is kept in the build environment, and a new one makes all
notebooks outdated.
"""

import hashlib
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parents[2]
WATCHED = ("fa_study/**/*.py", "notebooks/data/*.*", "requirements.txt", "runs/*/manifest.json", "runs/*/samples*.png")


def fingerprint() -> str:
    digest = hashlib.sha256()
    for pattern in WATCHED:
        for path in sorted(ROOT.glob(pattern)):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def outdated_notebooks(app: Sphinx, env: BuildEnvironment, added: set, changed: set, removed: set) -> list[str]:
    now = fingerprint()
    if getattr(env, "fa_study_fingerprint", None) == now:
        return []
    env.fa_study_fingerprint = now
    return [page for page in env.found_docs if page.startswith("notebooks/")]


def setup(app: Sphinx) -> dict:
    app.connect("env-get-outdated", outdated_notebooks)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
