"""experiments.compare from config to picture on tiny models: what it writes, how it goes on, what it refuses."""

import json
import re
from pathlib import Path

import numpy as np
import pytest
from pages import documented_columns
from tiny_compare import write_config

from experiments import compare
from experiments.compare import by_method, main
from experiments.lib.run_folder import read_rows as rows
from experiments.lib.tables import against_table, summarise
from specdec_jax import SamplingParams, build_pair, generate
from specdec_jax.costs.cost_model import cost_model
from specdec_jax.text import pair

pytestmark = pytest.mark.slow

KEYS = ("temperature", "prompt_id", "method")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    options = "temperatures=(0.0, 1.0), max_new_tokens=8, max_draft_length=2, verification_widths=(3,)"
    return write_config(tmp_path_factory.mktemp("compare"), 'Method("static-2", static(draft_length=2))', options)


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """(exit code, the run folder) of one whole run."""
    out = tmp_path_factory.mktemp("run") / "out"
    return main([str(config), "--out", str(out)]), out


def test_a_run_writes_four_files_with_every_result(finished):
    """The columns of a row are those of docs/every_rule.md."""
    code, out = finished
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "results.jsonl", "speedup.png", "table.md"]
    found, methods = rows(out), ("plain", "static-2")
    jobs = [(t, prompt, method) for t in (0.0, 1.0) for prompt in ("one", "two") for method in methods]
    assert [tuple(row[key] for key in KEYS) for row in found] == jobs
    assert all(documented_columns("Runs by the clock") == {*row} for row in found)
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(manifest["compile_seconds"]) == {*methods} and manifest["config"]["dtype"] == "float32"
    assert manifest["compile_seconds"]["static-2"] > 0 and (out / "speedup.png").read_bytes().startswith(b"\x89PNG")
    text = (out / "table.md").read_text()
    assert text.count("| static-2 |") + text.count("| **static-2** |") == 2
    assert "Greedy: 2 of 2 outputs equal plain decoding token for token." in text and "Doubtful" not in text
    plain, static = found[:2]
    assert plain["equals_plain"] is None and static["equals_plain"] is True
    target = build_pair(manifest["config"]["target"], None, dtype="float32")
    wanted = generate("hello", SamplingParams(max_new_tokens=8), pair=target, chat=False).tokens
    assert plain["tokens"] == wanted == static["tokens"]
    assert plain["num_emitted_tokens"] == static["num_emitted_tokens"] == 8
    assert plain["num_drafts"] == 0 < static["num_accepted_tokens"] <= static["num_draft_tokens"]
    assert sum(static["accepted_at"]) == static["num_accepted_tokens"] and len(static["accepted_at"]) == 2
    assert static["policy_hyperparameters"] == {"draft_length": 2} and static["monitor_hyperparameters"] == {}
    assert plain["seconds"] > 0 and plain["text"] and plain["category"] == "a"
    assert all(row["equals_plain"] is None for row in found if row["temperature"] > 0)


def test_repeats_draw_with_the_next_seed(config, tmp_path):
    options = ["--temperatures", "0", "1", "--repeats", "2", "--seed", "3", "--only", "static-2"]
    assert main([str(config), "--out", str(tmp_path / "out"), *options]) == 0
    found = {(row["temperature"], row["repeat"]): row["tokens"] for row in rows(tmp_path / "out")}
    assert found[0.0, 0] == found[0.0, 1] and found[1.0, 0] != found[1.0, 1]


def test_methods_are_measured_against_another_one_too(finished):
    """Of each prompt twice as fast, and three times: 2.5 on average, 2.4 by totals."""
    row = next(row for row in rows(finished[1]) if row["method"] == "static-2")
    times = {("one", "a"): 6.0, ("one", "b"): 3.0, ("two", "a"): 6.0, ("two", "b"): 2.0}
    made = [row | {"prompt_id": prompt, "method": name, "seconds": times[prompt, name]} for prompt, name in times]
    table = against_table(summarise(made, "a"), "a")
    assert table.splitlines()[2].startswith("| b | 2.50 [2.00–3.00], total 2.40 [") and "| a |" not in table


def test_a_stopped_run_goes_on_and_a_finished_one_is_only_reported_again(finished, config, tmp_path, monkeypatch):
    """Each method is compiled when its turn comes."""
    whole, out, events = finished[1], tmp_path / "out", []
    out.mkdir()
    (out / "manifest.json").write_bytes((whole / "manifest.json").read_bytes())
    lines = (whole / "results.jsonl").read_bytes().splitlines(keepends=True)
    (out / "results.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:40])  # killed inside a line
    warm_up, row = compare._warm_up, compare._row
    monkeypatch.setattr(compare, "_warm_up", lambda *args: events.append(f"+{args[0]}") or warm_up(*args))
    monkeypatch.setattr(compare, "_row", lambda *args: events.append(args[0][-1]) or row(*args))
    assert main([str(config), "--out", str(out)]) == 0
    assert events == ["+static-2", "static-2", "+plain", "plain", "static-2"]
    again = rows(out)
    assert [row["tokens"] for row in again] == [row["tokens"] for row in rows(whole)]
    assert [row["seconds"] for row in again[:5]] == [row["seconds"] for row in rows(whole)[:5]]
    assert (out / "table.md").exists() and (out / "speedup.png").exists()
    before = (out / "manifest.json").read_text()
    monkeypatch.setattr(compare, "start", lambda *args: pytest.fail("something was decoded"))
    assert main([str(config), "--out", str(out)]) == 0
    seconds = [json.loads(text)["compile_seconds"] for text in (before, (out / "manifest.json").read_text())]
    assert seconds[0] == seconds[1]


def test_doubtful_costs_are_marked_and_compared_with_plain_decoding(config, tmp_path, monkeypatch, capsys):
    """On the screen, in table.md and in the manifest."""
    costs = cost_model(0.01, {1: 5.0, 3: 5.0}, slots=512, doubts=("the load average was 9.0 on 2 cores",))
    monkeypatch.setattr(pair, "measured", lambda *models, **options: costs)
    options = ["--costs", "measured", "--temperatures", "0", "--limit", "1", "--out", str(tmp_path / "out")]
    assert main([str(config), *options]) == 0
    plain, drafted = rows(tmp_path / "out")
    assert plain["predicted_seconds"] == 5.0 * plain["num_rounds"] == 40.0
    assert drafted["predicted_seconds"] == pytest.approx(5.0 * drafted["num_rounds"] + 0.01 * drafted["drafter_passes"])
    assert json.loads((tmp_path / "out/costs.json").read_text())["static-2"]["plain_pass"] == 5.0
    screen, table = " ".join(capsys.readouterr().out.split()), (tmp_path / "out/table.md").read_text()
    load, decoding = json.loads((tmp_path / "out/manifest.json").read_text())["doubts"]
    assert load == "the load average was 9.0 on 2 cores" and decoding.startswith("decoding took 0.")
    assert all(f"{load}; {decoding}." in text for text in (screen, table))
    assert "\n| static-2 | " in table.partition("| predicted over measured | greedy |")[2]
    began = json.loads((tmp_path / "out/costs.json").read_text())
    began["of another drafter"] = began["static-2"] | {"plain_pass": 6.0}
    (tmp_path / "out/costs.json").write_text(json.dumps(began))
    assert main([str(config), *options]) == 0
    assert "took 5000.00 and 6000.00 ms; decoding" in (tmp_path / "out/table.md").read_text()


def test_a_method_may_bring_its_own_drafter(config, tmp_path):
    """Lookup beside model drafting on one target: the same greedy texts, and no drafter passes."""
    path, out = tmp_path / "config.py", tmp_path / "out"
    more = 'Method("lookup", static(), drafter="prompt_lookup(longest=2)"), '
    more += 'Method("both", static(), drafter=("prompt_lookup", "ngram")), Method("never", adaedl(threshold=0.99)), '
    text = config.read_text().replace('Method("static-2"', f'{more}Method("static-2"')
    path.write_text(text.replace("(0.0, 1.0)", "(0.0,)").replace("max_new_tokens=8", "max_new_tokens=24"))
    assert main([str(path), "--out", str(out)]) == 0
    found = {(row["prompt_id"], row["method"]): row for row in rows(out)}
    for prompt in ("one", "two"):
        assert len({found[prompt, method]["text"] for method in ("plain", "static-2", "lookup", "both")}) == 1
        assert found[prompt, "lookup"]["drafter_passes"] == 0 < found[prompt, "static-2"]["drafter_passes"]
    assert sum(found[prompt, "lookup"]["num_draft_tokens"] for prompt in ("one", "two")) > 0
    assert re.findall(r"(.+) drafted nothing: try a lower", (out / "table.md").read_text()) == ["never"]


LOSSY = {"rejection": "rejection()", "tenth": "lenience(lenience=0.1)", "by-phase": "by_phase(lenience=0.5)"}
LOSSY_OPTIONS = 'temperatures=(0.0, 1.0), repeats=2, max_new_tokens=12, against="rejection", quality=True'
LOSSY_METHODS = ("plain", *LOSSY)


@pytest.fixture(scope="module")
def lossy_config(tmp_path_factory):
    methods = (f'Method("{name}", static(draft_length=4), verifier={text})' for name, text in LOSSY.items())
    return write_config(tmp_path_factory.mktemp("lossy"), ", ".join(methods), LOSSY_OPTIONS)


@pytest.fixture(scope="module")
def lossy(lossy_config):
    assert main([str(lossy_config), "--out", str(lossy_config.parent / "out")]) == 0
    return lossy_config.parent / "out"


@pytest.mark.seldom
def test_the_figures_are_those_of_the_rows(lossy):
    found, figures = rows(lossy), {}
    assert [row["method"] for row in found[:4]] == list(LOSSY_METHODS) and len(found) == 2 * 2 * 2 * 4
    for temperature in (0.0, 1.0):
        here = [row for row in found if row["temperature"] == temperature]
        figures = by_method(here)
        for name, means in figures.items():
            mine = [[row["log_likelihood"] for row in here if (row["method"], row["prompt_id"]) == (name, prompt)]
                    for prompt in ("one", "two")]  # fmt: skip
            assert means["log_likelihood"] == pytest.approx(np.mean(mine, axis=1))
        assert figures["rejection"]["total_variation"].max() < 1e-5 < 0.01 < figures["tenth"]["total_variation"].mean()
        assert figures["plain"]["total_variation"].max() < 1e-5
        assert np.isnan(figures["by-phase"]["total_variation"]).all() and figures["plain"]["before"] is None
        assert temperature or (figures["rejection"]["before"], figures["rejection"]["first_choice"].min()) == (1, 1)
        assert temperature or figures["tenth"]["before"] < 1
    assert np.isnan(figures["by-phase"]["divergence"]).all()


def test_the_tables_have_the_quality_of_every_method(lossy):
    greedy, sampled = (part.split("\n\n")[1].splitlines()[2:] for part in
                       (lossy / "table.md").read_text().split("## Quality, ")[1:])  # fmt: skip
    cells = {line.split(" | ")[0].strip("| "): line.strip("|").split(" | ")[1:] for line in greedy}
    assert tuple(cells) == LOSSY_METHODS and len(sampled) == len(greedy)
    exact = cells["rejection"]
    assert exact[1:] == ["+0.000", "0.0000", exact[3], "100.0%", "100.0% "] and cells["by-phase"][2:4] == ["–", "–"]


@pytest.mark.essential
def test_the_demo_on_two_prompts(tmp_path):
    """Real weights, in programs that are not optimised: greedy texts equal plain decoding's, but for near ties."""
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"  # two short ones of the demo
    prompts.write_text("".join(Path("configs/prompts/demo.jsonl").read_text().splitlines(keepends=True)[8::2]))
    options = ["--prompts", str(prompts), "--temperatures", "0", "--max-new-tokens", "16", "--out", str(out)]
    options += ["--costs", "configs/costs/cpu.json", "--max-draft-length", "3", "--verification-widths", "4"]
    assert main(["configs/demo.py", *options, "--only", "adaedl", "survival"]) == 0
    assert re.search(r"plain(?:\*\*)? \| [\d.]+ \| 1\.00 \| 1\.00 \| 1\.00 \|", (out / "table.md").read_text())
    for row, method in zip(rows(out), ["plain", "adaedl", "survival"] * 2, strict=True):
        difference = row["first_difference"] or {"logit_gap": 0.0}
        assert row["method"] == method and difference["logit_gap"] < compare.CLOSE_GAP
        drafts = row["num_rounds"] < 16, row["num_accepted_tokens"] > 0, row["equals_plain"] is not None
        assert row["num_emitted_tokens"] == len(row["tokens"]) == 16 and drafts == 3 * (method != "plain",)


def test_tokens_after_the_first_difference_are_not_equal():
    row = {"method": "m", "prompt_id": "p", "log_likelihood": -1.0, "total_variation": 0.5, "divergence": None}
    row |= {"first_choice": 1.0, "equals_plain": False, "first_difference": {"position": 2}, "tokens": [1, 2, 3, 4]}
    whole = row | {"prompt_id": "q", "equals_plain": True, "first_difference": None, "tokens": [5]}
    assert by_method([row, whole])["m"]["before"] == 3 / 5
