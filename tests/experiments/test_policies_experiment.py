"""experiments.policies and experiments.tune_survival: their tables are what an independent sum of replays says."""

import json

import numpy as np
import pytest
from rich.console import Console

from experiments import policies, tune_survival
from experiments.lib.rules import RULES, rule
from experiments.lib.smoke import made_up_trace, made_up_traces
from experiments.lib.studies import table
from experiments.lib.terminal import Whole
from experiments.lib.traced import costs_or_default, texts_by_task
from specdec_jax.replay.replay import oracle, replay
from specdec_jax.replay.trace import save_trace
from specdec_jax.stopping import static

RULE_NAMES = ("adaedl", "survival")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("policies") / "run"
    assert policies.main(["--smoke", "--rules", *RULE_NAMES, "--out", str(out)]) == 0
    return out


def rows_of(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_second_run_measures_nothing(folder):
    before = (folder / "results.jsonl").read_bytes()
    assert policies.main(["--smoke", "--rules", *RULE_NAMES, "--out", str(folder)]) == 0
    assert (folder / "results.jsonl").read_bytes() == before
    assert (folder / "policies.png").stat().st_size > 10_000


def test_the_chosen_static_length_is_that_of_the_other_half(folder):
    trace, costs = made_up_traces()[1.0], costs_or_default(None)
    row = next(row for row in rows_of(folder) if row["rule"] == "static" and row["temperature"] == 1.0)
    by_length = np.stack([replay(trace, static(), {"draft_length": k}).seconds(costs)[0] for k in range(17)])
    for task, texts in texts_by_task(trace).items():
        first, second = (setting["draft_length"] for setting in row["settings"][task])
        judged = {
            text: [k for k in (first, second) if np.isclose(by_length[k, text], row["seconds"][text], rtol=1e-4)]
            for text in texts
        }
        assert all(judged.values())
        half = np.random.default_rng(0).permutation(len(texts)) < len(texts) // 2
        for chosen, learnt in ((first, texts[half]), (second, texts[~half])):
            assert by_length[chosen, learnt].sum() <= by_length[:, learnt].sum(axis=1).min() * (1 + 1e-9)
        for text, own in zip(texts, half, strict=True):
            assert (second if own else first) in judged[text]


def test_the_table_has_the_speedups_and_the_headroom(folder):
    trace, costs = made_up_traces()[0.0], costs_or_default(None)
    row = {row["rule"]: row for row in rows_of(folder) if row["temperature"] == 0.0}
    plain = trace.length.sum() * costs.plain_pass
    limit = plain / oracle(trace).seconds(costs).sum()
    least = plain / np.sum(row["static"]["seconds"])
    mine = plain / np.sum(row["survival"]["seconds"])
    line = next(line for line in (folder / "table.md").read_text().splitlines() if line.startswith("| survival |"))
    cells = [cell.strip() for cell in line.split("|")[1:-1]]
    assert float(cells[2]) == pytest.approx(mine, abs=6e-4)
    assert cells[4] == f"{(mine - least) / (limit - least):.0%}"
    assert float(cells[3].split()[0]) == pytest.approx(mine / least, abs=6e-4)


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


def test_bad_input_is_one_line(tmp_path, capsys):
    assert policies.main([str(tmp_path / "none.npz"), "--out", str(tmp_path / "a")]) == 2
    assert "none.npz" in capsys.readouterr().err
    assert policies.main(["--smoke", "--rules", "survivel", "--out", str(tmp_path / "b")]) == 2
    assert "survival" in capsys.readouterr().err
    with pytest.raises(ValueError, match="adaedl"):
        rule("adaedle")


def test_a_learnt_prior_is_written_for_the_policy(tmp_path):
    out = tmp_path / "run"
    assert tune_survival.main(["--smoke", "--out", str(out)]) == 0
    prior = json.loads((out / "prior.json").read_text())
    from specdec_jax.stopping import survival

    state = survival().init(2, greedy=prior["greedy"], sampled=prior["sampled"])
    np.testing.assert_allclose(state.settings.greedy[0], prior["greedy"], rtol=1e-5)
    table = (out / "table.md").read_text()
    assert table.count("| built-in |") == 2 and table.count("| learnt |") == 2


@pytest.mark.parametrize("width", [80, 60, 40])
def test_no_name_and_no_number_is_cut_on_a_narrow_terminal(width):
    names = [entry.name for entry in RULES]
    cells = ["1.20", "1.200", "1.100 (1.000–1.200)", "100%", "10.0", "0.30", "1.20", "13%"]
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(Whole(table(policies.HEAD, [[name, *cells] for name in names])))
    shown = captured.get()
    words = shown.split()
    assert "…" not in shown and all(name in words for name in names)
    assert words.count("(1.000–1.200)") == len(names) and words.count("13%") == len(names)
    assert shown.count("──\n") == shown.count("rule ")  # names again beside what follows


def test_a_trace_of_short_drafts_says_which_option_fits(tmp_path, capsys):
    save_trace(tmp_path / "trace-0.npz", made_up_trace(longest=4))
    assert policies.main([str(tmp_path), "--out", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "trace-0.npz holds drafts of up to 4 tokens, 16 are asked for: give --max-draft-length 4, or" in said
    fits = ["--max-draft-length", "4", "--rules", "adaedl", "--out", str(tmp_path / "run")]
    assert policies.main([str(tmp_path), *fits]) == 0
