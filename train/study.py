"""The training study: sweeps run seed by seed, reduced to tables after each seed.

    python train/study.py seeds=0,1,2 sweeps=paper,twins steps=1000 model.size=tiny

The sweeps stand in conf/study; `seeds`, `sweeps`, `runs_dir`, `tables`, `drop_weights` and `plan` are this program's
own options, every other word is an option of train/run.py and goes to each run (a sweep's own words win). Which two
runs belong together is found from their settings: after each seed there is a complete set of pairs, whose distances go
to the folder `tables` (<runs_dir>/tables). Finished runs are skipped and pairs that the tables hold are not measured
again, so the same command goes on where it was stopped. It says beforehand what it will do and for how long; plan=true
stops there. drop_weights=true removes the weights of the seeds before the one that was just reduced.
Exit codes: 0 done, 1 a run or the reduction failed, 2 a word that is not understood, 130 interrupted.
"""

from __future__ import annotations

import itertools
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import yaml

if Path(sys.path[0]) == Path(__file__).resolve().parent:
    sys.path[0] = str(Path(__file__).resolve().parent.parent)

from hydra import compose, initialize_config_dir
from hydra.errors import HydraException
from omegaconf import DictConfig
from omegaconf.errors import OmegaConfBaseException

from train import Refusal
from train.command_line import check_overrides, one_line
from train.folder import read_manifest
from train.settings import CONF, check_settings, choices_of, run_name
from train.system import PROJECT

OWN = {
    "seeds": "0",
    "sweeps": "paper,twins,fp16,systematic,forks,controls,tiled,dose",
    "runs_dir": "runs",
    "tables": "",
    "drop_weights": "false",
    "plan": "false",
}
# Kinds of pairs between whose last weights the loss is looked at.
BETWEEN = ("Flash against Baseline", "ulp twin", "other initialisation")


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
    seeds = own["seeds"].split(",")
    if not own["runs_dir"].strip():
        raise Refusal("runs_dir= is empty, which is the checkout itself; name a folder, such as runs_dir=runs")
    if not all(seed.isascii() and seed.isdecimal() for seed in seeds):
        raise Refusal(f"seeds={own['seeds']} is not allowed; use whole numbers of at least 0 with commas between them")
    for key in ("drop_weights", "plan"):
        if own[key].lower() not in ("true", "false"):
            raise Refusal(f"{key}={own[key]} is unknown; use true or false")
        own[key] = own[key].lower() == "true"
    sweeps = own["sweeps"].split(",")
    for sweep in sweeps:
        products(sweep, 0)
    once = {"seeds": list(dict.fromkeys(map(int, seeds))), "sweeps": list(dict.fromkeys(sweeps))}
    return own | once, common


def products(sweep: str, seed: int) -> list[dict[str, str]]:
    """The products of runs in conf/study/<sweep>.yaml that a seed takes part in, as {option: values}.

    Raises
    ------
    Refusal
        If there is no such sweep.
    """
    if sweep not in choices_of("study"):
        raise Refusal(f"sweeps={sweep} is unknown; use {', '.join(choices_of('study'))}")
    rows = yaml.safe_load((CONF / "study" / f"{sweep}.yaml").read_text())
    chosen = [row["runs"] for row in rows if seed in row.get("seeds", [seed])]
    return [{"seed": str(seed), **dict(word.split("=", 1) for word in words.split())} for words in chosen]


def expand(run: dict[str, str]) -> list[dict[str, str]]:
    """The single runs of a product."""
    options = {key: value.split(",") for key, value in run.items() if not key.startswith("hydra.")}
    return [dict(zip(options, values)) for values in itertools.product(*options.values())]


def settings_of(run: dict[str, str], common: list[str]) -> DictConfig:
    """The settings of a single run."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        return compose("config", overrides=[*common, *(f"{key}={value}" for key, value in run.items())])


def train_all(run: dict[str, str], common: list[str]) -> bool:
    """Run a product as one sweep; True if all of it finished. Ctrl-C is passed on, and its runs save themselves."""
    words = [f"{key}={value}" for key, value in run.items()]
    command = [sys.executable, str(PROJECT / "train" / "run.py"), "-m", "finished=skip", *common, *words]
    with subprocess.Popen(command, cwd=PROJECT, process_group=0) as sweep:
        try:
            return sweep.wait() == 0
        except KeyboardInterrupt:
            sweep.send_signal(signal.SIGINT)
            sweep.wait()
            raise


def plan(own: dict, common: list[str]) -> str:
    """What there is to do, in a sentence, at the pace of the machine that the stored tables come from.

    Raises
    ------
    Refusal
        If a run's settings make no sense: all of them are looked at before the first one starts.
    """
    from fa_study.experiments.pace import seconds_per_step
    from fa_study.experiments.runs import arm
    from fa_study.tables import read_table

    pace = seconds_per_step(read_table("runs.csv"))
    left, finished, seconds, unknown = 0, 0, 0.0, set()
    for seed, sweep in itertools.product(own["seeds"], own["sweeps"]):
        for run in itertools.chain.from_iterable(expand(product) for product in products(sweep, seed)):
            settings = settings_of(run, common)
            check_settings(settings)
            if (read_manifest(PROJECT / own["runs_dir"] / run_name(settings)) or {}).get("state") == "finished":
                finished += 1
                continue
            left += 1
            key = (arm(settings), settings.precision.name, settings.model.name, settings.model.size)
            per_picture = pace.get(key)
            if per_picture is None:
                unknown.add(" ".join(key))
            else:
                seconds += settings.steps * settings.batch_size * per_picture
    hours = f"about {seconds / 3600:.1f} hours of one core at the pace of the tables"
    text = f"{left} runs to do, {finished} finished; {hours}"
    return text + (f", without {', '.join(sorted(unknown))}, whose pace is not known" if unknown else "")


def losses_between(runs_dir: Path) -> list[str]:
    """Measure the held-out loss on the line between the runs of each pair that has none; a sentence per failure."""
    from fa_study.experiments.runs import pairs_in

    failures = []
    for pair in pairs_in(runs_dir):
        if pair.kind in BETWEEN and not pair.variant and not (runs_dir / "lines" / f"{pair.name}.csv").exists():
            command = [sys.executable, str(PROJECT / "train" / "line.py"), str(pair.run), str(pair.reference)]
            if subprocess.run(command).returncode:
                failures.append(f"line {pair.name}: see the lines above")
    return failures


def drop_weights(runs_dir: Path, before: int) -> None:
    """Remove the weights of finished runs of the seeds below `before`."""
    from fa_study.experiments.runs import runs_in

    for run, settings in runs_in(runs_dir).items():
        if settings["seed"] < before:
            shutil.rmtree(run / "weights", ignore_errors=True)


def study(own: dict, common: list[str]) -> list[str]:
    """Run the sweeps seed by seed; returns a sentence per sweep or reduction that failed."""
    from fa_study.experiments.matter import reduce_matter  # seconds that a refusal should not cost
    from fa_study.experiments.reduce_runs import reduce_runs

    runs_dir, failures = (PROJECT / own["runs_dir"]).resolve(), []
    tables = PROJECT / own["tables"] if own["tables"] else runs_dir / "tables"
    print(plan(own, common), flush=True)
    if own["plan"]:
        return []
    for seed in sorted(own["seeds"]):  # in order: initialisations are compared one with the next
        for sweep in own["sweeps"]:
            for product in products(sweep, seed):
                if not train_all(product, [*common, f"runs_dir={runs_dir}"]):
                    failures.append(f"{sweep} seed {seed}: a run failed, see the lines above")
        failures += losses_between(runs_dir)
        try:
            print("\n".join(reduce_runs(runs_dir, tables) + reduce_matter(runs_dir, tables)), flush=True)
        except ValueError as error:
            failures.append(f"tables of seed {seed}: {error}")
        else:
            if own["drop_weights"]:
                drop_weights(runs_dir, seed)
    return failures


def main(words: list[str]) -> int:
    if {"-h", "--help"} & set(words):
        print(__doc__.strip())
        return 0
    try:
        own, common = read_words(words)
        failures = study(own, common)
    except (Refusal, HydraException, OmegaConfBaseException) as error:
        print(f"error: {one_line(error)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; the same command goes on from here", flush=True)
        return 130
    for failure in failures:
        print(f"failed: {failure}", file=sys.stderr)
    return int(bool(failures))


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # a script's background process ignores Ctrl-C if nothing is said
        signal.signal(number, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
