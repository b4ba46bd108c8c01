"""The audit of other engines: a bias is found, chance is not one, and rounding is told from another choice."""

import itertools
import json
import sys

import numpy as np
import pytest
import tiny_weights

from experiments import audit
from specdec_jax.loading import load_model

SHAPE = {"vocab": 4, "length": 4}
LAW = np.random.default_rng(0).dirichlet(np.ones(256))


def entry(law=LAW, samples=4000, gaps=(), method="assisted", seed=1):
    counts = np.random.default_rng(seed).multinomial(samples, law).tolist()
    return {"method": method, "counts": counts, "gaps": {"float32": list(gaps), "bfloat16": []}, "prompts": 40} | SHAPE


def test_chance_is_no_bias_and_a_bias_is_found():
    p_values = [audit.judged(entry(seed=seed), LAW)["p_value"] for seed in range(40)]
    assert min(p_values) > audit.LEVEL and 0.2 < np.mean(p_values) < 0.8
    bias = LAW.copy()
    bias[:64] *= 1.5  # a first token that is too probable
    row = audit.judged(entry(bias / bias.sum()), LAW)
    assert row["biased"] and row["p_value"] < 1e-6
    distance = ((bias / bias.sum() - LAW) ** 2 / LAW).sum()
    assert row["seen_from"] < distance  # as promised
    for gaps, biased in (((), False), ((1e-5, 2e-4), False), ((1e-5, 0.4), True)):  # greedy: rounding, or a choice
        assert audit.judged(entry(gaps=gaps), LAW)["biased"] == biased


def test_the_smallest_bias_that_is_promised_is_found_in_nine_of_ten_runs():
    shift = np.resize([1.0, -1.0], 256) * np.sqrt(audit.smallest_seen(255, audit.LEVEL / 4) / 100_000)
    bias = LAW * (1 + shift)
    found = [audit.judged(entry(bias / bias.sum(), 100_000, seed=seed), LAW)["biased"] for seed in range(60)]
    assert 0.75 < np.mean(found) < 0.99


def test_the_exact_law_is_the_models(tmp_path):
    tiny_weights.write_folder(tmp_path, tiny_weights.weights())
    loaded = load_model(str(tmp_path), dtype="float32")
    law = audit.exact_law(tmp_path, (5, 6, 7), 3, 2)
    chain = []
    for one, two in itertools.product(range(3), repeat=2):
        cache = loaded.model.init_cache(loaded.params, 1, 8)
        logits, _ = loaded.model.apply(loaded.params, np.array([[5, 6, 7, one]], np.int32), cache)
        first, second = (np.exp(row[:3]) / np.exp(row[:3]).sum() for row in np.asarray(logits)[0, 2:4])
        chain.append(first[one] * second[two])
    np.testing.assert_allclose(law, chain, rtol=1e-4)


@pytest.mark.parametrize(("control_is_biased", "code"), [(True, 0), (False, 1)])
def test_an_audit_fails_where_the_control_is_not_found_out(tmp_path, monkeypatch, control_is_biased, code):
    side = tmp_path / "side.py"
    bias = LAW * np.where(np.arange(256) < 64, 2.0 if control_is_biased else 1.0, 1.0)
    for number, made in enumerate((entry(), entry(bias / bias.sum(), method=audit.CONTROL))):
        extra = {"versions": "x", "prompt": [0]}
        (tmp_path / f"{number}.json").write_text(json.dumps(made | extra))
    side.write_text(f"import shutil, sys\nfor n in '01': shutil.copy(r'{tmp_path}/' + n + '.json', sys.argv[1])\n")
    monkeypatch.setattr(audit, "SIDE", side)
    monkeypatch.setattr("experiments.lib.environments.python_of", lambda *_, **__: sys.executable)
    monkeypatch.setattr(audit, "exact_law", lambda *_: LAW)
    assert audit.main(["--out", str(tmp_path / "run")]) == code
    assert "lossless, as far as tested" in (tmp_path / "run" / "table.md").read_text()
