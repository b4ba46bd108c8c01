"""`quality` of experiments.compare on tiny models: the figures of lossy verifiers are those of the rows."""

import numpy as np
import pytest
from tiny_compare import write_config

from experiments.compare import by_method, main
from experiments.lib.run_folder import read_rows

pytestmark = pytest.mark.slow

VERIFIERS = {
    "rejection": "rejection()",
    "half": "lenience(lenience=0.5)",
    "tenth": "lenience(lenience=0.1)",
    "easd": "easd(top_n=3, target_entropy=0.1)",
    "by-phase": "by_phase(lenience=0.5)",
}
OPTIONS = 'temperatures=(0.0, 1.0), repeats=2, max_new_tokens=12, against="rejection", quality=True'
METHODS = ("plain", *VERIFIERS)


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lossy")
    methods = (f'Method("{name}", static(draft_length=4), verifier={text})' for name, text in VERIFIERS.items())
    config = write_config(folder, ", ".join(methods), OPTIONS)
    assert main([str(config), "--out", str(folder / "out")]) == 0
    return folder / "out"


@pytest.mark.seldom
def test_the_figures_are_those_of_the_rows(ran):
    rows = read_rows(ran)
    assert [row["method"] for row in rows[:6]] == list(METHODS) and len(rows) == 2 * 2 * 2 * 6
    for temperature in (0.0, 1.0):
        here = [row for row in rows if row["temperature"] == temperature]
        figures = by_method(here)
        for name, own in figures.items():
            mine = [[row["log_likelihood"] for row in here if (row["method"], row["prompt_id"]) == (name, prompt)]
                    for prompt in ("one", "two")]  # fmt: skip
            assert own["log_likelihood"] == pytest.approx(np.mean(mine, axis=1))
        assert figures["rejection"]["total_variation"].max() < 1e-5 < 0.01 < figures["tenth"]["total_variation"].mean()
        assert figures["plain"]["total_variation"].max() < 1e-5
        assert np.isnan(figures["by-phase"]["total_variation"]).all() and figures["plain"]["before"] is None
    greedy = by_method([row for row in rows if row["temperature"] == 0])
    assert greedy["rejection"]["before"] == 1 and greedy["rejection"]["first_choice"].min() == 1
    assert greedy["tenth"]["before"] < 1
    assert np.isnan(by_method(rows[-6:])["by-phase"]["divergence"]).all()


def test_the_tables_have_the_quality_of_every_method(ran):
    table = (ran / "table.md").read_text()
    greedy, sampled = (part.split("\n\n")[1].splitlines() for part in table.split("## Quality, ")[1:])
    assert [line.split("|")[1].strip() for line in greedy[2:]] == list(METHODS)
    cells = dict(zip(METHODS, ([cell.strip() for cell in line.split("|")[2:-1]] for line in greedy[2:]), strict=True))
    assert cells["rejection"][1:] == ["+0.000", "0.0000", cells["rejection"][3], "100.0%", "100.0%"]
    assert cells["by-phase"][2:4] == ["–", "–"] and len(sampled) == len(greedy)


def test_tokens_after_the_first_difference_are_not_equal():
    row = {"method": "m", "prompt_id": "p", "log_likelihood": -1.0, "total_variation": 0.5, "divergence": None}
    row |= {"first_choice": 1.0, "equals_plain": False, "first_difference": {"position": 2}, "tokens": [1, 2, 3, 4]}
    whole = row | {"prompt_id": "q", "equals_plain": True, "first_difference": None, "tokens": [5]}
    assert by_method([row, whole])["m"]["before"] == 3 / 5


def test_quality_needs_a_drafter_that_is_a_model(ran, capsys):
    arguments = [str(ran.parent / "config.py"), "--only", "plain", "--out", str(ran.parent / "other")]
    assert main(arguments) == 2 and "a method must draft with a model" in capsys.readouterr().err
    assert not (ran.parent / "other").exists()
