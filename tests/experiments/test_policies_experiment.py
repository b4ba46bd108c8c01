"""experiments.policies: its tables are what an independent sum of replays says."""

import json

import numpy as np
import pytest
from rich.console import Console

from experiments import policies
from experiments.lib.cells import markdown
from experiments.lib.rules import RULES
from experiments.lib.smoke import made_up_trace, made_up_traces
from experiments.lib.terminal import Whole
from experiments.lib.trace_runs import costs_or_default, texts_by_task
from specdec_jax.metrics.foresight import with_foresight
from specdec_jax.replay.replay import replay
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
    rows = {row["task"]: row for row in rows_of(folder) if row["what"] == "static" and row["temperature"] == 1.0}
    by_length = np.stack([replay(trace, static(), {"draft_length": k}).seconds(costs)[0] for k in range(17)])
    for task, texts in texts_by_task(trace).items():
        first, second = (setting["draft_length"] for setting in rows[task]["settings"])
        half = np.random.default_rng(0).permutation(len(texts)) < len(texts) // 2
        for chosen, learnt in ((first, texts[half]), (second, texts[~half])):
            assert by_length[chosen, learnt].sum() <= by_length[:, learnt].sum(axis=1).min() * (1 + 1e-9)
        expected = np.where(half, by_length[second, texts], by_length[first, texts])
        np.testing.assert_allclose(rows[task]["seconds"], expected)


def line_of(folder, name):
    """The first line of a rule in the table of the greedy trace, by column."""
    line = next(line for line in (folder / "table.md").read_text().splitlines() if line.startswith(f"| {name} |"))
    return dict(zip(policies.heads(("static",)), (cell.strip() for cell in line.split("|")[1:-1]), strict=True))


@pytest.mark.parametrize("tuning", ["task", "all"])
def test_the_table_has_the_speedups_and_the_headroom(folder, tmp_path, tuning):
    if tuning == "all":
        folder = tmp_path / "run"
        assert policies.main(["--smoke", "--rules", *RULE_NAMES, "--tuning", "all", "--out", str(folder)]) == 0
    trace, costs = made_up_traces()[0.0], costs_or_default(None)
    rows = [row for row in rows_of(folder) if row["temperature"] == 0.0 and (row["task"] == "all") == (tuning == "all")]
    seconds = {
        name: sum(np.sum(row["seconds"]) for row in rows if row["what"] == name) for name in ("static", "adaedl")
    }
    plain = trace.length.sum() * costs.plain_pass
    limit = plain / with_foresight(trace, costs).seconds(costs).sum()
    least, mine = (plain / seconds[name] for name in ("static", "adaedl"))
    shown = line_of(folder, "adaedl")
    assert float(shown["chosen"]) == pytest.approx(mine, abs=6e-4)
    assert shown["head-room"] == f"{(mine - least) / (limit - least):.0%}"
    assert float(shown["over static (95 %)"].split()[0]) == pytest.approx(mine / least, abs=6e-4)


def test_every_rule_named_by_over_has_a_column(tmp_path):
    out, over = tmp_path / "run", ("static", "adaedl")
    assert policies.main(["--smoke", "--rules", "survival", "--over", *over, "--out", str(out)]) == 0
    rows = [row for row in rows_of(out) if row["temperature"] == 1.0 and row["task"] != "all"]
    total = {
        name: sum(np.sum(row["seconds"]) for row in rows if row["what"] == name) for name in ("adaedl", "survival")
    }
    text = (out / "table.md").read_text().split("## Temperature 1")[1]
    line = next(line for line in text.splitlines() if line.startswith("| survival |")).split("|")[1:-1]
    shown = dict(zip(policies.heads(over), line, strict=True))["over adaedl (95 %)"]
    assert float(shown.split()[0]) == pytest.approx(total["adaedl"] / total["survival"], abs=6e-4)


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


@pytest.mark.parametrize("width", [80, 60, 40])
def test_no_name_and_no_number_is_cut_on_a_narrow_terminal(width):
    names = [entry.name for entry in RULES]
    cells = ["1.20", "1.200", "1.100 (1.000–1.200)", "100%", "10.0", "0.30", "1.20", "2.00", "7%", "13%"]
    console = Console(width=width, color_system=None)
    with console.capture() as captured:
        console.print(Whole(markdown(policies.heads(["static"]), [[name, *cells] for name in names])))
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


def test_a_rule_in_words_can_be_compared_with(tmp_path):
    out = tmp_path / "run"
    words = ["--over", "svip( threshold = 0.30 )", "static", "--rules", "svip", "--set", "threshold=0.1,0.3"]
    assert policies.main(["--smoke", *words, "--out", str(out)]) == 0
    text = (out / "table.md").read_text()
    assert "over svip(threshold=0.3) (95 %)" in text
    line = next(line for line in text.splitlines() if line.startswith("| svip threshold=0.3 |"))
    assert line.split("|")[4].strip() == "1.000"  # the same rule, the same rounds


def test_a_setting_overrules_what_the_machine_costs(tmp_path):
    out = tmp_path / "run"
    words = ["--rules", "survival", "--set", "drafter_cost=0.01,0.9"]
    assert policies.main(["--smoke", *words, "--out", str(out)]) == 0
    cheap, expensive = (
        sum(np.sum(row["passes"]) for row in rows_of(out) if row["what"] == f"survival drafter_cost={cost}")
        for cost in ("0.01", "0.9")
    )
    assert cheap > 2 * expensive


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


def test_a_trace_of_one_task_beside_one_of_several(tmp_path):
    one = made_up_trace(0.0)
    save_trace(tmp_path / "trace-0.npz", one._replace(about=one.about | {"tasks": ["chat"] * one.num_texts}))
    save_trace(tmp_path / "trace-1.npz", made_up_trace(1.0))
    out = tmp_path / "run"
    assert policies.main([str(tmp_path), "--rules", "svip", "--out", str(out)]) == 0
    assert (out / "table.md").read_text().count("By task, over") == 1


def test_ambiguous_rules_and_settings_are_one_line(tmp_path, capsys):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        text = "from specdec_jax.stopping import static\n\ndef mine():\n    return static()\n"
        (tmp_path / name / "mine.py").write_text(text)
    files = [str(tmp_path / name / "mine.py") for name in ("a", "b")]
    for words, said in (
        (["--rules", *files], "is called 'mine', as another rule is"),
        (["--rules", "adaedl", "--set", "threshold=0.1", "threshold=0.2"], "names a hyperparameter twice"),
    ):
        assert policies.main(["--smoke", *words, "--out", str(tmp_path / "run")]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
