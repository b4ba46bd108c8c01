"""Slash commands and their completions: they change what they name, and what fails changes nothing."""

import re

import pytest
from chat_sessions import ask, shown

from specdec_jax.app.chat import commands
from specdec_jax.app.chat.terminal import complete
from specdec_jax.stopping import static


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/polcy adaedl", "unknown command /polcy; did you mean '/policy'"),
        ("/policy adaedl(treshold=0.5)", "did you mean 'threshold'"),
        ("/gamma many", "must be a whole number, got 'many'"),
        ("/entropy-factor 0.2", r"policy static\(draft_length=3\) has no entropy_factor; /policy adaedl"),
        ("/max-draft-length 0", r"max_draft_length must lie in \[1, 64\], got 0"),
        ("/target smolm2", "did you mean 'smollm2'"),
        ("/temperature warm", "must be a number, got 'warm'"),
        ("/compare", "ask something first"),
        ("/tokens of", "on or off, got 'of'"),
        ("/save", "needs a file name"),
        ("/save no/such/folder/run.html", "there is no folder 'no/such/folder'"),
    ],
)
def test_a_command_that_fails_leaves_the_session_as_it_was(session, line, message):
    chat = commands.Chat(session)
    before = session.settings, session.pair, chat.tokens, chat.ended
    with pytest.raises((ValueError, OSError), match=message) as raised:
        commands.run(chat, line)
    assert "\n" not in str(raised.value)
    assert (session.settings, session.pair, chat.tokens, chat.ended) == before


def test_commands_change_what_they_name(session):
    chat = commands.Chat(session)
    for line in (
        *("/gamma 5", "/temperature 0.7", "/top-k 20", "/top-p 0.9", "/min-p 0.05", "/max-new-tokens 8", "/seed 4"),
        *("/system Be brief, please.", "/verifier block", "/tokens off"),
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


def test_watching_phases_keeps_the_cache_and_counts_their_tokens(session):
    chat = commands.Chat(session)
    first = ask(session, "hello")
    commands.run(chat, "/phases on")
    assert ask(session, "and now?").reused == len(first.ids) + len(first.result.tokens) - 1
    assert re.search(r"(routine|reasoning) \d+", shown(commands.run(chat, "/phases")))


def test_the_last_answer_has_the_settings_that_made_it(session, tmp_path):
    chat, file = commands.Chat(session), tmp_path / "a.html"
    ask(session, "hello")
    for line in ("/policy adaedl(threshold=0.1)", "/temperature 0.5", f"/save {file}"):
        commands.run(chat, line)
    assert re.search(r"answered by .*static\(draft_length=3\) .* greedy", shown(commands.run(chat, "/stats")))
    html = file.read_text(encoding="utf-8")
    assert "adaedl" not in html
    assert all(f"<td>{text}</td>" in html for text in (session.settings.target, "static(draft_length=3)", "0.0"))


def test_compare_plays_three_methods_on_the_last_prompt(session):
    chat = commands.Chat(session)
    commands.run(chat, "/policy adaedl(threshold=0.1)")
    turn = ask(session, "hello")
    lines = [line.split() for line in shown(commands.run(chat, "/compare 2")).splitlines()]
    rows = [" ".join(word for word in line if word not in "│┃|") for line in lines]
    names = "plain", "static 2", "adaedl(threshold=0.1)"
    plain, *others = (next(row for row in rows if row.startswith(name)) for name in names)
    assert plain.split()[1] == str(len(turn.result.tokens)) and "1.00x" in plain
    assert all(row.endswith("identical") for row in (plain, *others))
    again = ask(session, "more")
    assert again.reused == len(turn.ids) + len(turn.result.tokens) - 1  # comparing left the kept cache alone


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("/pol", ["/policy"]),
        ("/policy ada", ["adaedl", "adaptive_gamma"]),
        ("/policy adaedl(thr", ["threshold=", "threshold_decay="]),
        ("/policy at_least(min", ["minimum="]),
        ("/policy static(draft_length=3, dr", []),
        ("/target smollm2-drafter-n", ["smollm2-drafter-nano"]),
        ("/tokens ", ["all", "on", "off"]),
        ("hello /pol", []),
    ],
)
def test_completions(before, expected):
    found = complete(before)
    assert [completion.text for completion in found] == expected
    assert all(c.start_position == 0 or before.endswith(c.text[: -c.start_position]) for c in found)
