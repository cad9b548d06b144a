"""W&B in online mode: no key is asked for, and without the network the run goes on."""

import json

import pytest
import wandb
from tiny_runs import compose_settings

from train import Refusal
from train.folder import open_run
from train.tracker import Tracker


class FakeRun:
    def define_metric(self, *args, **options):
        pass


@pytest.fixture
def folder(tmp_path):
    settings = compose_settings("device=cpu", "logger.mode=online")
    with open_run(tmp_path / "run", settings) as opened:
        yield settings, opened


def test_online_without_a_key_is_refused_without_a_question(folder, monkeypatch, tmp_path):
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked for something"))
    with pytest.raises(Refusal, match=r"logger.mode=online needs WANDB_API_KEY"):
        Tracker(*folder)


def test_a_server_out_of_reach_makes_the_run_log_offline_under_a_new_id(folder, monkeypatch, capsys):
    calls = []

    def init(**options):
        calls.append(options)
        if options["mode"] == "online":
            raise wandb.errors.CommError("no route to host")
        return FakeRun()

    monkeypatch.setattr(wandb, "login", lambda **_: True)
    monkeypatch.setattr(wandb, "init", init)
    Tracker(*folder)
    assert [call["mode"] for call in calls] == ["online", "offline"]
    assert calls[0]["id"] != calls[1]["id"]
    kept = json.loads((folder[1].path / "manifest.json").read_text())["wandb_id"]
    assert kept == calls[1]["id"]
    assert "W&B cannot be reached (no route to host): logging offline" in capsys.readouterr().out
