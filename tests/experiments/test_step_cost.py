"""`experiments.step_cost` with --smoke, and the cost model that it writes."""

import json

import numpy as np
import pytest

from experiments import step_cost
from specdec_jax.costs.cost_model import load_cost_model

pytestmark = pytest.mark.slow


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
    monkeypatch.setattr(step_cost.timing, "time_policy", lambda *_, **__: pytest.fail("measured again"))
    assert step_cost.main(["--smoke", "--rules-of", str(out), "--out", str(tmp_path / "other")]) == 0
    assert load_cost_model(tmp_path / "other" / "cost_model.json").rules == model.rules
    monkeypatch.setattr(step_cost, "measure_passes", lambda *_: pytest.fail("measured again"))
    assert step_cost.main(["--smoke", "--out", str(out)]) == 0
