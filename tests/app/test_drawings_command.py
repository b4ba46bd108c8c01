"""`generate --page FILE`: what is written, what is refused, and that the text stays the same."""

import json

import pytest
from tiny_pair import write_pair

from specdec_jax.app import cli
from specdec_jax.loading import load_model
from specdec_jax.text.calibration import fingerprint

pytestmark = pytest.mark.slow

SHORT = ["--max-new-tokens", "12", "--max-draft-length", "2", "--no-chat", "--dtype", "float32"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    target, drafter = write_pair(tmp_path_factory.mktemp("tiny"))
    return ["--target", target, "--drafter", drafter]


def test_a_page_beside_the_same_text(capsys, models, tmp_path):
    arguments = ["generate", "hello <b>", *models, *SHORT, "--policy", "adaedl(threshold=0.1)", "--json"]
    assert cli.main(arguments) == 0
    plain = capsys.readouterr()
    file = tmp_path / "a.html"
    assert cli.main([*arguments, "--page", str(file)]) == 0
    drawn = capsys.readouterr()
    assert list(tmp_path.iterdir()) == [file]
    html = file.read_text(encoding="utf-8")
    assert "hello &lt;b&gt;" in html and "adaedl(threshold=0.1)" in html and "bound 1" in html
    assert plain.err == "" and drawn.err == f"page: {file}\n"
    assert plain.out.split('"statistics"')[0] == drawn.out.split('"statistics"')[0]


@pytest.mark.seldom
def test_phases_are_watched_where_they_are_asked_for(capsys, models, tmp_path):
    """The tiny target is ever uncertain: at the default thresholds it reasons after eight tokens, at its own never."""
    content = {
        name: {"name": name, **fingerprint(load_model(path, dtype="float32").params)}
        for name, path in (("target", models[1]), ("drafter", models[3]))
    }
    learnt = {"policy": {}, "verifier": {}, "monitor": {"phases": {"enter": 50.0, "leave": 50.0}}}
    content |= {"hyperparameters": {"greedy": learnt, "sampled": learnt}, "figures": {}}
    (tmp_path / "calibration.json").write_text(json.dumps(content))

    def reasoning(*more):
        page = tmp_path / "a.html"
        assert cli.main(["generate", "hello", *models, *SHORT, "--json", "--page", str(page), *more]) == 0
        result = json.loads(capsys.readouterr().out)
        shaded = page.read_text(encoding="utf-8").count(' reasoning"')
        return result["statistics"]["num_reasoning_tokens"], shaded, result["tokens"]

    unwatched, watched = reasoning(), reasoning("--phases")
    calibrated = reasoning("--phases", "--calibration", str(tmp_path / "calibration.json"))
    assert watched[0] == 4 and watched[1] > 0
    assert unwatched[:2] == calibrated[:2] == (0, 0)
    assert unwatched[2] == watched[2] == calibrated[2]
