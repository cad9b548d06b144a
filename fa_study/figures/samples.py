"""The pictures that a trained model draws, shown with the run that drew them."""

from __future__ import annotations

import base64
import html
from pathlib import Path

from IPython.display import HTML


def samples(run: Path) -> HTML:
    """The sample grid of a run folder, inlined, with the run's name below it."""
    picture = run / "samples.png"
    if not picture.exists():
        return HTML(f"<p>{html.escape(run.name)} drew no samples.</p>")
    data = base64.b64encode(picture.read_bytes()).decode()
    name = html.escape(run.name)
    return HTML(
        f'<figure><img src="data:image/png;base64,{data}" alt="Pictures sampled by {name}">'
        f"<figcaption>{name}</figcaption></figure>"
    )
