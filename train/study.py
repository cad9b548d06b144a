"""The training study: sweeps run seed by seed, each pair of runs reduced to a table as soon as both are finished.

    python train/study.py seeds=0,1,2 sweeps=paper,controls steps=600 model.size=tiny

The sweeps stand in conf/study; `seeds`, `sweeps`, `runs_dir` and `drop_weights` are this program's own options, every
other word goes to each run. After each seed there is a complete set of pairs. Finished runs are skipped, so the same
command goes on where it was stopped. The tables lie in <runs_dir>/pairs/<label>/<run>--<partner>.parquet.
"""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from pathlib import Path

import yaml

if Path(sys.path[0]) == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from hydra import compose, initialize_config_dir

from train import Refusal
from train.folder import read_manifest
from train.settings import CONF, choices_of, run_name
from train.system import PROJECT

OWN = {"seeds": "0", "sweeps": "paper,controls,dose,fp16", "runs_dir": "runs", "drop_weights": "false"}


def entries(sweep: str, seed: int) -> list[dict]:
    """The entries of conf/study/<sweep>.yaml for a seed, their overrides as {option: text}.

    Raises
    ------
    Refusal
        If there is no such sweep.
    """
    if sweep not in choices_of("study"):
        raise Refusal(f"sweeps={sweep} is unknown; use {', '.join(choices_of('study'))}")
    text = (CONF / "study" / f"{sweep}.yaml").read_text().replace("{seed}", str(seed))
    rows = yaml.safe_load(text.replace("{other}", str(seed + 1000)))

    def options(words: str) -> dict[str, str]:
        return dict(word.split("=", 1) for word in words.split())

    return [{"label": row["label"], **{key: options(row[key]) for key in ("run", "against")}} for row in rows]


def partner(run: dict[str, str], against: dict[str, str]) -> dict[str, str]:
    """A run's options with `against` changed; another attn takes its own options away."""
    kept = {key: value for key, value in run.items() if not ("attn" in against and key.startswith("attn."))}
    return kept | against


def expand(run: dict[str, str]) -> list[dict[str, str]]:
    """The single runs of a product."""
    options = {key: value.split(",") for key, value in run.items() if not key.startswith("hydra.")}
    return [dict(zip(options, values)) for values in itertools.product(*options.values())]


def folder_of(run: dict[str, str], common: list[str], runs_dir: Path) -> Path:
    """The folder that a run with these options goes to."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return runs_dir / run_name(compose("config", overrides=[*common, *(f"{k}={v}" for k, v in run.items())]))


def train_all(run: dict[str, str], common: list[str]) -> bool:
    """Run a product as one sweep; True if all of it finished."""
    words = [f"{key}={value}" for key, value in run.items()]
    command = [sys.executable, str(PROJECT / "train" / "run.py"), "-m", "finished=skip", *common, *words]
    return subprocess.run(command, cwd=PROJECT).returncode == 0


def reduce_pair(run: Path, other: Path, table: Path) -> bool:
    """Write the distances of two finished runs at every common step as a table; False if one is not finished."""
    from fa_study.experiments.weights import weight_trajectory

    if table.exists():
        return True
    if any((read_manifest(folder) or {}).get("state") != "finished" for folder in (run, other)):
        return False
    table.parent.mkdir(parents=True, exist_ok=True)
    temporary = table.with_suffix(".tmp")
    weight_trajectory(run, other).to_parquet(temporary)
    temporary.replace(table)
    return True


def study(own: dict[str, str], common: list[str]) -> list[str]:
    """Run the sweeps seed by seed; returns a sentence per sweep or pair that failed."""
    runs_dir, failures = (PROJECT / own["runs_dir"]).resolve(), []
    for seed in map(int, own["seeds"].split(",")):
        reduced: set[Path] = set()
        here = [*common, f"runs_dir={runs_dir}"]
        for sweep in own["sweeps"].split(","):
            for entry in entries(sweep, seed):
                run = {"seed": str(seed), **entry["run"]}
                for product in (partner(run, entry["against"]), run):
                    if not train_all(product, here):
                        failures.append(f"{sweep} {entry['label']} seed {seed}: a run failed, see the lines above")
                for single in expand(run):
                    pair = [folder_of(each, here, runs_dir) for each in (single, partner(single, entry["against"]))]
                    table = runs_dir / "pairs" / entry["label"] / f"{pair[0].name}--{pair[1].name}.parquet"
                    if reduce_pair(*pair, table):
                        reduced.update(pair)
                    else:
                        failures.append(f"{table.name}: one of its runs is not finished")
        if own["drop_weights"] == "true":
            for folder in reduced:
                shutil.rmtree(folder / "weights", ignore_errors=True)
    return failures


def main(words: list[str]) -> int:
    options = dict(word.split("=", 1) for word in words if "=" in word)
    own = OWN | {key: value for key, value in options.items() if key in OWN}
    try:
        for sweep in own["sweeps"].split(","):
            entries(sweep, 0)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    failures = study(own, [f"{key}={value}" for key, value in options.items() if key not in OWN])
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
