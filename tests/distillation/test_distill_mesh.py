"""Distillation on several devices: the texts of one device, and its weights but for the order of sums."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file
from test_distill_command import place
from test_sharding import FLAGS

from specdec_jax.distillation import training
from specdec_jax.distillation.batches import Packing

SCRIPT = Path(__file__).resolve().parents[1] / "fixtures" / "distil_on_devices.py"
__all__ = ["place"]
READS = ", hidden_layers=(1, 2), unroll=Unroll(2, 1.0)"


@pytest.fixture(scope="module", params=["stored", "online"])
def runs(place, request):
    """The folder of both runs, of a drafter that reads its target: of one that does not, less is shared."""
    folder = place / f"reads-{request.param}"
    folder.mkdir()
    text = (place / "config.py").read_text()
    text = text.replace("hidden=48)", "hidden=48, reads=(1, 2))").replace(", seed=5", f", seed=5{READS}")
    if request.param == "online":  # the target runs in every step
        for stored, online in (
            ("labels=4", "labels=0"),
            ("candidates=64", "candidates=0"),
            ("(1, 2), unroll", "(), unroll"),
        ):
            assert stored in text
            text = text.replace(stored, online)
    (folder / "config.py").write_text("from specdec_jax.distillation.unrolled import Unroll\n" + text)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": FLAGS}
    words = [sys.executable, SCRIPT, folder / "config.py", folder]
    done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.mark.seldom
def test_the_same_tokens_are_written_and_labelled_alike(runs):
    one, mesh = (json.loads((runs / name / "data" / "manifest.json").read_text()) for name in ("one", "mesh"))
    assert one["tokens"] == mesh["tokens"] > 1000
    for entry, other in zip(one["shards"], mesh["shards"], strict=True):
        left, right = (load_file(runs / name / "data" / entry["file"]) for name in ("one", "mesh"))
        np.testing.assert_array_equal(left["tokens"], right["tokens"])
        np.testing.assert_allclose(left["log_prob"], right["log_prob"], atol=2e-3)
        assert entry["file"] == other["file"]


@pytest.mark.seldom
def test_the_weights_are_those_of_one_device(runs):
    left, right = (load_file(runs / name / "drafter" / "model.safetensors") for name in ("one", "mesh"))
    for name, tensor in left.items():
        np.testing.assert_allclose(tensor, right[name], rtol=2**-7, atol=2e-4, err_msg=name)  # exported in bfloat16
    last = [
        json.loads((runs / name / "train" / "metrics.jsonl").read_text().splitlines()[-1]) for name in ("one", "mesh")
    ]
    for figure in ("loss", "agreement", "gradient_norm", "positions", "validation_loss", "last_agreement"):
        assert last[0][figure] == pytest.approx(last[1][figure], rel=1e-3, abs=1e-4), figure


@pytest.mark.parametrize("shares, tokens", [(2, None), (3, 2688)])
def test_rows_that_devices_cannot_share_are_refused(shares, tokens, monkeypatch):
    monkeypatch.setattr(training, "mesh_here", lambda: SimpleNamespace(shape={"data": shares}))
    packing = Packing(slots=(448, 896), tokens=1792)
    if tokens is None:
        return training.check_rows(packing)
    told = f"4 rows of 448 tokens .* data={shares}: set packing.tokens to {tokens}$"
    with pytest.raises(ValueError, match=told):
        training.check_rows(packing)
    training.check_rows(Packing(slots=(448, 896), tokens=tokens))
