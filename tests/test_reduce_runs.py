"""The command that turns training runs into tables."""

import pytest

from fa_study.experiments import reduce_runs


def test_the_help_of_the_reduction_ends_with_its_last_sentence(capsys):
    with pytest.raises(SystemExit) as stop:
        reduce_runs.main(["--help"])
    assert stop.value.code == 0
    assert "settings in the manifest." in " ".join(capsys.readouterr().out.split())
