"""What chat says unasked: advice after an answer, and completions while a line is typed."""

import pytest
from chat_sessions import ask, shown

from specdec_jax.app.chat import commands
from specdec_jax.app.chat.completion import complete
from specdec_jax.app.chat.suggest import suggest
from specdec_jax.app.settings import Settings


def figures(rate, mean=3.0, passes=30):
    return {"draft_acceptance_rate": rate, "mean_draft_length": mean, "drafter_passes": passes}


@pytest.mark.parametrize(
    ("policy", "rate", "mean", "command"),
    [
        ("static(draft_length=3)", 0.9, 3, "/gamma 5"),
        ("static(draft_length=3)", 0.8, 3, None),
        ("static(draft_length=6)", 0.4, 6, "/gamma 3"),
        ("static(draft_length=1)", 0.4, 1, "/policy adaedl"),
        ("static(draft_length=15)", 0.9, 15, "/gamma 16"),
        ("adaedl", 0.9, 3, "/lambda 0.5"),
        ("adaedl(threshold=0.3)", 0.4, 3, "/lambda 0.5"),
        ("adaedl", 0.9, 6.5, "/max-draft-length 14"),
        ("adaedl", None, None, "/lambda 0.3"),
        ("survival", 0.9, 3, "/gamma 5"),
        ("survival", 0.4, 4, "/max-draft-length 3"),
    ],
)
def test_suggestions(policy, rate, mean, command):
    most = 16 if policy.startswith("static") else 7
    chosen = Settings(policy=policy, max_draft_length=most)
    found = suggest(chosen, most, figures(rate, mean))
    assert (found and found.command) == command
    if found and rate:
        assert ("longer" in found.advice) == (rate > 0.8)


def test_nothing_is_suggested_where_nobody_drafts():
    assert suggest(Settings(drafter="none"), 7, figures(None, None, passes=0)) is None


def test_gamma_auto_does_what_is_suggested(session):
    chat = commands.Chat(session)
    turn = ask(session, "hello")
    low = {**turn.result.statistics, "draft_acceptance_rate": 0.3}
    session.last = turn._replace(result=turn.result._replace(statistics=low))
    assert "/gamma 1" in shown(commands.run(chat, "/gamma auto"))
    assert session.settings.policy == "static(draft_length=1)"
    changed = session.settings
    with pytest.raises(ValueError, match="no answer since the last change"):
        commands.run(chat, "/gamma auto")  # and not one more step on the strength of the same answer
    assert session.settings == changed
    good = turn.result._replace(statistics={**low, "draft_acceptance_rate": 0.7})
    session.last = turn._replace(result=good, settings=changed)
    assert "Nothing to change" in shown(commands.run(chat, "/gamma auto"))


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
    assert all(c.start == 0 or before.endswith(c.text[: -c.start]) for c in found)
