"""Slash commands: they change what they name, show what was asked for, and what fails changes nothing."""

import contextlib
import re
from pathlib import Path

import numpy as np
import pytest
from chat_sessions import SAMPLED, ask, shown

from specdec_jax.app.chat import commands, terminal
from specdec_jax.app.chat.reports import fitted
from specdec_jax.app.settings import Settings
from specdec_jax.stopping import static


def test_phases_are_shown_once_they_are_watched(session):
    chat = commands.Chat(session)
    first = ask(session, "hello")
    commands.run(chat, "/phases on")
    second = ask(session, "more")
    assert second.reused == len(first.ids) + len(first.result.tokens) - 1
    assert re.search(r"(routine|reasoning) \d+", shown(commands.run(chat, "/phases")))


@pytest.mark.parametrize(
    ("width", "line"),
    [
        (84, "models/big + models/small | static(draft_length=3) | rejection | greedy | seed 4"),
        (79, "models/big + models/small | static(draft_length=3) | greedy | seed 4"),
        (60, "big + small | static(draft_length=3) | greedy | seed 4"),
        (50, "big | static(draft_length=3) | greedy | seed 4"),
        (20, "big | static(draft_…"),
    ],
)
def test_the_settings_fit_the_line_below_the_prompt(width, line):
    settings = Settings("models/big", "models/small", policy="static(draft_length=3)", seed=4)
    assert fitted(settings, width) == line and len(line) <= width


FAILING = [
    ("/polcy adaedl", "unknown command /polcy; did you mean '/policy'"),
    ("/policy adaedle", "did you mean 'adaedl'"),
    ("/policy adaedl(treshold=0.5)", "did you mean 'threshold'"),
    ("/policy adaedl(threshold=two)", "threshold"),
    ("/policy adaedl(", "a policy reads NAME or NAME"),
    ("/gamma many", "must be a whole number, got 'many'"),
    ("/gamma -1", "must lie in 0 to 64, got -1"),
    ("/gamma auto", "there is no answer yet"),
    (
        "/entropy-factor 0.2",
        r"policy static\(draft_length=3\) has no entropy_factor; /policy adaedl\(entropy_factor=0.2\) has",
    ),
    ("/lambda x", "threshold must be a number, got 'x'"),
    ("/max-draft-length 0", "max_draft_length must be at least 1, got 0"),
    ("/max-draft-length 65", "at most 64, got 65"),
    ("/drafter prompt_lookup(lngest=3)", "did you mean 'longest'"),
    ("/drafter no/such/folder.gguf", "no such weight file"),
    ("/target smolm2", "did you mean 'smollm2'"),
    ("/target a b c", "got 3 words"),
    ("/verifier gready", "did you mean 'greedy'"),
    ("/temperature -1", "temperature"),
    ("/temperature warm", "must be a number, got 'warm'"),
    ("/top-k 1.5", "must be a whole number, got '1.5'"),
    ("/top-p 0", "top_p"),
    ("/min-p 2", "min_p"),
    ("/max-new-tokens 0", "max_new_tokens must be at least 1, got 0"),
    ("/seed -1", "seed must be at least 0, got -1"),
    ("/compare", "ask something first"),
    ("/tokens of", "on or off, got 'of'"),
    ("/stats now", "takes nothing after it, got 'now'"),
    ("/phases", "ask something first"),
    ("/phases of", "on, off or nothing, got 'of'"),
    ("/save", "needs a file name"),
    ("/save no/such/folder/run.html", "there is no folder 'no/such/folder'"),
    ("/help polcy", "did you mean '/policy'"),
]


@pytest.mark.parametrize(("line", "message"), FAILING, ids=[line for line, _ in FAILING])
def test_a_command_that_fails_leaves_the_session_as_it_was(session, line, message):
    chat = commands.Chat(session)
    before = session.settings, session.pair, chat.tokens, chat.ended
    with pytest.raises((ValueError, OSError), match=message.replace("/", "/")) as raised:
        commands.run(chat, line)
    assert "\n" not in str(raised.value)
    assert (session.settings, session.pair, chat.tokens, chat.ended) == before


def test_a_verifier_that_needs_greedy_and_a_temperature_refuse_each_other(session):
    chat = commands.Chat(session)
    commands.run(chat, "/verifier greedy")
    with pytest.raises(ValueError, match="greedy verification needs temperature 0, got 0.5"):
        commands.run(chat, "/temperature 0.5")
    assert session.settings.temperature == 0


def test_commands_change_what_they_name(session):
    chat = commands.Chat(session)
    for line in (
        "/gamma 5",
        "/temperature 0.7",
        "/top-k 20",
        "/top-p 0.9",
        "/min-p 0.05",
        "/max-new-tokens 8",
        "/seed 4",
        "/system Be brief, please.",
        "/verifier block",
        "/tokens off",
    ):
        assert shown(commands.run(chat, line)).strip()
    changed = session.settings
    assert (changed.policy, changed.max_draft_length) == ("static(draft_length=5)", 5)
    assert (changed.temperature, changed.top_k, changed.top_p, changed.min_p) == (0.7, 20, 0.9, 0.05)
    assert (changed.max_new_tokens, changed.seed, changed.system, changed.verifier) == (
        8, 4, "Be brief, please.", "block",
    )  # fmt: skip
    assert chat.tokens == "off" and session.pair.policy == static(draft_length=5)
    commands.run(chat, "/policy adaedl(threshold=0.4, keep_checked_token=true)")
    commands.run(chat, "/lambda 0.2")
    commands.run(chat, "/entropy-factor 0.3")
    assert session.settings.policy == "adaedl(threshold=0.2, keep_checked_token=True, entropy_factor=0.3)"
    commands.run(chat, "/policy step=0.05")
    assert session.pair.policy.given == {"threshold": 0.2, "entropy_factor": 0.3, "step": 0.05}
    assert shown(commands.run(chat, "/policy")).startswith("policy adaedl")
    commands.run(chat, "/system none")
    assert session.settings.system is None
    assert commands.run(chat, "/quit") is None and chat.ended


def test_stats_say_what_was_read_and_re_used(session):
    chat = commands.Chat(session)
    assert "none yet" in shown(commands.run(chat, "/stats"))
    ask(session, "hello")
    turn = ask(session, "more")
    text = shown(commands.run(chat, "/stats"))
    assert re.search(rf"prompt tokens re-used +{turn.reused} *\n", text)
    assert f"{turn.prefilled} (new in this turn)" in text
    assert shown(commands.run(chat, "/phases")).startswith("No phases are being watched")


def test_compare_plays_three_methods_on_the_last_prompt(session):
    chat = commands.Chat(session)
    commands.run(chat, "/policy adaedl(threshold=0.1)")
    turn = ask(session, "hello")
    lines = [line.split() for line in shown(commands.run(chat, "/compare 2")).splitlines()]
    rows = [" ".join(word for word in line if word not in "│┃|") for line in lines]
    plain, fixed, current = (
        next(row for row in rows if row.startswith(name)) for name in ("plain", "static 2", "adaedl")
    )
    assert plain.split()[1] == str(len(turn.result.tokens)) and "1.00x" in plain
    assert all(row.endswith("identical") for row in (plain, fixed, current))
    assert current.startswith("adaedl(threshold=0.1)")
    again = ask(session, "more")
    assert again.reused == len(turn.ids) + len(turn.result.tokens) - 1  # comparing left the kept cache alone


def test_comparing_sampled_texts_says_that_they_differ(session):
    chat = commands.Chat(session)
    session.change(**SAMPLED)
    ask(session, "hello")
    text = shown(commands.run(chat, "/compare"))
    assert "differs" in text and "the texts differ" in text


def test_every_command_has_help_and_a_line_in_the_documentation():
    text = shown(commands.run(commands.Chat(None), "/help"))  # type: ignore[arg-type]
    assert all(name in text for name in commands.COMMANDS)
    assert np.all([command.help for command in commands.COMMANDS.values()])
    page = (Path(__file__).parents[2] / "docs" / "chat.md").read_text(encoding="utf-8")
    assert [name for name in commands.COMMANDS if name not in page] == []


def test_other_models_are_downloaded_before_a_spinner_is_drawn(session, monkeypatch):
    done = []
    monkeypatch.setattr(terminal, "download", lambda *names: done.append(names))
    monkeypatch.setattr(terminal, "status", lambda text: done.append(text) or contextlib.nullcontext())
    monkeypatch.setattr(session, "change", lambda **values: done.append(values))
    terminal.Terminal(commands.Chat(session), "").from_script(["/target org/big org/small@v1,ngram", "/drafter org/a"])
    target, drafter = {"target": "org/big", "drafter": "org/small@v1,ngram"}, {"drafter": "org/a"}
    assert done == [("org/big", "org/small@v1", "ngram"), "Loading", target, ("org/a",), "Loading", drafter]
