"""The charts of the book: one theme, one colour per meaning, and a function per figure (table in, Altair chart out)."""

from fa_study.figures.amplification import amplification, forks
from fa_study.figures.attribution import site_bars
from fa_study.figures.blocks import block_ratios, blocks, rescalings
from fa_study.figures.design import micro_benchmark, rounding_sites
from fa_study.figures.formats import against_golden, by_format, by_width, fp8
from fa_study.figures.law import bias, law
from fa_study.figures.layers import deviation_and_drift, flash_against_twin
from fa_study.figures.lengths import lengths
from fa_study.figures.matter import line_losses, loss_ratio, sample_rows
from fa_study.figures.relative_weights import low_precision_ratio, relative_weights
from fa_study.figures.samples import samples
from fa_study.figures.systematic import systematic
from fa_study.figures.ten_times import control, heat_map
from fa_study.figures.theme import COLOURS, register_theme, use_book_renderer
from fa_study.figures.tiling import tiling
from fa_study.figures.weights import group_differences, weight_differences

__all__ = [
    "COLOURS",
    "against_golden",
    "amplification",
    "bias",
    "block_ratios",
    "blocks",
    "by_format",
    "by_width",
    "control",
    "deviation_and_drift",
    "flash_against_twin",
    "forks",
    "fp8",
    "group_differences",
    "heat_map",
    "law",
    "lengths",
    "line_losses",
    "loss_ratio",
    "low_precision_ratio",
    "micro_benchmark",
    "register_theme",
    "relative_weights",
    "rescalings",
    "rounding_sites",
    "sample_rows",
    "samples",
    "site_bars",
    "systematic",
    "tiling",
    "use_book_renderer",
    "weight_differences",
]
