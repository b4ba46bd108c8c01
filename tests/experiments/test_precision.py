"""`experiments.step_cost precision`: the figures of its table, on made-up logits and with --smoke."""

import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import log_softmax

from experiments.lib import precision_study as precision
from experiments.lib.run_folder import read_rows
from experiments.lib.smoke import tiny_pair
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
    for wrong in (("int8",), ("int8", "int8"), ("bfloat16", "int4")):
        with pytest.raises(ValueError, match="two dtypes|unknown dtype 'int4'"):
            precision.PrecisionStudy(dtypes=wrong)


def test_a_study_of_a_tiny_model(tmp_path, monkeypatch):
    out = tmp_path / "run"
    assert precision.main(["--smoke", "--out", str(out)]) == 0
    rows = {row["dtype"]: row for row in read_rows(out)}
    assert list(rows) == ["bfloat16", "int8", "float32"]
    own, small, exact = rows.values()
    assert own["divergence"][0] == 0 and own["same_top"][0] == 1 and own["largest_change"] == 0
    assert small["divergence"][0] > 0 and small["largest_change"] > 0 and exact["largest_change"] > 0
    assert small["tokens"] == 16
    for dtype, row in rows.items():
        assert row["bytes"] == precision.bytes_here(tiny_pair(dtype)[0].params)
    assert own["bytes"] * 0.5 < small["bytes"] < own["bytes"] * 0.65 < exact["bytes"] == 2 * own["bytes"]
    assert "| int8 | " in (out / "table.md").read_text()
    monkeypatch.setattr(precision, "compared", lambda *_: pytest.fail("measured again"))
    assert precision.main(["--smoke", "--out", str(out)]) == 0
