"""Read notebooks and reference again when something that they show has changed although their own text has not.

Sphinx looks at a page's source only. What a page shows also depends on the package, the stored tables, the installed
versions and the reader's own runs: a fingerprint of these is kept in the build environment, and a new one makes all
of them outdated.
"""

import hashlib
from pathlib import Path

from sphinx.application import Sphinx
from sphinx.environment import BuildEnvironment

ROOT = Path(__file__).resolve().parents[2]
WATCHED = (
    "fa_study/**/*.py",
    "notebooks/data/*.*",
    "requirements.txt",
    "Makefile",
    "runs/*/manifest.json",
    "runs/*/samples*.png",
)


def fingerprint() -> str:
    digest = hashlib.sha256()
    for pattern in WATCHED:
        for path in filter(Path.is_file, sorted(ROOT.glob(pattern))):
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    return digest.hexdigest()


def outdated_pages(app: Sphinx, env: BuildEnvironment, added: set, changed: set, removed: set) -> list[str]:
    now = fingerprint()
    if getattr(env, "fa_study_fingerprint", None) == now:
        return []
    env.fa_study_fingerprint = now
    return [page for page in env.found_docs if page.startswith(("notebooks/", "api/")) or page == "index"]


def forget_moved_objects(app: Sphinx, env: BuildEnvironment, docnames: list[str]) -> None:
    """Without this, an object that moved to a page that is read earlier would count as described twice."""
    for docname in docnames:
        env.get_domain("py").clear_doc(docname)


def setup(app: Sphinx) -> dict:
    app.connect("env-get-outdated", outdated_pages)
    app.connect("env-before-read-docs", forget_moved_objects)
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}
