"""`experiments.step_cost` and the cost model it writes, and `precision`: figures on made-up logits and with --smoke."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from experiments import step_cost
from experiments.lib.run_folder import read_rows
from experiments.lib.smoke import tiny_pair
from specdec_jax.costs.cost_model import load_cost_model
from specdec_jax.meshes import bytes_here
from specdec_jax.metrics.agreement import changes_along
from specdec_jax.models.adapters import from_logits_function
from specdec_jax.types import ModelSpec

pytestmark = pytest.mark.slow


def test_changes_are_those_of_the_logits():
    rng = np.random.default_rng(0)
    one, other = (rng.normal(size=(5, 5)).astype(np.float32) for _ in range(2))
    one[2, 3] = -np.inf  # no probability, and nothing to diverge there
    other[2, 3] = -np.inf
    table = from_logits_function(lambda params, tokens: params[tokens], ModelSpec(5, 128))
    text = [0, 1, 2, 4, 3]
    found = changes_along((table, table), (jnp.asarray(one), jnp.asarray(other)), text)
    p, q = (log_softmax(logits[text[:-1]].astype(np.float64), axis=-1) for logits in (one, other))
    with np.errstate(invalid="ignore"):
        np.testing.assert_allclose(found.divergence, np.nansum(np.exp(p) * (p - q), axis=-1), atol=1e-5)
    assert found.same_top.tolist() == (one.argmax(-1) == other.argmax(-1))[text[:-1]].tolist()
    rows = [0, 1, 3]  # of tokens 0, 1 and 4
    apart = np.abs(one - other)[[0, 1, 4]]
    np.testing.assert_allclose(found.mean[rows], apart.mean(axis=-1), rtol=1e-5)
    np.testing.assert_allclose(found.largest[rows], apart.max(axis=-1), rtol=1e-5)


def test_what_cannot_be_compared():
    tables = [from_logits_function(lambda params, tokens: params[tokens], ModelSpec(size, 128)) for size in (5, 6)]
    with pytest.raises(ValueError, match="a text of 1 tokens"):
        changes_along((tables[0], tables[0]), (None, None), [3])
    with pytest.raises(ValueError, match="logits of 5 and of 6 tokens"):
        changes_along((tables[0], tables[1]), (None, None), [3, 4])


def test_a_study_of_a_tiny_model(tmp_path, monkeypatch):
    words = ["precision", "--smoke", "--out", str(tmp_path / "run")]
    assert step_cost.main(words) == 0
    rows = {row["dtype"]: row for row in read_rows(tmp_path / "run")}
    assert list(rows) == ["bfloat16", "int8", "float32"]
    own, small, exact = rows.values()
    assert own["divergence"][0] == 0 and own["same_top"][0] == 1 and own["largest_change"] == 0
    assert small["divergence"][0] > 0 and small["largest_change"] > 0 and exact["largest_change"] > 0
    assert small["tokens"] == 16
    for dtype, row in rows.items():
        assert row["bytes"] == bytes_here(tiny_pair(dtype)[0].params)
    assert own["bytes"] * 0.5 < small["bytes"] < own["bytes"] * 0.65 < exact["bytes"] == 2 * own["bytes"]
    assert "| int8 | " in (tmp_path / "run" / "table.md").read_text()
    monkeypatch.setattr(step_cost, "compared", lambda *_: pytest.fail("measured again"))
    assert step_cost.main(words) == 0


def test_step_cost_writes_a_cost_model_of_both_temperatures_and_the_rules(tmp_path, monkeypatch):
    out = tmp_path / "out"
    assert step_cost.main(["--smoke", "--out", str(out)]) == 0
    costs, model = json.loads((out / "costs.json").read_text()), load_cost_model(out / "cost_model.json")
    medians = {name: entry[0] for name, entry in costs["passes"]["float32"].items()}
    assert model.drafter_step == medians["0 drafter step"] and model.plain_pass == medians["0 plain pass"]
    assert model.sampled_step == medians["0.7 drafter step"] and model.sampled_plain == medians["0.7 plain pass"]
    assert model.widths == (1, 2, 4, 8) and model.batch == 1 and "float32" in model.device
    for at, passes in (("0", model.target_pass), ("0.7", model.sampled_pass)):
        wanted = np.maximum.accumulate([medians[f"{at} pass of {width} tokens"] for width in model.widths])
        np.testing.assert_array_equal(passes, wanted)
    assert [rule.policy for rule in model.rules] == ["survival"]
    table = (out / "table.md").read_text()
    assert "| rule | µs a pass, 0 | a round, 0 |" in table and table.count("| survival | ") == 1
    layer = 32 * 16 * (2 + 2 * 2) + 2 * 16 * 32 + 3 * 32 * 48  # q, k, v; output; gate, up and down
    operations = {"prompt": 2 * 64 * 2 * layer + 2 * 2 * 2 * 16 * 64**2, "product": 2 * 64**3}
    assert costs["prompt"]["operations"] == operations
    monkeypatch.setattr(step_cost, "measure_passes", lambda *_: pytest.fail("measured again"))
    assert step_cost.main(["--smoke", "--out", str(out)]) == 0
