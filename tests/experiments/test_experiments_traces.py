"""Commands over traces, from arguments to picture: what they write, that their numbers are a plain-Python replay's."""

import json
import re

import numpy as np
import pytest
import stopping_oracles as twins
from trace_walks import on_the_other_half, over_plain, totals

from experiments import adaedl, entropy, policies
from experiments.lib import trace_runs
from experiments.lib.run_folder import read_rows as rows_of
from experiments.lib.smoke import made_up_trace
from specdec_jax.costs.cost_model import cost_model
from specdec_jax.replay.trace import save_trace

pytestmark = pytest.mark.slow

COMMANDS = {
    "policies": (policies, ("policies.png",), ("--rules", "static-3", "adaedl", "--set", "threshold=0.2,0.6")),
    "lambda": (adaedl, ("lambdas.png",), ()),
    "factor": (adaedl, ("factor.png",), ()),
    "tables": (adaedl, ("paper.png",), ()),
    "entropy": (entropy, ("entropy.png",), ("--bins", "5")),
}


def run(name, *arguments):
    """The exit code of a command, or of a study of experiments.adaedl."""
    module = COMMANDS[name][0]
    return module.main([*([name] if module is adaedl else []), *arguments])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """name -> the run folder of one whole smoke run, made when it is first asked for."""
    made = {}

    def get(name):
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name) / "out"
            assert run(name, "--smoke", *COMMANDS[name][2], "--out", str(made[name])) == 0
        return made[name]

    return get


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_writes_rows_a_table_and_pictures_once(finished, name, monkeypatch):
    out, (_, pictures, options) = finished(name), COMMANDS[name]
    written = sorted(path.name for path in out.iterdir())
    assert written == sorted(["manifest.json", "results.jsonl", "table.md", *pictures])
    assert all((out / picture).read_bytes().startswith(b"\x89PNG") for picture in pictures)
    manifest, rows = json.loads((out / "manifest.json").read_text()), rows_of(out)
    assert {row["config_hash"] for row in rows} == {manifest["config_hash"]} and manifest["config"]["smoke"] is True
    keys = [tuple(row[key] for key in ("group", "temperature", "task", "what")) for row in rows]
    assert len(set(keys)) == len(keys) and {key[2] for key in keys} > {"all"}
    before = (out / "results.jsonl").read_bytes(), (out / "table.md").read_text()
    monkeypatch.setattr(trace_runs, "replay", lambda *args, **more: pytest.fail("something was replayed"))
    monkeypatch.setattr(entropy, "measured", lambda *args: pytest.fail("something was measured"))
    assert run(name, "--smoke", *options, "--out", str(out)) == 0
    assert ((out / "results.jsonl").read_bytes(), (out / "table.md").read_text()) == before


def test_a_stopped_run_goes_on_where_it_was(finished, tmp_path, monkeypatch):
    whole, out = finished("policies"), tmp_path / "out"
    out.mkdir()
    (out / "manifest.json").write_bytes((whole / "manifest.json").read_bytes())
    lines = (whole / "results.jsonl").read_bytes().splitlines(keepends=True)
    (out / "results.jsonl").write_bytes(b"".join(lines[:-7]) + lines[-7][:30])  # killed inside a line
    assert policies.main(["--smoke", *COMMANDS["policies"][2], "--out", str(out)]) == 0
    assert (out / "results.jsonl").read_bytes() == b"".join(lines)
    assert (out / "table.md").read_text() == (whole / "table.md").read_text()


def section(folder, heading):
    """The text of a table.md between a heading and the next."""
    text = f"\n{(folder / 'table.md').read_text()}".split(f"\n## {heading}\n")[1]
    return text.split("\n## ")[0]


def cells(text, name):
    """The cells of the first row that begins with a name."""
    found = re.findall(rf"^\| {re.escape(name)} \| (.+) \|$", text, re.MULTILINE)
    return found[0].split(" | ")


def value(cell):
    """The number a cell begins with."""
    return float(re.match(r"[*]*([-+]?[\d.]+)", cell)[1])


@pytest.mark.parametrize("temperature, heading", [(0.0, "Greedy"), (1.0, "Temperature 1")])
def test_the_tables_of_rules_are_walks_along_the_trace(finished, temperature, heading):
    trace, text = made_up_trace(temperature), section(finished("policies"), heading)
    for name, twin in (
        ("static-3", lambda: twins.Static(3)),
        ("adaedl threshold=0.2", lambda: twins.AdaEDL(threshold=0.2)),
        ("adaedl threshold=0.6", lambda: twins.AdaEDL(threshold=0.6)),
    ):
        seconds, rounds, passes, accepted = totals(trace, twin)
        shown = dict(zip(policies.HEAD[1:], cells(text, name), strict=True))
        assert value(shown["publ."]) == pytest.approx(over_plain(trace, seconds), abs=0.006)
        assert value(shown["chosen"]) == pytest.approx(over_plain(trace, seconds), abs=0.0006)
        assert value(shown["tokens"]) == pytest.approx(trace.num_positions / rounds, abs=0.006)
        assert value(shown["wasted"]) == pytest.approx(100 * (passes - accepted) / passes, abs=0.6)
    assert value(dict(zip(policies.HEAD[1:], cells(text, "static-3"), strict=True))["discarded"]) == 0
    code, by_task = texts_of(trace, "code"), text.split("By task")[1]
    three = over_plain(trace, totals(trace, lambda: twins.Static(3), texts=code)[0], code)
    best = over_plain(trace, on_the_other_half(trace, code, [7, *range(17)], twins.Static)[1].sum(), code)
    assert value(cells(by_task, "static")[0]) == pytest.approx(best, abs=0.006)
    assert value(cells(by_task, "static-3")[0]) == pytest.approx(three / best, abs=0.006)


def test_fixed_and_moving_lambdas_are_walks_and_slower_updates_differ(finished):
    trace, text = made_up_trace(1.0), section(finished("lambda"), "Temperature 1")
    seconds = {}
    for name, epsilon in (("fixed", 0.0), ("moving", 0.01), ("steep", 0.1)):
        seconds[name] = totals(trace, lambda: twins.AdaEDL(threshold=0.5, epsilon=epsilon))[0]  # noqa: B023
    text = text.split("From 0.5:")[1].split("From 0.6:")[0]
    shown = [cells(text, name) for name in adaedl.MOVES]
    for (speed, gain, *_), total in zip(shown, seconds.values(), strict=True):
        assert value(speed) == pytest.approx(over_plain(trace, total), abs=0.006)
        assert gain == "–" or value(gain) == pytest.approx(100 * (seconds["fixed"] / total - 1), abs=0.06)
    assert len({round(total, 6) for total in seconds.values()}) == 3, "nothing moved"
    rows = [row for row in rows_of(finished("lambda")) if row["task"] == "all" and row["temperature"] == 1.0]
    curves = {row["what"]: tuple(row["curve"]) for row in rows if row["what"] in adaedl.TUNED}
    assert len(curves) == 5
    del curves["updated every 16th round"]  # of some 25 rounds: once, by 0.001
    assert len(set(curves.values())) == 4


@pytest.mark.parametrize("drafter, boost", [("Worse, made up", 0.0), ("Better, made up", 0.7)])
def test_factors_of_both_drafters_are_walks(finished, drafter, boost):
    trace, text = made_up_trace(1.0, boost=boost), section(finished("factor"), f"{drafter}, temperature 1")
    for name, twin in (
        ("0.05", lambda: twins.AdaEDL(gamma=0.05)),
        ("0.2", lambda: twins.AdaEDL(gamma=0.2)),
        ("fitted", lambda: twins.AdaptiveGamma()),
    ):
        assert value(cells(text, name)[1]) == pytest.approx(over_plain(trace, totals(trace, twin)[0]), abs=0.006)
    assert cells(text, "0.05")[-1] == "1.8" and cells(text, "0.2")[-1] == "0.45"  # (1 - 0.7)^2 / factor


def texts_of(trace, task):
    return [index for index, name in enumerate(trace.about["tasks"]) if task in ("all", name)]


def test_every_text_has_the_setting_of_the_other_half(finished):
    rows = [row for row in rows_of(finished("policies")) if row["what"] == "static"]
    differ = 0
    for row in rows:
        trace = made_up_trace(row["temperature"])
        lengths, seconds = on_the_other_half(trace, texts_of(trace, row["task"]), [7, *range(17)], twins.Static)
        assert [chosen["draft_length"] for chosen in row["settings"]] == lengths
        np.testing.assert_allclose(row["seconds"], seconds)
        differ += lengths[0] != lengths[1]
    assert len(rows) == 8 and differ, "both halves always wanted the same: the halves might be mixed up"


def test_the_bound_is_compared_with_the_overlap(finished):
    trace, text = made_up_trace(1.0), section(finished("entropy"), "one pair, temperature 1")
    within = np.arange(trace.overlap.shape[1])[None, :] < trace.length[:, None]
    entropy, overlap = trace.path[..., 0][within].astype(float), trace.overlap[within].astype(float)
    line = np.maximum(1 - np.sqrt(0.2 * entropy), 0)
    below = overlap < line - 1e-6
    row = cells(text, "all")
    assert value(row[0]) == len(entropy)
    assert value(row[1]) == pytest.approx(line.mean(), abs=0.006)
    assert value(row[2]) == pytest.approx(overlap.mean(), abs=0.006)
    assert value(row[3]) == pytest.approx(100 * below.mean(), abs=0.6)
    assert value(row[4]) == pytest.approx((line - overlap)[below].mean() if below.any() else 0, abs=0.006)
    assert value(row[6]) == pytest.approx(1.2, abs=0.006)  # so it was made up


def test_positions_below_the_bound_are_counted():
    taken = np.array([0.5, 0.9, 0.6, 0.0])
    found = entropy.Positions(np.array([0, 0, 1, 1]), np.array([0.2, 0.2, 1.25, 9.0]), taken, taken > 0.5, np.ones(4))
    whole = entropy.described(found)
    assert whole["below"] == 0.25 and whole["by"] == pytest.approx(0.3)  # the bound: 0.8, 0.8, 0.5 and 0, not negative
    means = [whole["bound"], whole["acceptance"][0], whole["accepted"][0]]
    assert means == pytest.approx([2.1 / 4, 0.5, 0.5])


def test_the_papers_figures_stand_beside_ours(finished):
    text = section(finished("tables"), "Temperature 0.7")
    trace = adaedl.made_up_sets(0.7)
    texts = [index for index, task in enumerate(trace.about["tasks"]) if task == "summarization"]
    row = cells(text, "7, static")
    assert row[0] == f"{51.5 / 25.74:.2f}" and row[2] == f"{47.6 / 29.02:.2f}" and row[4] == f"{32.7 / 29.80:.2f}"
    seconds = totals(trace, lambda: twins.Static(7), 7, texts)[0]
    assert value(row[1]) == pytest.approx(over_plain(trace, seconds, texts), abs=0.006)
    (mine,) = [row for row in rows_of(finished("tables")) if (row["what"], row["task"]) == ("adaedl, 3", "all")]
    everything = range(trace.num_texts)
    chosen, seconds = on_the_other_half(trace, everything, adaedl.TRIED, lambda start: twins.AdaEDL(threshold=start), 3)
    assert [setting["threshold"] for setting in mine["settings"]] == chosen
    np.testing.assert_allclose(mine["seconds"], seconds)
    gains = cells((finished("tables") / "table.md").read_text(), "summarization, temperature 0.7")
    assert gains[0] == "+5.2 %"  # 56.9 over 54.1, as the paper's reader computes it


def test_files_costs_and_a_rule_of_ones_own(tmp_path):
    """Two drafters' traces from files, a machine by two numbers, a user's rule and its settings by --set."""
    rule = tmp_path / "short.py"
    rule.write_text("from specdec_jax.stopping import static\n\ndef short(unused: int = 0):\n    return static()\n")
    trace = made_up_trace(1.0, texts=6)
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        save_trace(tmp_path / name / "trace-1.npz", trace._replace(about=trace.about | {"drafter": name}))
    words = [str(tmp_path / "one"), str(tmp_path / "two" / "trace-1.npz"), "--ratio", "0.3", "--slope", "0.05"]
    words += ["--max-draft-length", "5", "--rules", f"{rule}(unused=1)", "--set", "draft_length=2:4:2"]
    assert policies.main([*words, "--out", str(tmp_path / "out")]) == 0
    costs = cost_model(0.3, {width: 1 + 0.05 * (width - 1) for width in range(1, 7)})
    text = section(tmp_path / "out", "Two, temperature 1")
    for length in (2, 4):
        seconds = totals(trace, lambda: twins.Static(length), 5, costs=costs)[0]  # noqa: B023
        shown = value(cells(text, f"short(unused=1) draft_length={length}")[0])
        assert shown == pytest.approx(over_plain(trace, seconds, costs=costs), abs=0.006)


def test_acceptance_by_entropy_of_a_pair_by_a_plain_loop(finished):
    trace = made_up_trace(1.0, boost=0.7)
    positions = [(text, at) for text in range(trace.num_texts) for at in range(trace.length[text])]
    seen = sorted((float(trace.path[place][0]), bool(trace.accepted[place])) for place in positions)
    wanted = [np.mean([seen[i] for i in part], axis=0) for part in np.array_split(np.arange(len(seen)), 5)]
    rows = [row for row in rows_of(finished("entropy")) if (row["group"], row["task"]) == ("another", "all")]
    found = {row["what"]: row for row in rows}
    fine = [(part["entropy"], part["accepted"][0]) for part in found["bound"]["fine"]]
    np.testing.assert_allclose(fine, wanted)
    factor = found["bound"]["factor"][0]
    assert 0.15 < factor < 0.27  # made with 0.2
    seconds = totals(trace, lambda: twins.AdaEDL(gamma=factor))[0]
    assert np.sum(found[entropy.FITTED]["seconds"]) == pytest.approx(seconds)


def test_a_pair_of_drafter_and_target_may_come_once(tmp_path, capsys):
    trace = made_up_trace(1.0, texts=4, tokens=16)
    for folder, target in (("gpt2", "smollm2"), ("gemma", "/some/gemma.gguf"), ("again", "smollm2")):
        (tmp_path / folder).mkdir()
        about = trace.about | {"drafter": "runs/gpt2-shaped/drafter", "target": target}
        save_trace(tmp_path / folder / "trace-1.npz", trace._replace(about=about))
    folders = [str(tmp_path / folder) for folder in ("gpt2", "gemma", "again")]
    assert entropy.main([*folders[:2], "--out", str(tmp_path / "out")]) == 0
    assert entropy.main([*folders, "--out", str(tmp_path / "twice")]) == 2
    assert "one trace of runs/gpt2-shaped/drafter for smollm2 a temperature" in capsys.readouterr().err
    assert not (tmp_path / "twice").exists()
