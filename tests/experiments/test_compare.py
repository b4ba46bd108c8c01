"""experiments.compare from config to picture on tiny models: what it writes, how it goes on, what it refuses."""

import json

import pytest
from pages import documented_columns
from tiny_pair import write_pair

from experiments import compare
from experiments.compare import equality_summary, main
from experiments.lib.summary import against_table, summarise
from specdec_jax.costs.cost_model import cost_model
from specdec_jax.text import generation, pair
from specdec_jax.text.generation import build_pair, generate
from specdec_jax.text.sampling_params import SamplingParams

pytestmark = pytest.mark.slow

CONFIG = """
from configs.base import CompareConfig, Method
from specdec_jax.stopping import static

config = CompareConfig(
    name="tiny",
    prompts={prompts!r},
    methods=(Method("plain", policy=None), Method("static-2", static(draft_length=2))),
    target={target!r},
    drafter={drafter!r},
    dtype="float32",
    temperatures=(0.0, 1.0),
    max_new_tokens=8,
    max_draft_length=2,
    verification_widths=(3,),
    chat=False,
)
"""
KEYS = ("temperature", "prompt_id", "method")


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    folder = tmp_path_factory.mktemp("compare")
    target, drafter = write_pair(folder)
    prompts = folder / "prompts.jsonl"
    lines = [{"id": "one", "category": "a", "text": "hello"}, {"id": "two", "category": "b", "text": "why?"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    path = folder / "config.py"
    path.write_text(CONFIG.format(prompts=str(prompts), target=target, drafter=drafter))
    return path


@pytest.fixture(scope="module")
def finished(config, tmp_path_factory):
    """(exit code, the run folder) of one whole run."""
    out = tmp_path_factory.mktemp("run") / "out"
    return main([str(config), "--out", str(out)]), out


def test_the_columns_are_those_of_the_page(finished):
    """Of docs/every_rule.md."""
    columns = documented_columns("Runs by the clock")
    assert all(columns == {*row} for row in rows(finished[1]))


def rows(folder):
    return [json.loads(line) for line in (folder / "results.jsonl").read_text().splitlines()]


def test_a_run_writes_four_files_with_every_result(finished):
    code, out = finished
    assert code == 0
    assert sorted(path.name for path in out.iterdir()) == ["manifest.json", "results.jsonl", "speedup.png", "table.md"]
    found = [tuple(row[key] for key in KEYS) for row in rows(out)]
    methods = ("plain", "static-2")
    assert found == [(t, prompt, method) for t in (0.0, 1.0) for prompt in ("one", "two") for method in methods]
    manifest = json.loads((out / "manifest.json").read_text())
    assert set(manifest["compile_seconds"]) == {"plain", "static-2"}
    assert manifest["compile_seconds"]["static-2"] > 0 and manifest["config"]["dtype"] == "float32"
    assert (out / "speedup.png").read_bytes().startswith(b"\x89PNG")


def test_a_row_says_what_was_decoded(finished, config):
    _, out = finished
    plain, static = rows(out)[:2]
    assert plain["equals_plain"] is None and static["equals_plain"] is True
    target = build_pair(json.loads((out / "manifest.json").read_text())["config"]["target"], None, dtype="float32")
    assert (
        plain["tokens"]
        == generate("hello", SamplingParams(max_new_tokens=8), pair=target, chat=False).tokens
        == static["tokens"]
    )
    assert plain["num_emitted_tokens"] == static["num_emitted_tokens"] == 8
    assert plain["num_drafts"] == 0 < static["num_accepted_tokens"] <= static["num_draft_tokens"]
    assert sum(static["accepted_at"]) == static["num_accepted_tokens"] and len(static["accepted_at"]) == 2
    assert plain["seconds"] > 0 and plain["text"] and plain["category"] == "a"
    assert all(row["equals_plain"] is None for row in rows(out) if row["temperature"] > 0)


def test_repeats_draw_with_the_next_seed(config, tmp_path):
    options = ["--temperatures", "0", "1", "--repeats", "2", "--seed", "3", "--only", "static-2"]
    assert main([str(config), "--out", str(tmp_path / "out"), *options]) == 0
    found = {(row["temperature"], row["repeat"]): row["tokens"] for row in rows(tmp_path / "out")}
    assert found[0.0, 0] == found[0.0, 1] and found[1.0, 0] != found[1.0, 1]


def test_the_table_has_greedy_and_sampled_rows_and_the_equality(finished):
    text = (finished[1] / "table.md").read_text()
    assert text.count("| static-2 |") + text.count("| **static-2** |") == 2
    assert "Greedy: 2 of 2 outputs equal plain decoding token for token." in text and "Doubtful" not in text


def test_methods_are_measured_against_another_one_too(finished):
    """Of each prompt twice as fast, and three times: 2.5 on average, 2.4 by totals."""
    row = next(row for row in rows(finished[1]) if row["method"] == "static-2")
    made = [
        row | {"method": name, "prompt_id": prompt, "seconds": seconds}
        for prompt, slow, fast in (("one", 6.0, 3.0), ("two", 6.0, 2.0))
        for name, seconds in (("a", slow), ("b", fast))
    ]
    table = against_table(summarise(made, "a"), "a")
    assert table.splitlines()[0] == "| over a | greedy |" and "| a |" not in table
    assert table.splitlines()[2].startswith("| b | 2.50 [2.00–3.00], total 2.40 [")


def test_a_stopped_run_goes_on_where_it_was(finished, config, tmp_path, monkeypatch, capsys):
    whole, out = rows(finished[1]), tmp_path / "out"
    out.mkdir()
    for name in ("manifest.json", "results.jsonl"):
        (out / name).write_bytes((finished[1] / name).read_bytes())
    lines = (out / "results.jsonl").read_bytes().splitlines(keepends=True)
    (out / "results.jsonl").write_bytes(b"".join(lines[:5]) + lines[5][:40])  # killed inside a line
    measured = []
    real = compare._measure
    monkeypatch.setattr(compare, "_measure", lambda *args: measured.append(args[0].key) or real(*args))
    assert main([str(config), "--out", str(out)]) == 0
    assert len(measured) == 3
    shown = [line.split() for line in capsys.readouterr().out.splitlines() if "tokens/s" in line]
    lines = [line for line in shown if "temperature" in line]
    assert [(line[0], line[1], line[3]) for line in lines] == [(key[3], key[1], f"{key[0]:g}") for key in measured]
    assert all(float(line[4]) > 0 and float(line[6]) > 0 for line in lines)
    again = rows(out)
    assert [row["tokens"] for row in again] == [row["tokens"] for row in whole]
    assert [row["seconds"] for row in again[:5]] == [row["seconds"] for row in whole[:5]]
    assert (out / "table.md").exists() and (out / "speedup.png").exists()


def test_a_finished_run_is_only_reported_again(finished, config, monkeypatch, capsys):
    before = (finished[1] / "manifest.json").read_text()
    monkeypatch.setattr(compare, "decode", lambda *args: pytest.fail("something was decoded"))
    assert main([str(config), "--out", str(finished[1])]) == 0
    assert "outputs equal plain decoding" in capsys.readouterr().out
    seconds = [json.loads(text)["compile_seconds"] for text in (before, (finished[1] / "manifest.json").read_text())]
    assert seconds[0] == seconds[1]


def test_each_method_is_compiled_when_its_turn_comes_and_the_last_can_be_seen_live(config, tmp_path, monkeypatch):
    events = []
    warm_up, measure = compare._warm_up, compare._measure
    monkeypatch.setattr(compare, "_warm_up", lambda *args: events.append(f"+{args[1].name}") or warm_up(*args))
    monkeypatch.setattr(compare, "_measure", lambda *args: events.append(args[0].method.name) or measure(*args))
    monkeypatch.setattr(compare, "show_live", lambda console, pair, name, *args, **kw: events.append(f"live {name}"))
    assert main([str(config), "--out", str(tmp_path / "out"), "--limit", "1", "--temperatures", "0", "--live"]) == 0
    assert events == ["+plain", "plain", "+static-2", "static-2", "live static-2"]
    assert main([str(config), "--out", str(tmp_path / "out"), "--limit", "1", "--temperatures", "0", "--live"]) == 0
    assert len(events) == 5


def test_doubtful_costs_are_marked_and_measured_again_when_plain_decoding_disagrees(
    config, tmp_path, monkeypatch, capsys
):
    """On the screen, in table.md and in the manifest; the methods decode with the second measurement."""
    slow = cost_model(0.01, {1: 9.0, 3: 9.0}, slots=512, doubts=("a pass fell",))
    again = cost_model(0.01, {1: 5.0, 3: 5.0}, slots=512, doubts=("the load average was 9.0 on 2 cores",))
    measurements, looked = [slow, again], []

    def look(costs, counts, seconds):
        looked.append((costs, int(counts.num_rounds[0])))
        return costs.plain_pass == 9.0 and measurements.pop(0) is slow

    monkeypatch.setattr(pair, "measured", lambda *models, **options: measurements[0])
    for module in (compare, generation):
        monkeypatch.setattr(module, "look_at", look)
    options = ["--costs", "measured", "--temperatures", "0", "--limit", "1", "--out", str(tmp_path / "out")]
    assert main([str(config), *options]) == 0
    plain, drafted = rows(tmp_path / "out")
    assert [costs.plain_pass for costs, _ in looked] == [9.0, 5.0, 5.0] and looked[0][1] == 8
    assert plain["predicted_seconds"] == 5.0 * plain["num_rounds"] == 40.0
    assert drafted["predicted_seconds"] == pytest.approx(5.0 * drafted["num_rounds"] + 0.01 * drafted["drafter_passes"])
    assert json.loads((tmp_path / "out/costs.json").read_text())["static-2"]["plain_pass"] == 5.0
    screen, table = capsys.readouterr().out, (tmp_path / "out/table.md").read_text()
    manifest = json.loads((tmp_path / "out/manifest.json").read_text())
    load, decoding = manifest["doubts"]
    assert load == "the load average was 9.0 on 2 cores" and decoding.startswith("decoding took 0.")
    for text in (" ".join(screen.split()), table):
        assert f"Doubtful, measured on a busy machine: {load}; {decoding}." in text
        assert "Plain decoding in float32; not measured beside another dtype here." in text
    assert "plain decoding disagrees with these costs: measuring them again" in " ".join(screen.split())


def test_ctrl_c_says_how_to_go_on(config, tmp_path, monkeypatch, capsys):
    def interrupted(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(compare, "_warm_up", interrupted)
    assert main([str(config), "--out", str(tmp_path / "out")]) == 130
    captured = capsys.readouterr()
    assert f"--out {tmp_path / 'out'}" in captured.out.replace("\n", "") and captured.err == "interrupted\n"


def refused(capsys, monkeypatch, *arguments):
    """The one line of an exit code 2; nothing may have been compiled or decoded by then."""
    monkeypatch.setattr(compare, "decode", lambda *args: pytest.fail("something was compiled"))
    assert main([str(argument) for argument in arguments]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: ") and captured.err.count("\n") == 1
    return captured.err


def test_bad_input_is_one_line_and_leaves_nothing_behind(config, tmp_path, monkeypatch, capsys):
    def refuses(message, *arguments):
        assert message in refused(capsys, monkeypatch, config, "--out", tmp_path / "out", *arguments)
        assert not (tmp_path / "out").exists()

    refuses("unknown option --max-new-tokns; did you mean '--max-new-tokens'", "--max-new-tokns", "3")
    refuses("no prompt file 'nowhere.jsonl'", "--prompts", "nowhere.jsonl")
    refuses("no model 'nowhere'", "--target", "nowhere")
    refuses("prompt 'two' of 4 tokens and 125 new ones exceed the context of", "--max-new-tokens", "125")
    refuses("widest verification width 3 cannot hold max_draft_length 5", "--max-draft-length", "5")


def test_an_unwritable_folder_and_a_strangers_are_refused(config, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    assert "cannot write the run folder" in refused(capsys, monkeypatch, config, "--out", tmp_path / "file" / "out")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").write_text("precious")
    assert "no run folder (it holds 'thesis.tex')" in refused(capsys, monkeypatch, config, "--out", tmp_path / "mine")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["thesis.tex"]


def test_a_misspelt_key_and_no_config_at_all(config, tmp_path, monkeypatch, capsys):
    wrong = tmp_path / "wrong.py"
    wrong.write_text(config.read_text().replace("max_new_tokens=", "max_new_token="))
    message = refused(capsys, monkeypatch, wrong)
    assert "wrong.py:5: CompareConfig has no 'max_new_token'; did you mean 'max_new_tokens'" in message
    assert "name a config first" in refused(capsys, monkeypatch)
    assert main(["--help"]) == 0
    assert "python -m experiments.compare configs/demo.py" in capsys.readouterr().out


def test_the_equality_summary_names_every_difference_and_its_gap():
    def row(method, equal, position=None, gap=None):
        difference = None if equal else {"position": position, "tokens": [1, 2], "logit_gap": gap}
        return {"method": method, "prompt_id": "p", "equals_plain": equal, "first_difference": difference}

    assert equality_summary([row("a", None), row("a", None)]) == "No greedy outputs to compare."
    assert equality_summary([row("a", True)]) == "Greedy: 1 of 1 outputs equal plain decoding token for token."
    lines = equality_summary(
        [row("a", True), row("b", False, 7, 0.03), row("c", False, 9, 1.5), row("d", False, 3)]
    ).splitlines()
    assert lines[0] == "Greedy: 1 of 4 outputs equal plain decoding token for token."
    assert lines[1] == "  b on p: diverges at token 7, logit gap 0.030 (a numerical near tie)"
    assert lines[2] == "  c on p: diverges at token 9, logit gap 1.500"
    assert lines[3] == "  d on p: diverges at token 3, one of them had ended"


def test_a_method_may_bring_its_own_drafter(config, tmp_path):
    """Lookup beside model drafting on one target: the same greedy texts, and no drafter passes."""
    path, out = tmp_path / "config.py", tmp_path / "out"
    more = """, Method("lookup", static(), drafter="prompt_lookup(longest=2)"),
        Method("both", static(), drafter=("prompt_lookup", "ngram"))),"""
    text = config.read_text().replace("),\n    target=", more + "\n    target=")
    path.write_text(text.replace("(0.0, 1.0)", "(0.0,)").replace("max_new_tokens=8", "max_new_tokens=24"))
    assert main([str(path), "--out", str(out)]) == 0
    found = {(row["prompt_id"], row["method"]): row for row in rows(out)}
    for prompt in ("one", "two"):
        assert len({found[prompt, method]["text"] for method in ("plain", "static-2", "lookup", "both")}) == 1
        assert found[prompt, "lookup"]["drafter_passes"] == 0 < found[prompt, "static-2"]["drafter_passes"]
    assert sum(found[prompt, "lookup"]["num_draft_tokens"] for prompt in ("one", "two")) > 0
