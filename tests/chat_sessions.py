"""Sessions of chat on tiny models, and what tests ask of them. conftest.py hands the fixtures to every test."""

import pytest
from chat_models import write_chat_pair
from rich.console import Console

from specdec_jax.app.chat.session import Session
from specdec_jax.app.chat.settings import Settings
from specdec_jax.text.generation import decode, prepare

SAMPLED = {"temperature": 0.9, "top_p": 0.95, "seed": 3}


@pytest.fixture(scope="module")
def chat_pair(tmp_path_factory):
    return write_chat_pair(tmp_path_factory.mktemp("chat"))


@pytest.fixture
def session(chat_pair):
    return Session(settings(chat_pair))


def settings(pair, **values):
    options = {"policy": "static(draft_length=3)", "max_new_tokens": 12, "max_draft_length": 3}
    return Settings(**{"target": pair[0], "drafter": pair[1], "dtype": "float32", **options, **values})


def ask(session, text):
    chunks = list(session.answer(text))
    assert [token for chunk in chunks for token in chunk.tokens] == session.last.result.tokens
    return session.last


def fresh(session, turn):
    """The same ids decoded by a new state."""
    request = prepare(session.pair, ["x"], session.settings, slots=turn.slots, record=True)
    request = request._replace(prompts=[turn.ids])
    return decode(session.pair, request).results[0]


def shown(renderable):
    console = Console(width=200, color_system=None)
    with console.capture() as captured:
        console.print(renderable)
    return captured.get()
