"""The charts of the book: one theme, one colour per meaning, and a function per figure (table in, Altair chart out)."""

from fa_study.figures.design import micro_benchmark
from fa_study.figures.samples import samples
from fa_study.figures.theme import COLOURS, register_theme, use_book_renderer
from fa_study.figures.tiling import tiling
from fa_study.figures.weights import weight_differences

__all__ = [
    "COLOURS",
    "micro_benchmark",
    "register_theme",
    "samples",
    "tiling",
    "use_book_renderer",
    "weight_differences",
]
