"""Numbers that others published, computed again by the emulation: one file per source, with the published numbers."""

from fa_study.experiments.published.accumulation import ATTENTION, PRODUCTS
from fa_study.experiments.published.biased_rounding import BIAS, LIMITS
from fa_study.experiments.published.fa3_errors import FA3
from fa_study.experiments.published.lazy_rescaling import RESCALING
from fa_study.experiments.published.sinks import SINK_ORDER
from fa_study.experiments.published.stalled_sum import STALLED
from fa_study.experiments.sweep import Sweep

# Table -> how it is made.
PUBLISHED_TABLES: dict[str, Sweep] = {
    "published_fa3.parquet": FA3,
    "published_rescaling.parquet": RESCALING,
    "published_bias.parquet": BIAS,
    "published_shift_limits.parquet": LIMITS,
    "published_stalled_sum.parquet": STALLED,
    "published_sinks.parquet": SINK_ORDER,
    "published_products.parquet": PRODUCTS,
    "published_fp8_sums.parquet": ATTENTION,
}
