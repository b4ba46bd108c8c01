"""Commands over traces, from arguments to pictures: whole tables as they are stored, rows by plain loops, going on."""

import importlib
import json
import re
import shlex

import numpy as np
import pytest
import stopping_oracles as twins
from trace_walks import on_the_other_half, totals

from experiments import entropy, policies
from experiments.lib import trace_runs
from experiments.lib.run_folder import read_rows as rows_of
from experiments.lib.smoke import made_up_trace, made_up_traces
from experiments.lib.tables import speedup
from specdec_jax.costs.cost_model import flat
from specdec_jax.replay.trace import save_trace

pytestmark = pytest.mark.slow

OVER = "--rules survival svip --set threshold=0.1,0.3 drafter_cost=0.01,0.9 --over 'svip( threshold = 0.30 )'"
FILES = "WORSE BETTER/trace-1.npz --ratio 0.3 --slope 0.05 --max-draft-length 5 --rules 'SHORT(unused=1)'"
LOGS = "LOG WORSE/trace-0.npz --ratios 0.1 --slopes 0.05 --max-draft-length 3"
COMMANDS = {  # the table's name: the picture, and the command
    "rules": ("policies", "policies --smoke --rules static-3 adaedl --set threshold=0.2,0.6"),
    "over": ("policies", f"policies --smoke {OVER} static adaedl"),
    "tuning-all": ("policies", "policies --smoke --rules adaedl --tuning all"),
    "ratio": ("policies", "policies --smoke --rules adaedl survival --ratio 0.1"),
    "files": ("policies", f"policies {FILES} --set draft_length=2:4:2"),
    "repeating": ("policies", "policies REPEATING --rules svip survival adaedl static-7"),
    "headroom": ("headroom", f"policies headroom {LOGS}"),
    "entropy": ("entropy", "entropy --smoke --bins 5"),
}


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Traces of two drafters and of texts that repeat themselves, a public log, and a user's rule."""
    root = tmp_path_factory.mktemp("files")
    for name, boost in (("worse", 0.0), ("better", 0.7)):
        (root / name).mkdir()
        for temperature, trace in made_up_traces(boost=boost).items():
            about = trace.about | {"drafter": name}
            save_trace(root / name / f"trace-{temperature:g}.npz", trace._replace(about=about))
    trace = made_up_trace(1.0)
    tokens = trace.tokens.copy()
    tokens[:5] = 7
    save_trace(root / "repeating.npz", trace._replace(tokens=tokens))
    lengths = [[4, 1, 2, 1, 3, 2, 1] * 3, [1, 1, 9, 2] * 4, [2, 2, 1, 5, 1, 1]]
    entries = [{"id": str(i), "acc_eagle": {"acc_len": n}, "acc_ngram": {"acc_len": n}} for i, n in enumerate(lengths)]
    (root / "log.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in entries))
    rule = "from specdec_jax.stopping import static\n\ndef short(unused: int = 0):\n    return static()\n"
    (root / "short.py").write_text(rule)
    places = {
        "WORSE": "worse",
        "BETTER": "better",
        "REPEATING": "repeating.npz",
        "LOG": "log.jsonl",
        "SHORT": "short.py",
    }
    return {name: str(root / place) for name, place in places.items()}


@pytest.fixture(scope="module")
def run(files, tmp_path_factory):
    """A function that runs a command of the list once more, or first, and gives its run folder."""
    folders = {}

    def go(name, again=False):
        if again or name not in folders:
            folders.setdefault(name, tmp_path_factory.mktemp(name) / "out")
            words = re.sub("|".join(files), lambda match: files[match[0]], COMMANDS[name][1])
            experiment, *words = shlex.split(words)
            main = importlib.import_module(f"experiments.{experiment}").main
            assert main([*words, "--out", str(folders[name])]) == 0
        return folders[name]

    return go


@pytest.mark.parametrize("name", COMMANDS)
def test_a_run_writes_the_stored_table_rows_and_pictures_once(run, name, monkeypatch, stored):
    out = run(name)
    picture = f"{COMMANDS[name][0]}.png"
    assert sorted(path.name for path in out.iterdir()) == sorted(
        ["manifest.json", "table.md", "results.jsonl", picture]
    )
    assert (out / picture).read_bytes().startswith(b"\x89PNG")
    stored(f"{name}.md", (out / "table.md").read_text(), units=1.5)
    keys = [tuple(row[key] for key in trace_runs.KEYS) for row in rows_of(out)]
    assert len(set(keys)) == len(keys)
    before = (out / "results.jsonl").read_bytes(), (out / "table.md").read_text()
    monkeypatch.setattr(trace_runs, "replay", lambda *args, **more: pytest.fail("something was replayed"))
    monkeypatch.setattr(entropy, "measured", lambda *args: pytest.fail("something was measured"))
    run(name, again=True)
    assert ((out / "results.jsonl").read_bytes(), (out / "table.md").read_text()) == before


def test_a_stopped_run_goes_on_where_it_was(run, tmp_path):
    whole, out = run("rules"), tmp_path / "out"
    out.mkdir()
    (out / "manifest.json").write_bytes((whole / "manifest.json").read_bytes())
    lines = (whole / "results.jsonl").read_bytes().splitlines(keepends=True)
    (out / "results.jsonl").write_bytes(b"".join(lines[:-7]) + lines[-7][:30])  # killed inside a line
    assert policies.main([*COMMANDS["rules"][1].split()[1:], "--out", str(out)]) == 0
    assert (out / "results.jsonl").read_bytes() == b"".join(lines)
    assert (out / "table.md").read_text() == (whole / "table.md").read_text()


def row_of(folder, **wanted):
    (row,) = [row for row in rows_of(folder) if all(row[name] == value for name, value in wanted.items())]
    return row


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_are_walks_along_the_trace_at_the_setting_of_the_other_half(run, temperature):
    trace = made_up_trace(temperature)
    for name, twin in (
        ("static-3", lambda: twins.Length(3)),
        ("adaedl threshold=0.2", lambda: twins.AdaEDL(threshold=0.2)),
        ("adaedl threshold=0.6", lambda: twins.AdaEDL(threshold=0.6)),
    ):
        row = row_of(run("rules"), what=name, temperature=temperature, task="all")
        found = [np.sum(row[column]) for column in ("seconds", "rounds", "passes", "accepted")]
        np.testing.assert_allclose(found, totals(trace, twin))
    differ = 0
    for task in ("all", "code", "mathematics", "chat"):
        row = row_of(run("rules"), what="static", temperature=temperature, task=task)
        texts = [index for index, name in enumerate(trace.about["tasks"]) if task in ("all", name)]
        lengths, seconds = on_the_other_half(trace, texts, [7, *range(17)], twins.Length)
        assert [chosen["draft_length"] for chosen in row["settings"]] == lengths
        np.testing.assert_allclose(row["seconds"], seconds)
        differ += lengths[0] != lengths[1]
    assert differ, "both halves always wanted the same: the halves might be mixed up"


def test_a_fitted_factor_and_another_machine_are_walks(run):
    worse, better = made_up_trace(1.0), made_up_trace(1.0, boost=0.7)
    factor = row_of(run("entropy"), what="bound", group="another", task="all")["factor"][0]
    assert 0.15 < factor < 0.27  # made with 0.2
    where = {"temperature": 1.0, "task": "all"}
    fitted = row_of(run("entropy"), **where, what=entropy.FITTED, group="another")
    assert np.sum(fitted["seconds"]) == pytest.approx(totals(better, lambda: twins.AdaEDL(gamma=factor))[0])
    row = row_of(run("ratio"), what="static", **where)
    seconds = on_the_other_half(worse, range(12), [7, *range(17)], twins.Length, costs=flat(0.1, 16))[1]
    np.testing.assert_allclose(row["seconds"], seconds)
    speeds = {tuple(row[key] for key in ("temperature", "task", "what")): speedup(row) for row in rows_of(run("ratio"))}
    for (*where, _), speed in speeds.items():  # nothing is faster than the oracle
        assert speed.estimate <= 1.0001 * speeds[*where, "oracle"].estimate


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
