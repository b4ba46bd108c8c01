"""`python -m experiments.faults`: kills that harm are counted, kills that do not are not."""

from pathlib import Path

import pytest

from experiments import faults

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


@pytest.mark.parametrize("options, harmed", [([], False), (["--torn"], True)])
def test_a_command_that_does_not_go_on_to_the_same_files_is_counted(options, harmed, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FIXTURES))
    config = faults.Faults(kills=5, seed=1)
    found = faults._killed_folder(config, tmp_path, faults.Command(["slow_writer", *options], ("whole",)))
    assert found["times"] == 5 and (found["different"] > 0) == harmed


def test_a_command_that_ends_with_an_error_stops_the_count(tmp_path):
    with pytest.raises(ValueError, match="no_such_module ended with 1"):
        faults._killed_folder(faults.Faults(), tmp_path, faults.Command(["no_such_module"], ("whole",)))


def test_unknown_commands_are_refused_before_anything_runs(tmp_path, capsys):
    assert faults.main(["--killed", "chat", "--out", str(tmp_path / "run")]) == 2
    assert "'chat'" in capsys.readouterr().err and not (tmp_path / "run").exists()
