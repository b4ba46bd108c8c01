"""The conversation: what it keeps of its cache, what commands change, and that what fails changes nothing."""

import contextlib
import dataclasses
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from chat_models import change_json, write_chat_pair
from rich.console import Console

from specdec_jax.chat import commands
from specdec_jax.chat.completion import complete
from specdec_jax.chat.session import Session
from specdec_jax.chat.settings import Settings
from specdec_jax.chat.suggest import suggest
from specdec_jax.generation import finish, prepare, start

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 3}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return write_chat_pair(tmp_path_factory.mktemp("chat"))


def settings(models, **values):
    options = {"policy": "static", "policy_options": ("draft_length=3",), "max_new_tokens": 12, "max_draft_length": 3}
    return Settings(**{"target": models[0], "drafter": models[1], "dtype": "float32", **options, **values})


@pytest.fixture
def session(models):
    return Session(settings(models))


def ask(session, text):
    chunks = list(session.answer(text))
    assert [token for chunk in chunks for token in chunk.tokens] == session.last.result.tokens
    return session.last


def fresh(session, turn):
    """The same ids decoded by a new state."""
    plain = dataclasses.replace(session.settings)
    names = ("temperature", "top_k", "top_p", "min_p", "seed", "max_new_tokens")
    options = {name: getattr(plain, name) for name in names}
    request = prepare(session.pair, ["x"], slots=turn.slots, record=True, **options, **session.numbers)
    request = request._replace(prompts=[turn.ids])
    begun = start(session.pair, request)
    return finish(session.pair, request, session.pair.decoder.run(session.pair.params, begun.state), 0, 0.0, begun)


def shown(renderable):
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()


@pytest.mark.parametrize("options", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_second_turn_reads_only_what_is_new_and_answers_as_if_all_were(models, options):
    session = Session(settings(models, **options))
    first = ask(session, "hello")
    assert (first.reused, first.prefilled) == (0, len(first.ids)) and first.why == "nothing was kept"
    second = ask(session, "and now?")
    said = [*first.ids, *first.result.tokens]
    assert second.ids[: len(said)] == said
    assert second.reused == len(said) - 1  # the last token of a text is in no cache
    assert second.prefilled == len(second.ids) - second.reused < 40
    expected = fresh(session, second)
    assert second.result.tokens == expected.tokens
    assert second.result.statistics == expected.statistics  # the drafter's cache was kept as well


def test_the_kept_cache_is_what_the_next_turn_reads(session):
    """With other numbers in the kept cache the answer is another one: it was not read again behind our back."""
    ask(session, "hello")
    kept = session._kept
    turned = jax.tree.map(lambda leaf: -leaf if jnp.issubdtype(leaf.dtype, jnp.floating) else leaf, kept.target_cache)
    session._kept = kept._replace(target_cache=turned)
    turn = ask(session, "and now?")
    assert turn.reused > 0 and turn.result.tokens != fresh(session, turn).tokens


def test_another_policy_keeps_the_cache_and_another_drafter_does_not(models, session):
    first = ask(session, "hello")
    session.change(policy="adaedl", policy_options=("threshold=0.1",), max_draft_length=4)
    second = ask(session, "more")
    assert second.reused == len(first.ids) + len(first.result.tokens) - 1
    assert second.result.tokens == fresh(session, second).tokens
    session.change(drafter="none")
    third = ask(session, "again")
    assert (third.reused, third.why) == (0, "the models changed")
    assert third.result.tokens == fresh(session, third).tokens


def test_a_drafter_without_a_model_goes_on_from_its_state_too(models):
    session = Session(settings(models, drafter="prompt_lookup"))
    first = ask(session, "hello hello hello")
    second = ask(session, "hello hello hello")
    assert second.reused == len(first.ids) + len(first.result.tokens) - 1
    expected = fresh(session, second)
    assert second.result.tokens == expected.tokens and second.result.statistics == expected.statistics
    assert second.result.statistics["num_accepted_tokens"] > 0


def test_phases_are_shown_once_they_are_watched(session):
    chat = commands.Chat(session)
    first = ask(session, "hello")
    commands.run(chat, "/phases on")
    second = ask(session, "more")
    assert second.reused == len(first.ids) + len(first.result.tokens) - 1
    assert re.search(r"(routine|reasoning) \d+", shown(commands.run(chat, "/phases")))


def test_numbers_compile_nothing(session):
    ask(session, "hello")
    decoder = session.pair.decoder
    session.change(policy_options=("draft_length=2",), temperature=0.5, seed=9)
    assert session.pair.decoder is decoder
    assert ask(session, "more").result.statistics["mean_draft_length"] <= 2


def test_more_room_than_the_cache_has_reads_anew_and_says_so(session):
    slots = ask(session, "hello").slots
    session.change(max_new_tokens=slots)
    turn = ask(session, "more")
    assert turn.reused == 0 and turn.why == f"the cache grew from {slots} to {turn.slots} slots"
    assert turn.slots >= 2 * slots


def test_an_answer_left_early_stays_and_the_next_turn_goes_on_from_it(session):
    with contextlib.closing(session.answer("hello")) as chunks:
        next(chunks)
    first = session.last
    assert first.result.finish_reason == "interrupted" and 0 < len(first.result.tokens) < 12
    assert session.messages[-1] == {"role": "assistant", "content": first.result.text}
    second = ask(session, "and now?")
    assert second.reused == len(first.ids) + len(first.result.tokens) - 1
    assert second.result.tokens == fresh(session, second).tokens


def test_ctrl_c_while_a_turn_begins_loses_the_question_only(session, monkeypatch):
    ask(session, "hello")
    before, real = list(session.messages), session.pair.decoder.extend

    def interrupted(*arguments, **options):
        real(*arguments, **options)
        raise KeyboardInterrupt

    pair = session.pair
    session.pair = pair._replace(decoder=pair.decoder._replace(extend=interrupted))
    with pytest.raises(KeyboardInterrupt):
        list(session.answer("lost"))
    session.pair = pair
    assert session.messages == before
    turn = ask(session, "and now?")
    assert turn.reused == 0 and turn.result.tokens == fresh(session, turn).tokens


def test_text_that_is_rendered_otherwise_is_encoded_anew(session):
    first = ask(session, "hello")
    session.change(system="Be brief.")
    second = ask(session, "more")
    assert second.reused < 8 < len(first.ids)
    tokenizer = session.pair.target.tokenizer
    assert tokenizer.decode(second.ids, skip_special=False) == second.text
    assert second.result.tokens == fresh(session, second).tokens


def test_reset_forgets_what_was_said_and_keeps_what_is_the_same(session):
    first = ask(session, "hello")
    session.reset()
    assert session.messages == [] and session.last is None
    again = ask(session, "hello")
    assert again.ids == first.ids and again.result.tokens == first.result.tokens
    assert again.reused == len(first.ids) - 1


def test_a_full_context_is_a_message_and_reset_helps(tmp_path):
    models = write_chat_pair(tmp_path, context=48)
    session = Session(settings(models, max_new_tokens=30))
    first = ask(session, "hello")
    assert first.result.finish_reason == "length" and len(first.ids) + len(first.result.tokens) <= 48
    before = list(session.messages)
    with pytest.raises(ValueError, match=r"fills the target's context: \d+ of 48 tokens.*/reset"):
        session.answer("and now this?")
    assert session.messages == before
    session.reset()
    assert ask(session, "hello").result.tokens == first.result.tokens


def test_without_a_template_text_goes_on(models, tmp_path):
    session = Session(settings(models, chat=False))
    first = ask(session, "hello")
    second = ask(session, "then")
    assert second.text == f"hello{first.result.text}\nthen"
    assert second.ids[:13] == [*first.ids, *first.result.tokens] and second.reused == len(first.ids) + 11
    bare = write_chat_pair(tmp_path)
    change_json(tmp_path / "target" / "tokenizer_config.json", chat_template=None)
    with pytest.raises(ValueError, match="has no chat template.*--no-chat"):
        Session(settings(bare))


FAILING = [
    ("/polcy adaedl", "unknown command /polcy; did you mean '/policy'"),
    ("/policy adaedle", "did you mean 'adaedl'"),
    ("/policy adaedl treshold=0.5", "did you mean 'threshold'"),
    ("/policy adaedl threshold=two", "threshold"),
    ("/policy 'adaedl", "cannot read"),
    ("/gamma many", "must be a whole number, got 'many'"),
    ("/gamma -1", "must lie in 0 to 64, got -1"),
    ("/gamma auto", "there is no answer yet"),
    ("/entropy-factor 0.2", "policy static has no entropy_factor; /policy adaedl entropy_factor=0.2"),
    ("/lambda x", "threshold must be a number, got 'x'"),
    ("/max-draft-length 0", "max_draft_length must be at least 1, got 0"),
    ("/max-draft-length 65", "at most 64, got 65"),
    ("/drafter prompt_lookup lngest=3", "did you mean 'longest'"),
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
    ("/seed -1", "seed must lie in"),
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
    before = session.settings, session.pair, session.numbers, chat.tokens, chat.ended
    with pytest.raises((ValueError, OSError), match=message.replace("/", "/")) as raised:
        commands.run(chat, line)
    assert "\n" not in str(raised.value)
    assert (session.settings, session.pair, session.numbers, chat.tokens, chat.ended) == before


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
    assert (changed.policy, changed.policy_options, changed.max_draft_length) == ("static", ("draft_length=5",), 5)
    assert (changed.temperature, changed.top_k, changed.top_p, changed.min_p) == (0.7, 20, 0.9, 0.05)
    assert (changed.max_new_tokens, changed.seed, changed.system, changed.verifier) == (
        8, 4, "Be brief, please.", "block",
    )  # fmt: skip
    assert not chat.tokens and session.numbers["policy_numbers"] == {"draft_length": 5}
    commands.run(chat, "/policy adaedl threshold=0.4 keep_checked_token=true")
    commands.run(chat, "/lambda 0.2")
    commands.run(chat, "/entropy-factor 0.3")
    assert session.settings.policy_options == ("keep_checked_token=true", "threshold=0.2", "entropy_factor=0.3")
    commands.run(chat, "/policy step=0.05")
    assert session.numbers["policy_numbers"] == {"threshold": 0.2, "entropy_factor": 0.3, "step": 0.05}
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
    commands.run(chat, "/policy adaedl threshold=0.1")
    turn = ask(session, "hello")
    lines = [line.split() for line in shown(commands.run(chat, "/compare 2")).splitlines()]
    rows = [" ".join(word for word in line if word not in "│┃|") for line in lines]
    plain, fixed, current = (
        next(row for row in rows if row.startswith(name)) for name in ("plain", "static 2", "adaedl")
    )
    assert plain.split()[1] == str(len(turn.result.tokens)) and "1.00x" in plain
    assert all(row.endswith("identical") for row in (plain, fixed, current))
    assert current.startswith("adaedl threshold=0.1")
    again = ask(session, "more")
    assert again.reused == len(turn.ids) + len(turn.result.tokens) - 1  # comparing left the kept cache alone


def test_comparing_sampled_texts_says_that_they_differ(session):
    chat = commands.Chat(session)
    session.change(**SAMPLED)
    ask(session, "hello")
    text = shown(commands.run(chat, "/compare"))
    assert "differs" in text and "the texts differ" in text


def figures(rate, mean=3.0, passes=30):
    return {"draft_acceptance_rate": rate, "mean_draft_length": mean, "drafter_passes": passes}


@pytest.mark.parametrize(
    ("policy", "options", "rate", "mean", "command"),
    [
        ("static", ("draft_length=3",), 0.9, 3, "/gamma 5"),
        ("static", ("draft_length=3",), 0.8, 3, None),
        ("static", ("draft_length=3",), 0.5, 3, None),
        ("static", ("draft_length=6",), 0.4, 6, "/gamma 3"),
        ("static", (), 0.4, 7, "/gamma 3"),
        ("static", ("draft_length=1",), 0.4, 1, "/policy adaedl"),
        ("static", ("draft_length=15",), 0.9, 15, "/gamma 16"),
        ("static", ("draft_length=16",), 0.9, 16, None),
        ("adaedl", (), 0.9, 3, "/lambda 0.5"),
        ("adaedl", ("threshold=0.3",), 0.4, 3, "/lambda 0.5"),
        ("adaedl", ("threshold=0.0",), 0.9, 3, None),
        ("adaedl", (), 0.9, 6.5, "/max-draft-length 14"),
        ("adaedl", (), None, None, "/lambda 0.3"),
        ("adaedl", ("threshold=0.2",), None, None, "/gamma 3"),
        ("survival", (), 0.9, 3, "/gamma 5"),
        ("survival", (), 0.4, 4, "/max-draft-length 3"),
        ("survival", (), 0.4, 1.2, None),
    ],
)
def test_suggestions(policy, options, rate, mean, command):
    most = 16 if policy == "static" else 7
    chosen = Settings(policy=policy, policy_options=options, max_draft_length=most)
    found = suggest(chosen, figures(rate, mean))
    assert (found and found.command) == command
    if found and rate:
        assert ("longer" in found.advice) == (rate > 0.8)


def test_nothing_is_suggested_where_nobody_drafts():
    assert suggest(Settings(drafter="none"), figures(None, None, passes=0)) is None


def test_gamma_auto_does_what_is_suggested(session):
    chat = commands.Chat(session)
    turn = ask(session, "hello")
    low = {**turn.result.statistics, "draft_acceptance_rate": 0.3}
    session.last = turn._replace(result=turn.result._replace(statistics=low))
    assert "/gamma 1" in shown(commands.run(chat, "/gamma auto"))
    assert session.settings.policy_options == ("draft_length=1",)
    session.last = turn._replace(result=turn.result._replace(statistics={**low, "draft_acceptance_rate": 0.7}))
    assert "Nothing to change" in shown(commands.run(chat, "/gamma auto"))


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        ("/pol", ["/policy"]),
        ("/policy ada", ["adaedl", "adaptive_gamma"]),
        ("/policy adaedl thr", ["threshold=", "threshold_decay="]),
        ("/policy at_least min", ["minimum="]),
        ("/policy static draft_length=3 dr", []),
        ("/policy nonsense x", []),
        ("/verifier g", ["greedy"]),
        ("/target smollm2-drafter-n", ["smollm2-drafter-nano"]),
        ("/drafter no", ["none"]),
        ("/gamma ", ["auto"]),
        ("/tokens o", ["on", "off"]),
        ("/help /qu", ["/quit"]),
        ("hello /pol", []),
    ],
)
def test_completions(before, expected):
    found = complete(before)
    assert [completion.text for completion in found] == expected
    assert all(before.endswith(c.text[: -c.start]) and c.start == -len(before.split(" ")[-1]) for c in found)


def test_every_command_has_help_and_a_line_in_the_documentation():
    text = shown(commands.run(commands.Chat(None), "/help"))  # type: ignore[arg-type]
    assert all(name in text for name in commands.COMMANDS)
    assert np.all([command.help for command in commands.COMMANDS.values()])
    page = (Path(__file__).parent.parent / "docs" / "chat.md").read_text(encoding="utf-8")
    assert [name for name in commands.COMMANDS if name not in page] == []
