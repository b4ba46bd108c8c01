"""`experiments.parity` finds logits that differ, and says so by its exit code."""

import pathlib
import sys

import jax
import numpy as np
import pytest
import tiny_weights

from experiments import parity
from experiments.lib.engines import Failed
from specdec_jax.loading import load_model


@pytest.mark.slow
@pytest.mark.parametrize(("where", "off", "code"), [((0, 0, 0), 0.0, 0), ((1, 2, 7), 3e-4, 1), ((1, 4, 7), np.nan, 1)])
def test_one_logit_that_differs_is_found(tmp_path, monkeypatch, capsys, where, off, code):
    def side(command, *_):
        """What torch would write: our logits, one of them changed."""
        _, _, out, source = command
        loaded, tokens = load_model(source, dtype="float32"), np.arange(10, dtype=np.int32).reshape(2, 5)
        with jax.default_matmul_precision("highest"):
            logits, _ = loaded.model.apply(loaded.params, tokens, loaded.model.init_cache(loaded.params, 2, 8))
        logits = np.array(logits)
        logits[where] += off * np.abs(logits).max()
        folder = pathlib.Path(out) / parity.slug(source)
        folder.mkdir(parents=True)
        np.savez(folder / "logits.npz", tokens=tokens, logits=logits)

    monkeypatch.setattr(parity, "run", side)
    monkeypatch.setattr("experiments.parity.python_of", lambda *_, **__: sys.executable)
    folder = tmp_path / "model"
    tiny_weights.write_folder(folder, tiny_weights.weights())
    assert parity.main(["--models", str(folder), "--out", str(tmp_path / "run")]) == code
    assert ("differs by more than" in " ".join(capsys.readouterr().out.split())) == bool(code)


def test_without_torch_nothing_is_compared(tmp_path, monkeypatch, capsys):
    def none(*_, **__):
        raise Failed("requirements-peers.txt does not install: no space")

    monkeypatch.setattr("experiments.parity.python_of", none)
    assert parity.main(["--out", str(tmp_path / "run")]) == 0
    assert "Nothing is compared: requirements-peers.txt does not install: no space" in capsys.readouterr().out
    assert not (tmp_path / "run").exists()
