"""experiments.compare lossy on tiny models: what it writes, how it goes on, its figures, what it refuses."""

import json

import numpy as np
import pytest

from experiments.lib import lossy_study as lossy
from experiments.lib.lossy_report import equal_share, label, lines
from experiments.lib.run_folder import read_rows
from experiments.lib.trace_runs import costs_or_default

pytestmark = pytest.mark.slow

CHOSEN = (
    *("lenience(lenience=0.5)", "lenience(lenience=0.1)"),
    *("easd(top_n=3, target_entropy=0.1)", "by_phase(lenience=0.5)"),
)
COMMAND = ["--smoke", "--variants", *CHOSEN, "--repeats", "2"]


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    out = tmp_path_factory.mktemp("lossy") / "out"
    assert lossy.main([*COMMAND, "--out", str(out)]) == 0
    return out


def test_a_run_writes_its_files_with_every_result(ran):
    assert sorted(path.name for path in ran.iterdir()) == ["lossy.png", "manifest.json", "results.jsonl", "table.md"]
    keys = [tuple(row[key] for key in lossy.KEYS) for row in read_rows(ran)]
    names = ("plain", "rejection", *CHOSEN)
    wanted = [(t, p, r, v) for t in (0.0, 1.0) for p in ("one", "two") for r in (0, 1) for v in names]
    assert keys == wanted
    assert json.loads((ran / "manifest.json").read_text())["name"] == "lossy"
    table = (ran / "table.md").read_text()
    assert table.startswith("# Lossy verification") and "| lenience 0.1 |" in table and "## temperature 1" in table


def test_a_finished_run_measures_nothing_again_and_a_torn_one_goes_on(ran):
    results = ran / "results.jsonl"
    whole = results.read_bytes()
    assert lossy.main([*COMMAND, "--out", str(ran)]) == 0 and results.read_bytes() == whole
    results.write_bytes(whole[: len(whole) - 200])
    assert lossy.main([*COMMAND, "--out", str(ran)]) == 0
    again = read_rows(ran)
    timeless = lambda line: {key: value for key, value in json.loads(line).items() if key != "seconds"}  # noqa: E731
    assert len(again) == len(whole.splitlines())
    assert timeless(results.read_bytes().splitlines()[-1]) == timeless(whole.splitlines()[-1])


def test_the_figures_are_those_of_the_rows(ran):
    rows, costs = read_rows(ran), costs_or_default(None)
    for temperature in (0.0, 1.0):
        found = {line.variant: line for line in lines(rows, temperature, costs)}
        for name, line in found.items():
            mine = [row for row in rows if (row["temperature"], row["variant"]) == (temperature, name)]
            base = [row for row in rows if (row["temperature"], row["variant"]) == (temperature, "rejection")]
            tokens, seconds, rounds = (
                sum(row[k] for row in mine) for k in ("num_emitted_tokens", "seconds", "num_rounds")
            )
            others = sum(row["num_emitted_tokens"] for row in base) / sum(row["seconds"] for row in base)
            assert line.tokens_per_round == pytest.approx(tokens / rounds)
            assert line.speed.estimate == pytest.approx(tokens / seconds / others)
            gap = np.mean([a["log_likelihood"] - b["log_likelihood"] for a, b in zip(mine, base, strict=True)])
            assert line.difference.estimate == pytest.approx(gap)
        assert found["rejection"].total_variation < 1e-5 and found["rejection"].difference.estimate == 0
        assert found["lenience(lenience=0.1)"].total_variation > 0.01
        assert np.isnan(found["by_phase(lenience=0.5)"].total_variation)
    greedy = {line.variant: line for line in lines(rows, 0.0, costs)}
    assert greedy["rejection"].equal == 1 and greedy["rejection"].first_choice == 1
    assert greedy["lenience(lenience=0.1)"].equal < 1


def test_tokens_after_the_first_difference_are_not_equal():
    assert equal_share([([1, 2, 3, 4], [1, 2, 9, 4]), ([5], [5])]) == 3 / 5
    assert label("easd(top_n=3, overlap=0.5)") == "easd 3/0.5" and label("typical") == "typical"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--variants", "lenient"], "unknown verifier 'lenient'; did you mean 'lenience'?"),
        (["--variants", "typical(epsilon=2)"], "epsilon must lie in [0, 1], got 2"),
        (["--each", "0"], "each must be 1 or more, got 0"),
        (["--max-new-tokens", "2000"], "new ones exceed the context of smollm2, 1024"),
        (["--policy", "statik"], "unknown policy 'statik'"),
    ],
)
def test_what_it_refuses(arguments, message, capsys, tmp_path):
    assert lossy.main(["--smoke", *arguments, "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1 and not (tmp_path / "out").exists()
