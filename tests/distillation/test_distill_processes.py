"""Distillation by two processes that find each other on the loopback interface: a lost worker ends the other, and the
run goes on to the data and weights of one process, but for the order of sums."""

import json
import signal
import time

import numpy as np
import pytest
from launched import ended, launch
from safetensors.numpy import load_file
from test_distill_command import place, whole

from experiments import distill
from specdec_jax.meshes import make_mesh

__all__ = ["place", "whole"]


def run(place, out):
    return launch(2, ["-m", "experiments.distill", place / "config.py", "--out", out], out)


@pytest.fixture(scope="module")
def both(place):
    """A run of two processes, of which one was killed as it trained, and its second launch, to the end."""
    out = place / "both"
    out.mkdir()
    running = run(place, out)
    until = time.monotonic() + 240
    while not (out / "train" / "metrics.jsonl").is_file():
        assert time.monotonic() < until, ended(running, 1)
        time.sleep(0.02)
    running[1][0].send_signal(signal.SIGKILL)
    code, said = ended(running, 60)[0]
    assert code == 2 and said.count("error: ") == 1 and "Traceback" not in said, said
    assert "process 2 of 2 has ended before the work was done" in said
    assert not (out / "drafter").exists()
    found = ended(run(place, out))
    assert [code for code, _ in found] == [0, 0], found
    assert "Written to" in found[0][1] and "Written to" not in found[1][1]
    return out


@pytest.mark.seldom
def test_two_processes_write_the_data_of_one(both, whole):
    shards = [json.loads((out / "data" / "manifest.json").read_text())["shards"] for out in (both, whole)]
    assert shards[0] == shards[1] and len(shards[0]) > 3
    assert not list((both / "data").glob(".0*.lock"))


@pytest.mark.seldom
def test_their_weights_are_those_of_one_but_for_the_order_of_sums(both, whole):
    one, two = (load_file(out / "drafter" / "model.safetensors") for out in (whole, both))
    for name, tensor in one.items():
        np.testing.assert_allclose(tensor, two[name], rtol=2**-7, atol=2e-4, err_msg=name)  # exported in bfloat16
    lines = [[json.loads(line) for line in (out / "train" / "metrics.jsonl").open()] for out in (whole, both)]
    assert [line["step"] for line in lines[0]] == [line["step"] for line in lines[1]]
    for figure in ("loss", "agreement", "gradient_norm", "positions", "validation_loss"):
        assert lines[0][-1][figure] == pytest.approx(lines[1][-1][figure], rel=1e-3, abs=1e-4), figure


def test_labels_must_be_written(place, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(distill, "join", lambda: distill.Share(0, 2))
    monkeypatch.setattr(distill, "make_spanning_mesh", lambda words: make_mesh("data=1"))
    words = [
        str(place / "config.py"),
        "--out",
        str(tmp_path),
        "--labels",
        "0",
        "--packing.candidates",
        "0",
        "--distributed",
    ]
    assert distill.main(words) == 2
    assert "labels must be more than 0" in capsys.readouterr().err
