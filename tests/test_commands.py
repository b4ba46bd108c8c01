"""How experiments end: exit codes, and one line for what went wrong."""

import tarfile

import pytest

from experiments.commands import config_words, exit_codes


def ending(error, *also, **options):
    @exit_codes(*also, **options)
    def main(code=0):
        if error is not None:
            raise error
        return code

    return main


def test_what_main_returns_is_the_exit_code():
    assert ending(None)() == 0 and ending(None)(code=1) == 1


@pytest.mark.parametrize(
    "error", [ValueError("two\n  lines"), FileNotFoundError("two lines"), tarfile.TarError("two lines")]
)
def test_bad_input_is_one_line_and_2(error, capsys):
    assert ending(error, tarfile.TarError)() == 2
    assert capsys.readouterr().err == "error: two lines\n"


def test_what_nobody_named_is_raised(capsys):
    with pytest.raises(TypeError):
        ending(TypeError("a bug"), tarfile.TarError)()
    with pytest.raises(KeyboardInterrupt):
        ending(KeyboardInterrupt())()
    assert ending(KeyboardInterrupt(), interrupted="to go on: again")() == 130
    assert capsys.readouterr().err == "to go on: again\n"


def test_the_first_word_is_a_config(capsys):
    assert config_words("compare", "Compares.", ["mine.py", "--limit", "2"]) == ["mine.py", "--limit", "2"]
    for wrong in ([], ["--limit", "2"]):
        with pytest.raises(ValueError, match="name a config first: python -m experiments.compare CONFIG.py"):
            config_words("compare", "Compares.", wrong)
    assert config_words("compare", "Compares.", ["--help"]) == []
    assert capsys.readouterr().out.endswith("\n\nCompares.\n")
