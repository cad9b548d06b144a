"""The files that publish the project, which cannot be run here: workflows, citation, Binder, pre-commit."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[1]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def read(name: str) -> str:
    return (ROOT / name).read_text()


def check_schema(schema: str, path: Path) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", schema, str(path)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("schema", "path"),
    [
        *(("vendor.github-workflows", path) for path in WORKFLOWS),
        ("vendor.citation-file-format", ROOT / "CITATION.cff"),
    ],
    ids=lambda value: value.name if isinstance(value, Path) else value,
)
def test_files_obey_their_schemas(schema, path):
    result = check_schema(schema, path)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_schema_of_workflows_sees_a_mistake(tmp_path):
    wrong = tmp_path / "wrong.yml"
    wrong.write_text("on: push\njobs: {a: {runs-on: ubuntu-24.04, steps: [{use: actions/checkout@v4}]}}\n")
    assert check_schema("vendor.github-workflows", wrong).returncode != 0


def steps() -> list[dict]:
    return [s for path in WORKFLOWS for job in yaml.safe_load(path.read_text())["jobs"].values() for s in job["steps"]]


def test_workflows_call_targets_of_the_makefile():
    targets = read("Makefile").split(".PHONY:")[1].splitlines()[0].split()
    called = [target for step in steps() for target in re.findall(r"\bmake ([\w-]+)", step.get("run", ""))]
    assert {"lint", "test", "book", "test-book", "pdf"} <= set(called) <= set(targets)


def test_workflows_have_the_least_permissions():
    allowed_to_write = {"deploy": {"pages", "id-token"}}
    for path in WORKFLOWS:
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}
        for name, job in workflow["jobs"].items():
            writes = {scope for scope, right in job.get("permissions", {}).items() if right == "write"}
            assert writes == allowed_to_write.get(name, set()), name
            if writes:
                assert "refs/heads/main" in job["if"]
                assert "pull_request" in job["if"]


def test_workflows_install_the_cpu_build_of_torch_before_make_does():
    for path in WORKFLOWS:
        for name, job in yaml.safe_load(path.read_text())["jobs"].items():
            commands = [step.get("run", "") for step in job["steps"]]
            made = [i for i, command in enumerate(commands) if re.search(r"\bmake ", command)]
            torch = [i for i, command in enumerate(commands) if "whl/cpu" in command and "grep '^torch=='" in command]
            assert not made or (torch and torch[0] < made[0]), name


def test_the_citation_agrees_with_the_project():
    project = tomllib.loads(read("pyproject.toml"))["project"]
    citation = yaml.safe_load(read("CITATION.cff"))
    config = yaml.safe_load(read("book/_config.yml"))
    assert citation["version"] == project["version"]
    assert citation["license"] == project["license"]
    assert citation["url"] == config["html"]["baseurl"]
    assert citation["repository-code"] == config["repository"]["url"]
    page = read("book/cite.md")
    for fact in (citation["title"], f"{{{citation['version']}}}", citation["url"], citation["authors"][0]["name"]):
        assert fact in page
    assert f"## {citation['version']}" in read("CHANGELOG.md")


def test_binder_installs_what_the_project_pins():
    lines = read("binder/requirements.txt").splitlines()
    torch = next(line for line in read("requirements.txt").splitlines() if line.startswith("torch=="))
    assert f"{torch}+cpu" in lines
    assert "-r ../requirements.txt" in lines
    # Binder opens MyST notebooks through jupytext.
    assert [line.split("==")[0] for line in lines if "==" in line] == ["torch", "jupyterlab", "jupytext"]
    assert read("binder/runtime.txt").strip() == "python-3.11"
    assert subprocess.run(["bash", "-n", ROOT / "binder" / "postBuild"], check=False).returncode == 0
    config = yaml.safe_load(read("book/_config.yml"))
    assert config["launch_buttons"]["notebook_interface"] == "jupyterlab"


def test_pre_commit_runs_what_continuous_integration_runs():
    hooks = [hook for repo in yaml.safe_load(read(".pre-commit-config.yaml"))["repos"] for hook in repo["hooks"]]
    assert [hook["entry"] for hook in hooks] == ["make lint"]
    command = [sys.executable, "-m", "pre_commit", "validate-config", str(ROOT / ".pre-commit-config.yaml")]
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
