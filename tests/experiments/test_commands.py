"""What experiments say of themselves, and how they end: exit codes, and one line for what went wrong."""

import importlib
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path

import pytest

from experiments import compare
from experiments.lib.commands import config_words, exit_codes, parsed

ROOT = Path(__file__).resolve().parents[2]


def test_exit_codes(capsys):
    def ending(error, *also, **options):
        @exit_codes(*also, **options)
        def main(code=0):
            if error is not None:
                raise error
            return code

        return main

    assert ending(None)() == 0 and ending(None)(code=1) == 1
    for error in (ValueError("two\n  lines"), FileNotFoundError("two lines"), tarfile.TarError("two lines")):
        assert ending(error, tarfile.TarError)() == 2 and capsys.readouterr().err == "error: two lines\n"
    for error in (TypeError("a bug"), KeyboardInterrupt()):
        with pytest.raises(type(error)):
            ending(error, tarfile.TarError)()
    assert ending(KeyboardInterrupt(), interrupted="to go on: again")() == 130
    assert capsys.readouterr().err == "to go on: again\n"


def test_the_first_word_is_a_config(capsys):
    assert config_words("compare", "Compares.", ["mine.py", "--limit", "2"]) == ["mine.py", "--limit", "2"]
    for wrong in ([], ["--limit", "2"]):
        with pytest.raises(ValueError, match="name a config first: python -m experiments.compare CONFIG.py"):
            config_words("compare", "Compares.", wrong)
    assert config_words("compare", "Compares.", ["--help"]) == []
    assert capsys.readouterr().out.endswith("\n\n Compares.\n")
    path = str(ROOT / "configs" / "demo.py")
    with pytest.raises(SystemExit, match="^0$"):
        compare.main([path, "--help"])
    assert capsys.readouterr().out.startswith(f"usage: python -m experiments.compare {path} [-h]")


EXPERIMENTS = sorted(
    path.stem
    for path in (ROOT / "experiments").glob("*.py")
    if re.search(r"^(def main\(arguments|main = )", path.read_text(encoding="utf-8"), re.MULTILINE)
)


STUDIES = ["distill judge", "distill compare", "distill rank_tokens", "batches waiting"]
STUDIES += ["step_cost precision", "policies headroom", "entropy siblings"]


@pytest.mark.parametrize("name", [*EXPERIMENTS, *STUDIES])
def test_every_experiment_says_what_it_is_in_80_columns(name, capsys, monkeypatch):
    """Question, command and time on lines of their own, the command and no path in the usage, types that are words."""
    monkeypatch.setenv("COLUMNS", "80")
    module, *study = name.split()
    main = importlib.import_module(f"experiments.{module}").main
    try:
        assert main([*study, "--help"]) == 0
    except SystemExit as end:
        assert end.code == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith(f"usage: python -m experiments.{name} ")
    assert "{None}" not in "".join(lines)
    assert any(line.startswith(" Command:   ") for line in lines)
    assert any(line.startswith(" Time: ") for line in lines)
    assert max(len(line) for line in lines if "─" not in line and "usage" not in line) <= 80


@dataclass(frozen=True)
class Numbers:
    limit: int | None = 3
    widths: tuple[int, ...] | None = None
    out: Path | None = None


def test_an_optional_value_is_given_as_its_type_is_and_none_is_none():
    assert parsed(Numbers, "Doc.", ["--limit", "none"]).limit is None
    assert parsed(Numbers, "Doc.", ["--limit", "5"]) == Numbers(5)
    assert parsed(Numbers, "Doc.", ["--widths", "2", "4", "--out", "a"]) == Numbers(3, (2, 4), Path("a"))


@pytest.mark.parametrize(
    ("experiment", "words", "message"),
    [
        ("record", "--seed -1", "seed must be at least 0, got -1"),
        ("record", "--temperatures nan", "temperatures must be one or more numbers of 0 or more, got (nan,)"),
        ("record", "--top-p 0", "top_p must lie in (0, 1], got 0.0"),
        ("accelerators", "--batches -1", "batches must be 1 or more, got (-1,)"),
        ("accelerators", "--max-draft-length 0", "max_draft_length must be 1 or more, got 0"),
        ("batches", "--batches 0", "batches must be 1 or more, got (0,)"),
        ("batches", "waiting --smoke --factors 0", "factors must be above 0"),
        ("peers", "--temperatures inf", "temperatures must be one or more numbers of 0 or more, got (inf,)"),
        ("adaedl", "", "error: name one of tables, factor, lambda, long first"),
        ("adaedl", "tabels", "error: name one of tables, factor, lambda, long first"),
        ("adaedl", "--smoke", "error: name one of tables, factor, lambda, long first"),
    ],
)
def test_an_option_out_of_range_is_refused_before_anything_is_written(
    tmp_path, monkeypatch, capsys, experiment, words, message
):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.chdir(tmp_path)
    try:
        code = importlib.import_module(f"experiments.{experiment}").main(words.split())
    except SystemExit as ended:  # by tyro, of what a dataclass refuses
        code = ended.code
    assert code == 2 and message in capsys.readouterr().err and not list(tmp_path.iterdir())
