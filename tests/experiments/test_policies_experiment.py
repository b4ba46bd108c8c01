"""experiments.policies: rules and their settings, and heat maps; test_experiments_traces.py has its tables."""

from types import SimpleNamespace

import numpy as np
from rich.console import Console

from experiments import policies
from experiments.lib.rules import RULES, rule
from experiments.lib.smoke import made_up_trace
from experiments.lib.trace_runs import (
    ORACLE,
    Run,
    TraceOptions,
    about,
    costs_or_default,
    load_traces,
    open_traces,
    source_of,
    sweep,
    variant,
)
from specdec_jax.costs.cost_model import RuleCost, between, cost_model, flat
from specdec_jax.replay.replay import replay
from specdec_jax.replay.trace import save_trace
from specdec_jax.stopping import static, svip
from specdec_jax.text.strategies import names

COSTS = flat(0.1, 16)


def test_every_policy_has_a_place_in_the_comparison():
    assert {entry.policy.name for entry in RULES} == set(names("policy")) - {"update_every"}
    assert len({entry.name for entry in RULES}) == len(RULES)
    for entry in RULES:
        settings = entry.settings()
        hyperparameters = entry.hyperparameters(settings, costs_or_default(None), 16)
        assert settings[0] == dict(entry.policy.given)
        assert all(np.shape(value)[0] in (1, len(settings)) for value in hyperparameters.values() if np.ndim(value))


def test_two_hyperparameters_of_set_are_a_heat_map():
    settings, source = ["threshold=0.1:0.3:3", "entropy_factor=0.1,0.4", "step=0"], {"group": "", "temperature": 0.0}
    sources = [source_of("", 0.0, made_up_trace(), COSTS)]
    run = SimpleNamespace(options=SimpleNamespace(settings=settings), sources=sources)
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


def test_the_first_tokens_are_a_text_of_their_own(tmp_path):
    save_trace(tmp_path / "trace-0.npz", made_up_trace(0.0, texts=4))
    whole, short = (load_traces([tmp_path], tokens=tokens)["drafter"][0.0] for tokens in (None, 5))
    assert (short.length == 5).all() and (short.limit == 5).all() and (whole.length > 5).all()
    found = replay(short, static(draft_length=8), max_draft_length=8, record=True)
    assert (found.emitted == 5).all() and found.record[0, 0, 0, 0] == 4  # a request for 5 tokens drafts no more


def test_a_table_says_where_its_greedy_rounds_are_live_ones_and_what_is_not_counted():
    """The batch of the recording, the longest draft, and verification widths that are not those of `widths_for`."""
    costs = cost_model(0.1, {1: 1.0, 2: 1.004, 4: 1.1, 8: 1.3, 16: 1.6}, device="a machine")
    traces = {temperature: made_up_trace(temperature) for temperature in (0.0, 0.7)}
    traces[0.0] = traces[0.0]._replace(about=traces[0.0].about | {"batch": 18})

    def said(costs, *temperatures, longest=7):
        sources = [source_of("", temperature, traces[temperature], costs) for temperature in temperatures]
        return about(Run(TraceOptions(max_draft_length=longest), None, sources, None))

    greedy = said(costs, 0.0)
    assert "the batches of the recording (18 rows), with --max-draft-length 7" in greedy
    assert "--verification-widths 1 2 4 8, where decoding itself would choose 2 4 8." in greedy
    assert said(between(costs, (2, 4, 8)), 0.0).endswith("with these costs and --verification-widths 2 4 8.")
    assert "verification-widths 1 2 4 8 16" in said(costs, 0.0, longest=9)
    assert "Greedy" not in said(costs, 0.7) and "sampled passes are taken" in said(costs, 0.7)
    assert "(the rules' own computation is not counted)" in greedy
    sampled = {"sampled_step": 0.3, "sampled_pass": (2.0,) * 5, "sampled_plain": 2.0}
    full = costs._replace(rules=(RuleCost("static", 0.0, 0.0, 0.0, 0.0),), **sampled)
    counted = "(the rules' own computation is only counted for static)"
    machines = f"time: a machine, c = 0.100, greedy {counted}; a machine, c = 0.150, temperature 0.7 {counted}."
    assert machines in said(full, 0.0, 0.7)


def test_rows_are_timed_at_their_temperature_with_the_rules_own_computation(tmp_path):
    trace = made_up_trace(0.7, texts=6)
    costs = flat(0.1, 16)._replace(sampled_step=0.3, sampled_pass=(2.0, 2.0), sampled_plain=2.0)
    costs = costs._replace(rules=(RuleCost("svip", 9.0, 9.0, 0.03, 0.04),))
    options = TraceOptions(smoke=True, out=str(tmp_path))
    run = open_traces("here", options, Console(), [source_of("", 0.7, trace, costs)])
    row = sweep(run, {"svip": variant(rule("svip"), [{"threshold": 0.4}])})[0]
    found = replay(trace, svip(), {"threshold": 0.4}, max_draft_length=16)
    np.testing.assert_allclose(row["seconds"], (2.04 * found.rounds + 0.33 * found.passes)[0])
    assert row["plain_seconds"] == (2.0 * trace.length).tolist()
