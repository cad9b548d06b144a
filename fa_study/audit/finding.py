"""What an audit says: findings, and a line for everything that was tried."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["fail", "note"]
Answer = Literal["yes", "no", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing. `code` is a fixed word for programs, `text` a sentence for people."""

    level: Level
    code: str
    text: str


@dataclass(frozen=True)
class Tried:
    """One thing that was tried: what, with which setting, whether it works, and how or why not."""

    what: str
    setting: str
    answer: Answer
    detail: str = ""
