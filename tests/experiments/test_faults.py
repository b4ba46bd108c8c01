"""`python -m experiments.faults`: kills that harm are counted, kills that do not are not."""

import random
from pathlib import Path

import pytest

from experiments import faults

FIXTURES = Path(__file__).resolve().parents[1] / "fixtures"


@pytest.mark.parametrize("options, harmed", [([], False), (["--torn"], True)])
def test_a_command_that_does_not_go_on_to_the_same_files_is_counted(options, harmed, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(FIXTURES))
    config = faults.Faults(kills=5, seed=1)
    out = tmp_path / "out"
    found = faults._killed(config, faults.Command(["slow_writer", *options, "--out", str(out)], out, ("whole",)))
    assert found["times"] == 5 and (found["different"] > 0) == harmed


def test_one_of_several_processes_is_killed_and_the_others_must_end_by_themselves(tmp_path, monkeypatch):
    monkeypatch.setattr(faults, "MINUTE", 0.5)
    (tmp_path / "lingers.py").write_text("import time\ntime.sleep(9)\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    command = faults.Command(["lingers"], tmp_path, ("none",), processes=2)
    assert faults._killed_at(command, random.Random(1), 0.05) == (True, False)


def test_a_command_that_ends_with_an_error_stops_the_count(tmp_path):
    with pytest.raises(ValueError, match="no_such_module ended with 1"):
        faults._killed(faults.Faults(), faults.Command(["no_such_module"], tmp_path, ("whole",)))


def test_unknown_commands_are_refused_before_anything_runs(tmp_path, capsys):
    assert faults.main(["--killed", "chat", "--out", str(tmp_path / "run")]) == 2
    assert "'chat'" in capsys.readouterr().err and not (tmp_path / "run").exists()
