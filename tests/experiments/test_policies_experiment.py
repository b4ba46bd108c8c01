"""experiments.policies: tables are what an independent sum of replays says; the table over pairs; head-room on logs."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from experiments import policies
from experiments.lib import pairs
from experiments.lib.headroom import Line, main
from experiments.lib.headroom import table as headroom_table
from experiments.lib.rules import RULES, STATIC
from experiments.lib.run_folder import read_rows as rows_of
from experiments.lib.smoke import made_up_trace, made_up_traces
from experiments.lib.trace_runs import ORACLE, costs_or_default, flat_costs, half_of, load_traces, source_of
from specdec_jax.metrics.foresight import with_foresight
from specdec_jax.metrics.intervals import Interval
from specdec_jax.metrics.prior import fit_prior
from specdec_jax.replay.replay import replay
from specdec_jax.replay.trace import save_trace, select
from specdec_jax.stopping import survival


@pytest.mark.parametrize("tuning", ["task", "all"])
def test_the_table_has_the_speedups_and_the_headroom(tmp_path, tuning):
    out, (trace, costs) = tmp_path / "run", (made_up_traces()[0.0], costs_or_default(None))
    assert policies.main(["--smoke", "--rules", "adaedl", "--tuning", tuning, "--out", str(out)]) == 0
    rows = [row for row in rows_of(out) if row["temperature"] == 0.0 and (row["task"] == "all") == (tuning == "all")]
    plain = trace.length.sum() * costs.plain_pass
    limit = plain / with_foresight(trace, costs).seconds(costs).sum()
    least, mine = (plain / total(rows, name) for name in ("static", "adaedl"))
    line = next(line for line in (out / "table.md").read_text().splitlines() if line.startswith("| adaedl |"))
    shown = dict(zip(policies.heads(("static",)), (cell.strip() for cell in line.split("|")[1:-1]), strict=True))
    assert float(shown["chosen"]) == pytest.approx(mine, abs=6e-4)
    assert shown["head-room"] == f"{(mine - least) / (limit - least):.0%}"
    assert float(shown["over static (95 %)"].split()[0]) == pytest.approx(mine / least, abs=6e-4)


def total(rows, name, figure="seconds"):
    return sum(np.sum(row[figure]) for row in rows if row["what"] == name)


def test_every_rule_named_by_over_has_a_column_and_settings_overrule_what_the_machine_costs(tmp_path):
    out, words = tmp_path / "run", "svip( threshold = 0.30 )"
    over = ["--over", words, "static", "adaedl"]
    settings = ["--set", "threshold=0.1,0.3", "drafter_cost=0.01,0.9"]
    assert policies.main(["--smoke", "--rules", "survival", "svip", *over, *settings, "--out", str(out)]) == 0
    cheap, expensive = (total(rows_of(out), f"survival drafter_cost={cost}", "passes") for cost in ("0.01", "0.9"))
    assert cheap > 2 * expensive
    rows = [row for row in rows_of(out) if row["temperature"] == 1.0 and row["task"] != "all"]
    lines = (out / "table.md").read_text().split("## Temperature 1")[1].splitlines()
    table = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line.startswith("| ")]
    (heads, *_), shown = table, {}
    for cells in table:
        shown.setdefault(cells[0], dict(zip(heads, cells, strict=False)))
    svip = shown["svip threshold=0.3"]
    assert svip["over svip(threshold=0.3) (95 %)"] == "1.000"  # the same rule, the same rounds
    ratio = total(rows, "adaedl") / total(rows, "svip threshold=0.3")
    assert float(svip["over adaedl (95 %)"].split()[0]) == pytest.approx(ratio, abs=6e-4)


def test_every_policy_has_a_place_in_the_comparison():
    from specdec_jax.text.strategies import names

    wrappers = {"at_least", "update_every"}
    assert {entry.policy.name for entry in RULES} == set(names("policy")) - wrappers
    assert len({entry.name for entry in RULES}) == len(RULES)
    for entry in RULES:
        settings = entry.settings()
        hyperparameters = entry.hyperparameters(settings, costs_or_default(None), 16)
        assert settings[0] == dict(entry.policy.given)
        assert all(np.shape(value)[0] in (1, len(settings)) for value in hyperparameters.values() if np.ndim(value))


def test_two_hyperparameters_of_set_are_a_heat_map():
    settings, source = ["threshold=0.1:0.3:3", "entropy_factor=0.1,0.4", "step=0"], {"group": "", "temperature": 0.0}
    run = SimpleNamespace(
        options=SimpleNamespace(settings=settings), sources=[source_of("", 0.0, made_up_trace(), COSTS)]
    )
    swept = [{"threshold": a, "entropy_factor": b} for a in (0.1, 0.2, 0.3) for b in (0.1, 0.4)]
    cells = [(f"rule threshold={each['threshold']} ...", [each], [sum(each.values())]) for each in swept]
    rows = [source | {"task": "all", "what": name, "settings": each, "curve": curve}
            for name, each, curve in [*cells, (ORACLE, [{}], [9.0])]]  # fmt: skip
    axes = policies.heat_map(run, rows)["settings"].axes[0]
    assert (axes.get_title(), axes.get_xlabel(), axes.get_ylabel()) == ("rule\nGreedy", "threshold", "entropy_factor")
    np.testing.assert_allclose(axes.images[0].get_array(), [[0.2, 0.3, 0.4], [0.5, 0.6, 0.7]])
    del settings[1]
    assert policies.heat_map(run, rows) == {}


def test_a_trace_of_short_drafts_says_which_option_fits_and_one_of_one_task_has_no_table_by_task(tmp_path, capsys):
    short = made_up_trace(longest=4)
    save_trace(tmp_path / "trace-0.npz", short._replace(about=short.about | {"tasks": ["chat"] * short.num_texts}))
    assert policies.main([str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "trace-0.npz holds drafts of up to 4 tokens, 16 are asked for: give --max-draft-length 4, or" in said
    save_trace(tmp_path / "trace-1.npz", made_up_trace(1.0))
    fits = ["--max-draft-length", "4", "--rules", "adaedl", "--out", str(tmp_path / "run")]
    assert policies.main([str(tmp_path), *fits]) == 0
    assert (tmp_path / "run" / "table.md").read_text().count("By task, over") == 1


def test_texts_that_repeat_themselves_are_left_out_of_ranks_and_order(tmp_path):
    trace = made_up_trace(1.0)
    tokens = trace.tokens.copy()
    tokens[:5] = 7
    save_trace(tmp_path / "trace-1.npz", trace._replace(tokens=tokens))
    out, names = tmp_path / "run", ("svip", "survival", "adaedl", "static-7")
    assert policies.main([str(tmp_path), "--rules", *names, "--out", str(out)]) == 0
    text = (out / "table.md").read_text().split("The 7 texts with at most 10% repeated tokens:")[1].split("By task")[0]
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in text.splitlines() if line.startswith("| ")]
    shown = {line[0]: line for line in lines[2:]}
    seconds = {name: {} for name in ("static", *names)}
    for row in rows_of(out):
        if row["task"] != "all" and row["what"] in seconds:
            clean = np.array(row["repeated"]) <= 0.1
            seconds[row["what"]][row["task"]] = np.sum(np.array(row["seconds"])[clean])
    for name, own in seconds.items():
        places = [1 + sum(other[task] < own[task] for other in seconds.values()) for task in own]
        assert float(shown[name][5]) == pytest.approx(np.mean(places), abs=0.06)
    speeds = [float(line[2]) for line in lines[2:] if line[0] in seconds]
    assert speeds == sorted(speeds, reverse=True)


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


def test_the_best_rule_of_a_line_is_the_fastest_that_is_not_the_oracle():
    over = {name: Interval(gain, gain, gain) for name, gain in (("slow", 1.1), (ORACLE, 2.0), ("fast", 1.3))}
    line = Line("eagle", 0.0, "qa", 3, COSTS, 4, {STATIC: over["slow"], ORACLE: over[ORACLE]}, over, False)
    assert headroom_table([line]).splitlines()[-1].endswith("| 2.00 (2.00–2.00) | fast: 1.30 (1.30–1.30) |")


def test_the_command_writes_a_table_and_a_picture(tmp_path):
    log, out = tmp_path / "combined_cnn.jsonl", tmp_path / "out"
    lengths = [[4, 1, 2, 1, 3, 2, 1] * 3, [1, 1, 9, 2] * 4, [2, 2, 1, 5, 1, 1]]
    entries = [{"id": str(i), "acc_eagle": {"acc_len": n}, "acc_ngram": {"acc_len": n}} for i, n in enumerate(lengths)]
    log.write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    save_trace(tmp_path / "t.npz", made_up_trace(0.7))
    words = [str(log), str(tmp_path / "t.npz"), "--ratios", "0.1", "--slopes", "0.05", "--max-draft-length", "3"]
    assert main([*words, "--out", str(out)]) in (0, None)
    table = (out / "table.md").read_text()
    wanted = "eagle | greedy | all | 3 | c = 0.1 |", "n-gram lookup | greedy | all | 3 | slope 0.05 |", "drafter | "
    assert all(f"| {line}" in table for line in wanted) and (out / "headroom.png").stat().st_size > 10_000
    rows = [json.loads(line) for line in (out / "results.jsonl").read_text().splitlines()]
    assert {row["what"] for row in rows if row["group"].startswith("drafter")} >= {"survival", "oracle", "static"}
    assert "survival" not in {row["what"] for row in rows if row["group"].startswith("eagle")}
