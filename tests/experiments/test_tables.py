"""The archive of results: what is recorded, how settings are chosen, intervals, and tables that agree with pages."""

import dataclasses
import json
import shutil

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from configs.base import Contrast, EvidenceConfig, JudgedRule, PromptKind, RecordedPair, load_config
from experiments import policies, record, tables
from experiments.lib import archive as files
from experiments.lib.smoke import made_up_trace
from experiments.lib.trace_runs import half_of
from specdec_jax.costs.cost_model import cost_model, save_cost_model
from specdec_jax.replay.replay import replay
from specdec_jax.replay.trace import load_trace
from specdec_jax.stopping import static

COSTS = cost_model(0.1, {1: 1.0, 4: 1.1, 8: 1.2, 16: 1.5}, plain_pass=1.0, device="a machine")
PAIRS = tuple(RecordedPair(name, target, "x", 4, (0.0, 0.7, 1.3), 2) for name, target in (("a", "one"), ("b", "two")))
CONFIG = EvidenceConfig(
    name="small",
    kinds=(PromptKind("code", "p.jsonl", ("python", "c")), PromptKind("chat", "p.jsonl", ("talk",))),
    pairs=PAIRS,
    rules=(
        JudgedRule("static", "static", "here"),
        JudgedRule("mine", "adaedl", "elsewhere"),
        JudgedRule("static-8", "static(draft_length=8)"),
    ),
    contrasts=(Contrast("first", "mine", "static", "faster", "Because."),),
    long_share=2,
)


def test_a_contrast_names_rules_and_targets_that_are_there():
    statik = Contrast("wrong", "mine", "statik", "faster", "")
    elsewhere = Contrast("wrong", "mine", "static", "faster", "", targets=("x",))
    for wrong, said in ((statik, "did you mean 'static'"), (elsewhere, "no recorded target: x")):
        with pytest.raises(ValueError, match=said):
            dataclasses.replace(CONFIG, contrasts=(wrong,))


def test_cells_are_recorded_seed_by_seed_and_prompts_are_evenly_spaced(tmp_path):
    paths = [str(cell.path) for cell in record.cells(CONFIG)]
    first = [f"{pair}/128-seed0/trace-{t}.npz" for t in ("0", "0.7") for pair in "ab"]
    at_length = [path.replace("128", "512") for path in first]
    hot = [f"{pair}/128-seed0/trace-1.3.npz" for pair in "ab"]
    again = [f"{pair}/128-seed1000/trace-{t}.npz" for t in ("0.7", "1.3") for pair in "ab"]
    assert paths == [*first, *at_length, *hot, *again]
    kinds = ["python", "talk", "c"] * 5
    lines = [{"question_id": i, "category": kind, "turns": [f"{i}"]} for i, kind in enumerate(kinds)]
    (tmp_path / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    config = dataclasses.replace(CONFIG, data=str(tmp_path))
    chosen, at_length = record.prompts_of(config, PAIRS[0])
    assert [prompt.id for prompt in chosen] == ["0", "3", "8", "11", "1", "4", "7", "10"]  # of 10 and of 5
    assert [prompt.category for prompt in chosen] == ["code"] * 4 + ["chat"] * 4
    assert [prompt.id for prompt in at_length] == ["0", "8", "1", "7"]


def group(target, seconds):
    """Texts of 100 tokens with two seeds, and a rule that took `seconds` [settings, N], seed by seed."""
    pair, seconds = next(pair for pair in PAIRS if pair.target == target), np.asarray(seconds, float)
    prompts = seconds.shape[1] // 2
    traces = [made_up_trace(0.7, texts=prompts)._replace(length=np.full(prompts, 100, np.int32))] * 2
    texts = files.Texts([record.Cell(pair, 0.7, seed, 128) for seed in (0, 1000)], traces, COSTS)
    settings = [{}, *({"threshold": 0.1 * number} for number in range(1, len(seconds)))]
    return texts, files.Replays(settings, seconds, *[np.zeros((*seconds.shape, 15))] * 4)


def test_a_setting_is_chosen_on_the_other_half_elsewhere_or_by_the_price():
    first = half_of(4, 0)
    fast_on_first = np.where(first, 10.0, 50.0)
    seconds = np.tile([np.full(4, 30.0), fast_on_first, 60.0 - fast_on_first], 2)  # both seeds alike
    here, mine = group("one", seconds)
    key = "a", 0.7, 128
    gains = [files.Gain("one", key, {"adaedl": [9, 0, 0]}), files.Gain("two", ("b", 0.7, 128), {"adaedl": [1, 2, 3]})]
    gains += [files.Gain("two", ("b", 1.0, 128), {"adaedl": [9, 0, 0]}), files.Gain("two", ("c", 0.7, 128), {})]

    def chosen(choice, gains=gains):
        played = {"adaedl": mine, "static": mine}
        return files.choose(JudgedRule("mine", "adaedl", choice), key, here, played, gains)

    assert chosen("default").tolist() == [0] * 8
    assert chosen("here").tolist() == np.tile(np.where(first, 2, 1), 2).tolist()
    assert chosen("elsewhere").tolist() == [2] * 8  # of the other target at that temperature
    assert chosen("elsewhere", gains[:1]) is None
    # the best static setting of either half emits 10 tokens a plain pass: the price, 10 (0.1 + 0.5 / 8), is above 0.2
    assert chosen("price").tolist() == [2] * 8


def test_intervals_resample_targets_prompts_and_seeds():
    rng = np.random.default_rng(0)
    time = rng.gamma(4.0, 1.0, (40, 1))
    whole = files.hierarchical([[(1.2 * time + rng.normal(0, 0.3, (40, 1)), time)]])
    assert whole.low < 1.2 < whole.high and whole.high - whole.low < 0.2
    # of three seeds each counts a third
    seeds = np.array([[1.0, 2.0, 3.0]]), np.array([[1.0, 1.0, 1.0]])
    assert (whole := files.hierarchical([[seeds]])).estimate == pytest.approx(2.0) and whole.low < 1.5
    # two temperatures of a target share the prompts that are drawn
    up, flat = np.array([[1.0], [3.0]]), np.array([[1.0], [1.0]])
    opposite = files.hierarchical([[(up, flat), (up[::-1], flat)]])
    assert opposite == pytest.approx((2.0, 2.0, 2.0))
    # targets that differ widen the interval, however many prompts they have
    many = [np.full((400, 1), value) for value in (0.9, 1.2)]
    apart = files.hierarchical([[(each, np.ones((400, 1)))] for each in many])
    assert apart.low == pytest.approx(0.9) and apart.high == pytest.approx(1.2)


def test_simulated_coverage_is_near_its_level_with_many_prompts_and_falls_with_few_targets():
    rng = np.random.default_rng(1)

    def made(targets, spread):
        times = [rng.gamma(4.0, 1.0, (60, 1)) for _ in range(targets)]
        return [[(np.exp(spread * rng.normal()) * time * rng.normal(1.1, 0.1, time.shape), time)] for time in times]

    assert 0.9 < files.coverage(made(1, 0.0)) <= 0.99 and files.coverage(made(3, 0.1)) < 0.9


def test_verdicts():
    for expected, ratio, verdict in (
        ("faster", (1.1, 1.01, 1.2), "confirmed"),
        ("faster", (0.9, 0.8, 0.99), "refuted"),
        ("slower", (0.9, 0.8, 0.99), "confirmed"),
        ("slower", (1.0, 0.8, 1.1), "open"),
        ("level", (1.0, 0.98, 1.02), "confirmed"),
        ("level", (1.0, 0.9, 1.02), "open"),
        ("level", (1.1, 1.05, 1.2), "refuted"),
    ):
        assert tables.verdict_of(expected, files.Interval(*ratio)) == verdict


@pytest.fixture(scope="module")
def recording(tmp_path_factory, tiny_folders):
    """Traces of tiny models, recorded by a config, and its archive."""
    folder = tmp_path_factory.mktemp("recording")
    target, drafter = tiny_folders
    lines = [{"question_id": i, "category": "talk", "turns": [f"Count {i}"]} for i in range(4)]
    (folder / "p.jsonl").write_text("\n".join(map(json.dumps, lines)))
    other = folder / "other"
    shutil.copytree(target, other)
    options = "4, (0.0, 0.7), 2, chat=False"
    pairs = [f'RecordedPair("{n}", "{t}", "{drafter}", {options})' for n, t in (("a", target), ("b", other))]
    words = {"adaedl 0.7": "adaedl", "adaedl, lambda fixed": "adaedl-fixed", "static-8": "static(draft_length=8)"}
    choices = {name: "here" if name == "adaedl" else "default" for name in (*tables.CORE, *words)}
    rules = [f'JudgedRule("{name}", "{words.get(name, name)}", "{choice}")' for name, choice in choices.items()]
    (folder / "small.py").write_text(
        "from configs.base import Contrast, EvidenceConfig, JudgedRule, PromptKind, RecordedPair\n"
        "config = EvidenceConfig(name='small', max_new_tokens=12, long_tokens=16, max_draft_length=8,\n"
        f"    kinds=(PromptKind('chat', 'p.jsonl', ('talk',)),), pairs=({', '.join(pairs)},),\n"
        f"    rules=({', '.join(rules)},),\n"
        "    contrasts=(Contrast('first', 'adaedl', 'static', 'faster', 'Because.', (0.0, 0.7)),))\n"
    )
    words = ["--data", str(folder), "--out", str(folder / "traces")]
    config = load_config(folder / "small.py", words, "record")
    record.record_cells(config, Console(quiet=True))
    for pair in config.pairs:
        (folder / "traces" / pair.name / "costs").mkdir()
        save_cost_model(folder / "traces" / pair.name / "costs" / "cost_model.json", COSTS)
    (folder / "traces" / record.cells(config)[-1].path).unlink()  # not recorded yet
    options = files.Build(folder / "traces", config=str(folder / "small.py"), out=folder / "results")
    files.build(options, Console(quiet=True))
    return folder


@pytest.mark.slow
def test_an_archive_has_the_replays_of_its_traces_and_what_is_missing(recording):
    archive = files.read_archive(recording / "results")
    assert len(archive.manifest["cells"]) == 9 and archive.manifest["missing"] == ["b/12-seed1000/trace-0.7.npz"]
    group = archive.groups["a", 0.7, 12]
    assert group.seeds == [0, 1000] and archive.groups["b", 0.7, 12].seeds == [0] and len(group.prompts) == 4
    trace = load_trace(recording / "traces" / "a" / "12-seed1000" / "trace-0.7.npz")
    found = replay(trace, static(), {"draft_length": 8}, max_draft_length=8)
    row = {name: values[:, 1] for name, values in group.rules["static-8"].items()}
    np.testing.assert_allclose(row["seconds"], found.seconds(COSTS)[0], rtol=1e-4)
    for name, expected in (("rounds", found.rounds), ("passes", found.passes)):
        np.testing.assert_array_equal(row[name], expected[0])
    np.testing.assert_array_equal(row["drafted_at"].sum(axis=1), found.drafted[0])
    np.testing.assert_array_equal(row["accepted_at"].sum(axis=1), found.accepted[0])
    assert row["tokens"].tolist() == trace.length.tolist() and trace.about["git"]["revision"]
    speeds = {rule: group.speedup(rule).estimate for rule in group.rules}
    assert max(speeds.values()) == speeds["oracle"]


def test_an_archive_keeps_cells_whose_traces_are_elsewhere(recording, tmp_path, monkeypatch):
    whole, archive, few, one = recording / "results", tmp_path / "archive", tmp_path / "few", "b/12-seed0/trace-0.npz"
    shutil.copytree(whole, archive)
    (few / one).parent.mkdir(parents=True)
    shutil.copy(recording / "traces" / one, few / one)
    monkeypatch.setattr(files, "timed_runs", lambda *_: (pd.DataFrame({"pair": ["b"]}), {"a": None, "b": None}))
    for traces in (tmp_path / "none", few):  # runs by the clock alone, then a cell too
        files.build(files.Build(traces, config=str(recording / "small.py"), out=archive), Console(quiet=True))
    for name in (files.ROWS, files.TEXTS):
        pd.testing.assert_frame_equal(*(pd.read_parquet(each / name) for each in (archive, whole)))
    after, before = (files.read_archive(each).manifest for each in (archive, whole))
    assert all(after[name] == before[name] for name in ("cells", "missing", "costs"))
    assert sorted(map(str, after["gains"])) == sorted(map(str, before["gains"]))
    words = ["--data", str(recording), "--out", str(few), "--add-to", str(archive)]
    record.record_cells(load_config(recording / "small.py", words, "record"), Console(quiet=True))
    assert [str(path.relative_to(few)) for path in few.rglob("trace-0.7.npz")] == after["missing"]


@pytest.mark.slow
def test_a_recording_goes_on_and_every_table_is_made_of_the_archive_alone(recording, tmp_path, monkeypatch):
    config = load_config(recording / "small.py", ["--data", str(recording), "--out", str(recording / "traces")])
    paths = [recording / "traces" / cell.path for cell in record.cells(config)]
    before = [path.stat().st_mtime_ns for path in paths[:-1]]
    record.record_cells(config, Console(quiet=True))
    assert [path.stat().st_mtime_ns for path in paths[:-1]] == before and paths[-1].is_file()
    monkeypatch.setattr(record, "answers", lambda *args, **more: pytest.fail("answers were decoded again"))
    again = dataclasses.replace(config, pairs=(config.pairs[0], dataclasses.replace(config.pairs[0], name="again")))
    record.record_cells(again, Console(quiet=True))  # another drafter of a target has its answers
    first, second = (load_trace(recording / "traces" / name / "12-seed0" / "trace-0.7.npz") for name in ("a", "again"))
    np.testing.assert_array_equal(first.tokens, second.tokens)
    np.testing.assert_array_equal(first.accepted, second.accepted)
    archive = files.read_archive(recording / "results")
    page = "".join(f"<!-- table: {name} -->\n<!-- end: {name} -->\n" for name in tables.TABLES)
    made = tables.with_tables(f"Text.\n{page}", archive)
    assert made.startswith("Text.\n") and tables.with_tables(made, archive) == made
    for name in tables.TABLES:
        assert len(made.split(f"<!-- table: {name} -->")[1].split("<!-- end")[0].split()) > 5
    for wrong in ("<!-- table: cels -->\n<!-- end: cels -->", "<!-- table: cells -->\n"):
        with pytest.raises(ValueError, match="cels|no end"):
            tables.with_tables(wrong, archive)
    tables.pictures(archive, tmp_path)
    assert all((tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG") for name in ("headline", "draft_length"))


@pytest.mark.slow
def test_a_rule_is_ranked_in_the_tables_of_the_archive(recording, tmp_path, capsys):
    rule = "from specdec_jax.stopping import static\n\ndef mine():\n    return static(draft_length=2)\n"
    (tmp_path / "mine.py").write_text(rule)
    words = [str(recording / "traces"), "--results", str(recording / "results"), "--rules", str(tmp_path / "mine.py")]
    assert policies.main([*words, "--set", "draft_length=1"]) == 2 and "no use for settings" in capsys.readouterr().err
    assert policies.main(words) == 0
    out = capsys.readouterr().out
    assert "mine" in out and "survival" in out
    trace = recording / "traces" / "a" / "12-seed0" / "trace-0.npz"
    shutil.copy(recording / "traces" / "b" / "12-seed0" / "trace-0.7.npz", tmp_path / "kept")
    kept = trace.read_bytes()
    trace.write_bytes((tmp_path / "kept").read_bytes())
    assert policies.main(words) == 2 and "is not the trace of the archive" in capsys.readouterr().err
    trace.write_bytes(kept)


@pytest.mark.slow
def test_a_changed_row_is_refused_and_changes_the_tables(recording, tmp_path):
    folder = tmp_path / "results"
    shutil.copytree(recording / "results", folder)
    before = files.read_archive(folder)
    rows = pd.read_parquet(folder / files.ROWS)
    rows.loc[0, "seconds"] *= 1.5
    rows.to_parquet(folder / files.ROWS)
    with pytest.raises(ValueError, match="is not the file that was written"):
        files.read_archive(folder)
    manifest = json.loads((folder / files.MANIFEST).read_text())
    manifest["sha256"][files.ROWS] = files.digest(folder / files.ROWS)
    (folder / files.MANIFEST).write_text(json.dumps(manifest))
    page = "<!-- table: speedups -->\n<!-- end: speedups -->\n"
    assert tables.with_tables(page, files.read_archive(folder)) != tables.with_tables(page, before)


@pytest.mark.skipif(not (files.FOLDER / files.MANIFEST).exists(), reason="no archive yet")
def test_pages_agree_with_the_archive():
    archive = files.read_archive()
    different = []
    for page in tables.pages():
        text = page.read_text(encoding="utf-8")
        different += [page.name] if tables.with_tables(text, archive) != text else []
    assert different == [], "python -m experiments.tables makes their tables anew"
