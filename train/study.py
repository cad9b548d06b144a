"""The training study: sweeps run seed by seed, each pair of runs reduced to a table as soon as both are finished.

    python train/study.py seeds=0,1,2 sweeps=paper,controls steps=600 model.size=tiny

The sweeps stand in conf/study; `seeds`, `sweeps`, `runs_dir` and `drop_weights` are this program's own options, every
other word is an option of train/run.py and goes to each run. After each seed there is a complete set of pairs. Finished
runs are skipped, so the same command goes on where it was stopped. The tables lie in
<runs_dir>/pairs/<label>/<run>--<partner>.parquet. drop_weights=true removes the weights of a seed's runs once all their
pairs are tables; those of the next seed, with which a seed may be compared, wait for their own turn.
Exit codes: 0 done, 1 a run or pair failed, 2 a word that is not understood.
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
from train.command_line import check_overrides
from train.folder import read_manifest
from train.settings import CONF, choices_of, run_name
from train.system import PROJECT

OWN = {"seeds": "0", "sweeps": "paper,controls,dose,fp16", "runs_dir": "runs", "drop_weights": "false"}


def read_words(words: list[str]) -> tuple[dict, list[str]]:
    """This program's own options by name, with their meaning as values, and the words that go to each run.

    Raises
    ------
    Refusal
        If a word is no option=value, the option does not exist, or one of this program's own has no such value.
    """
    for word in words:
        if "=" not in word or word.startswith("-"):
            raise Refusal(f"{word} is no option; use option=value, or --help for the usage")
    options = dict(word.split("=", 1) for word in words)
    own = OWN | {key: value for key, value in options.items() if key in OWN}
    common = [f"{key}={value}" for key, value in options.items() if key not in OWN]
    check_overrides(common, single="every run of the study takes the same one")
    seeds, drop = own["seeds"].split(","), own["drop_weights"].lower()
    if not all(seed.isascii() and seed.isdecimal() for seed in seeds):
        raise Refusal(f"seeds={own['seeds']} is not allowed; use whole numbers of at least 0 with commas between them")
    if drop not in ("true", "false"):
        raise Refusal(f"drop_weights={own['drop_weights']} is unknown; use true or false")
    sweeps = own["sweeps"].split(",")
    for sweep in sweeps:
        entries(sweep, 0)
    return own | {"seeds": [int(seed) for seed in seeds], "sweeps": sweeps, "drop_weights": drop == "true"}, common


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
    rows = yaml.safe_load(text.replace("{other}", str(seed + 1)))

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


def reduce_pair(run: Path, other: Path, table: Path) -> str:
    """Write the distances of two finished runs at every common step as a table; returns what forbids it, or ""."""
    from fa_study.experiments.weights import weight_trajectory  # seconds that a refusal should not cost

    if table.exists():
        return ""
    if any((read_manifest(folder) or {}).get("state") != "finished" for folder in (run, other)):
        return "one of its runs is not finished"
    try:
        distances = weight_trajectory(run, other)
    except ValueError as error:  # no common step, or weights that were dropped
        return str(error)
    table.parent.mkdir(parents=True, exist_ok=True)
    temporary = table.with_suffix(".tmp")
    distances.to_parquet(temporary)
    temporary.replace(table)
    return ""


def study(own: dict, common: list[str]) -> list[str]:
    """Run the sweeps seed by seed; returns a sentence per sweep or pair that failed."""
    runs_dir, failures = (PROJECT / own["runs_dir"]).resolve(), []
    here = [*common, f"runs_dir={runs_dir}"]
    pending: set[Path] = set()  # folders of pairs without a table
    for seed in sorted(own["seeds"]):  # in order: the weights of a seed's runs serve the seed before it as well
        reduced: set[Path] = set()
        for sweep in own["sweeps"]:
            for entry in entries(sweep, seed):
                run = {"seed": str(seed), **entry["run"]}
                for product in (partner(run, entry["against"]), run):
                    if not train_all(product, here):
                        failures.append(f"{sweep} {entry['label']} seed {seed}: a run failed, see the lines above")
                for single in expand(run):
                    both = (single, partner(single, entry["against"]))
                    pair = [folder_of(each, here, runs_dir) for each in both]
                    table = runs_dir / "pairs" / entry["label"] / f"{pair[0].name}--{pair[1].name}.parquet"
                    problem = reduce_pair(*pair, table)
                    if problem:
                        failures.append(f"{table.name}: {problem}")
                        pending.update(pair)
                    else:
                        reduced.update(folder for each, folder in zip(both, pair) if each["seed"] == str(seed))
        if own["drop_weights"]:
            for folder in reduced - pending:
                shutil.rmtree(folder / "weights", ignore_errors=True)
    return failures


def main(words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__.strip())
        return 0
    try:
        own, common = read_words(words)
    except Refusal as refusal:
        print(f"error: {refusal}", file=sys.stderr)
        return 2
    failures = study(own, common)
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
