"""The project's own files agree with each other: requirements, conda environment, continuous integration."""

import ast
import re
import subprocess
from pathlib import Path

import yaml

from fa_study.figures.answer import TABLES
from fa_study.tables import read_manifest
from fa_study.verdicts import Verdict

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


RESULTS = {"holds": "holds", "holds only where": "in some settings", "does not hold": "does not hold"}


def verdicts_of_the_book() -> list[Verdict]:
    """What the cells of the page with the verdicts show."""
    page = (ROOT / "notebooks" / "verdict.md").read_text()
    names: dict[str, object] = {}
    shown = []
    for cell in re.findall(r"```\{code-cell\} ipython3\n(?::[^\n]*\n)*(.*?)```", page, flags=re.DOTALL):
        *statements, last = ast.parse(cell).body
        exec(compile(ast.Module(statements, []), "verdict.md", "exec"), names)
        if isinstance(last, ast.Expr):
            shown.append(eval(compile(ast.Expression(last.value), "verdict.md", "eval"), names))
        else:
            exec(compile(ast.Module([last], []), "verdict.md", "exec"), names)
    return [value for value in shown if isinstance(value, Verdict)]


def test_the_readme_tells_the_verdicts_that_the_tables_give():
    readme = (ROOT / "README.md").read_text()
    claims = {v.claim: RESULTS[v.holds] for v in verdicts_of_the_book() if re.fullmatch(r"C\d", v.claim)}
    assert sorted(claims) == [f"C{i}" for i in range(1, 10)]
    told = dict(re.findall(r"(C\d): (holds|in some settings|does not hold)", readme))
    assert told == claims


def test_the_readme_names_every_page():
    readme = (ROOT / "README.md").read_text()
    pages = [page.name for page in (ROOT / "notebooks").glob("*.md") if not page.name.startswith("published_")]
    assert [name for name in pages if f"(notebooks/{name})" not in readme] == []
    assert len(readme.splitlines()) <= 150


def test_notebooks_define_nothing():
    for notebook in (ROOT / "notebooks").glob("*.md"):
        lines = notebook.read_text().splitlines()
        assert not [line for line in lines if line.lstrip().startswith(("def ", "class "))], notebook.name


def test_make_help_names_every_public_target():
    text = (ROOT / "Makefile").read_text()
    targets = text.split(".PHONY:")[1].splitlines()[0].split()
    shown = subprocess.run(["make", "help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [target for target in targets if target != "help" and f"make {target} " not in shown] == []
