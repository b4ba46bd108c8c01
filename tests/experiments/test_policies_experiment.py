"""experiments.policies: its tables are what an independent sum of replays says."""

import numpy as np
import pytest
from rich.console import Console

from experiments import policies
from experiments.lib.cells import markdown
from experiments.lib.rules import RULES
from experiments.lib.run_folder import read_rows as rows_of
from experiments.lib.smoke import made_up_trace, made_up_traces
from experiments.lib.terminal import Whole
from experiments.lib.trace_runs import costs_or_default
from specdec_jax.metrics.foresight import with_foresight
from specdec_jax.replay.trace import save_trace


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


def test_no_name_and_no_number_is_cut_on_a_narrow_terminal():
    names = [entry.name for entry in RULES]
    cells = ["1.20", "1.200", "1.100 (1.000–1.200)", "100%", "10.0", "0.30", "1.20", "2.00", "7%", "13%"]
    for width in (80, 40):
        console = Console(width=width, color_system=None)
        with console.capture() as captured:
            console.print(Whole(markdown(policies.heads(["static"]), [[name, *cells] for name in names])))
        words = captured.get().split()
        assert "…" not in captured.get() and all(name in words for name in names)
        assert words.count("(1.000–1.200)") == len(names) and words.count("13%") == len(names)
        assert captured.get().count("──\n") == captured.get().count("rule ")  # names again beside what follows


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


def test_ambiguous_rules_and_settings_are_one_line(tmp_path, capsys):
    files = [tmp_path / name / "mine.py" for name in ("a", "b")]
    for file in files:
        file.parent.mkdir()
        file.write_text("from specdec_jax.stopping import static\n\ndef mine():\n    return static()\n")
    for words, said in (
        (["--rules", *map(str, files)], "is called 'mine', as another rule is"),
        (["--rules", "adaedl", "--set", "threshold=0.1", "threshold=0.2"], "names a hyperparameter twice"),
    ):
        assert policies.main(["--smoke", *words, "--out", str(tmp_path / "run")]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
