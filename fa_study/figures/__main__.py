"""Draw the README's picture from the stored tables: python -m fa_study.figures."""

import pandas as pd

from fa_study.experiments.ten_times import ratios
from fa_study.experiments.weights import whole_model
from fa_study.figures.answer import TABLES, answer_picture, write_svg
from fa_study.tables import ROOT, read_manifest, read_table

PICTURE = ROOT / "book" / "_static" / "answer.svg"


def main() -> None:
    grid, trained, weights = map(read_table, TABLES)
    errors = ratios(pd.concat([grid, trained]))
    started = weights[weights["variant"] == ""]
    drift = pd.concat([whole_model(started, kind) for kind in ("Flash against Baseline", "ulp twin")])
    manifest = read_manifest()
    chart = answer_picture(errors[errors["format"] == "bf16"], drift)
    write_svg(chart, PICTURE, sources={name: manifest[name]["sha256"] for name in TABLES})
    print(PICTURE.relative_to(ROOT))


if __name__ == "__main__":
    main()
