"""The project's own files agree with each other: requirements, conda environment, continuous integration."""

import subprocess
from pathlib import Path

import yaml

from fa_study.figures.answer import TABLES
from fa_study.tables import read_manifest

ROOT = Path(__file__).resolve().parents[1]


def requirements(name: str) -> list[str]:
    lines = (ROOT / name).read_text().splitlines()
    return [line for line in lines if line and not line.startswith("#")]


def test_environment_has_the_pins_of_the_requirements():
    environment = yaml.safe_load((ROOT / "environment.yml").read_text())
    pip = next(entry["pip"] for entry in environment["dependencies"] if isinstance(entry, dict))
    assert pip == requirements("requirements.txt") + requirements("requirements-dev.txt")
    assert "python=3.11" in environment["dependencies"]


def test_every_requirement_is_pinned_exactly():
    for name in ("requirements.txt", "requirements-dev.txt", "requirements-gpu.txt"):
        assert all(line.count("==") == 1 for line in requirements(name)), name


def test_ci_calls_the_commands_of_the_readme():
    lines = (ROOT / ".ci" / "run").read_text().splitlines()
    readme = (ROOT / "README.md").read_text()
    for command in ("make test", "make book"):
        assert command in lines
        assert command in readme


def test_the_readmes_picture_is_not_older_than_its_tables():
    assert "(book/_static/answer.svg)" in (ROOT / "README.md").read_text()
    picture, manifest = (ROOT / "book" / "_static" / "answer.svg").read_text(), read_manifest()
    stale = [name for name in TABLES if f"{name} {manifest[name]['sha256']}\n" not in picture]
    assert stale == [], "draw it again: make picture"


def test_notebooks_define_nothing():
    for notebook in (ROOT / "notebooks").glob("*.md"):
        lines = notebook.read_text().splitlines()
        assert not [line for line in lines if line.lstrip().startswith(("def ", "class "))], notebook.name


def test_make_help_names_every_public_target():
    text = (ROOT / "Makefile").read_text()
    targets = text.split(".PHONY:")[1].splitlines()[0].split()
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [target for target in targets if target != "help" and f"make {target} " not in shown] == []
