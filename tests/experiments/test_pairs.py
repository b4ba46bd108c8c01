"""The table over pairs: settings chosen elsewhere, and `survival` with a prior of the other pairs."""

import numpy as np
import pytest

from experiments import policies
from experiments.lib import pairs
from experiments.lib.rules import STATIC
from experiments.lib.smoke import made_up_trace
from experiments.lib.trace_runs import ORACLE, flat_costs, half_of, load_traces, source_of
from specdec_jax.metrics.prior import fit_prior
from specdec_jax.replay.replay import replay
from specdec_jax.replay.trace import save_trace, select
from specdec_jax.stopping import survival

COSTS = flat_costs(0.1, 0.0, 16)


def row(seconds, curve):
    return {"seconds": [seconds], "plain_seconds": [10.0], "curve": curve}


@pytest.fixture
def cells():
    """Two pairs and a rule of three settings; the best of one is not that of the other."""
    sources = [source_of(name, 0.0, made_up_trace(0.0, texts=2), COSTS) for name in ("one", "two")]
    tables = [
        {STATIC: row(8.0, [1.0, 1.25, 1.0]), "rule": row(5.0, [2.0, 1.0, 1.5]), ORACLE: row(2.0, [5.0])},
        {STATIC: row(5.0, [1.0, 2.0, 1.5]), "rule": row(4.0, [1.0, 2.5, 2.0]), ORACLE: row(2.5, [4.0])},
    ]
    return list(zip(sources, tables, strict=True))


def test_a_setting_from_elsewhere_is_the_best_of_the_other_pairs(cells):
    (one, _), (two, _) = cells
    assert pairs.elsewhere(cells, one, "rule") == 1.0  # setting 1, which is best on two
    assert pairs.elsewhere(cells, two, "rule") == 1.0  # setting 0
    assert pairs.elsewhere(cells[:1], one, "rule") is None


def test_the_table_has_means_losses_ranks_and_the_share_of_the_bound(cells):
    lines = {line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
             for line in pairs.pairs_table(cells, [STATIC, "rule"]).splitlines()[2:]}  # fmt: skip
    over = np.sqrt(8 / 5 * 5 / 4)
    share = (10 / 5 - 10 / 8 + 10 / 4 - 10 / 5) / (5.0 - 10 / 8 + 4.0 - 10 / 5)
    assert lines["rule"][:4] == [f"{over:.3f}", "+0.0 %", "1.0", f"{share:.0%}"]
    assert lines[STATIC][:4] == ["1.000", f"{100 * (5 / 8 - 1):+.1f} %", "2.0", "0%"]
    assert lines["rule"][4:] == [f"{np.sqrt(8 / 10 * 5 / 10):.3f}", f"{100 * (1 / 2 - 1):+.1f} %", "2.0"]


def test_left_out_has_a_prior_of_the_other_pairs_alone():
    traces = [made_up_trace(0.0, texts=6, seed=seed, boost=boost) for seed, boost in ((0, 0.0), (1, 1.0), (2, 2.0))]
    sources = [source_of(name, 0.0, trace, COSTS) for name, trace in zip("abc", traces, strict=True)]
    found = pairs.left_out(sources).replay(sources[0], 8)
    given = {"drafter_cost": COSTS.ratio, "verification_times": COSTS.verification_times(8)[None]}
    expected = replay(traces[0], survival(greedy=list(fit_prior(*traces[1:]))), given, max_draft_length=8)
    np.testing.assert_array_equal(found.passes, expected.passes)
    own = replay(traces[0], survival(greedy=list(fit_prior(traces[0]))), given, max_draft_length=8)
    assert (own.passes != expected.passes).any()


def test_a_prior_of_the_pair_is_that_of_the_other_half():
    trace = made_up_trace(0.0, texts=8, boost=1.0)
    found = pairs.same_pair(seed=3).replay(source_of("a", 0.0, trace, COSTS), 8)
    first = half_of(8, seed=3)
    given = {"drafter_cost": COSTS.ratio, "verification_times": COSTS.verification_times(8)[None]}
    for half in (first, ~first):
        prior = list(fit_prior(select(trace, np.flatnonzero(~half))))
        expected = replay(select(trace, np.flatnonzero(half)), survival(greedy=prior), given, max_draft_length=8)
        np.testing.assert_array_equal(found.passes[:, half], expected.passes)


def test_the_first_tokens_are_a_text_of_their_own(tmp_path):
    save_trace(tmp_path / "trace-0.npz", made_up_trace(0.0, texts=4))
    whole, short = (load_traces([tmp_path], tokens=tokens)["drafter"][0.0] for tokens in (None, 5))
    assert (short.length == 5).all() and (whole.length > 5).all()
    found, same = (replay(trace, survival(), max_draft_length=8, record=True) for trace in (whole, short))
    assert (same.emitted == 5).all()
    first = same.rounds[0, 0] - 1  # all but the last round are those of the whole text
    np.testing.assert_array_equal(found.record[0, 0, :first], same.record[0, 0, :first])


def test_the_command_writes_the_table(tmp_path):
    for seed, name in enumerate(("one", "two")):
        (tmp_path / name).mkdir()
        save_trace(tmp_path / name / "trace-0.npz", made_up_trace(0.0, texts=4, seed=seed))
    groups = [f"{name}:{tmp_path / name}:0.1" for name in ("one", "two")]
    out = tmp_path / "run"
    assert policies.main(["--groups", *groups, "--tokens", "0", "--out", str(out)]) == 2 and not out.exists()
    assert policies.main(["--groups", *groups, "--rules", "adaedl-keep", "survival", "--out", str(out)]) == 0
    table = (out / "table.md").read_text().split("## All pairs")[1]
    for name in (pairs.SAME_PAIR, pairs.LEFT_OUT, "adaedl-keep", STATIC):
        assert f"| {name} |" in table
