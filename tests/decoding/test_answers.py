"""A policy whose functions do not answer each row is refused before anything compiles, wherever it first arrives."""

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax.app import cli
from specdec_jax.lossless import toy_decoder
from specdec_jax.stopping import adaedl, static
from specdec_jax.text.strategies import choose
from specdec_jax.verification import rejection

ONE = jnp.array(True)
WRONG = {
    "begin": (lambda state, context: (ONE, state), "begin .* answers bool[]"),
    "check": (
        lambda state, distribution, drafted, context: (jnp.all(distribution.entropy < 1), state),
        "check .* answers bool[]",
    ),
    "proceed": (
        lambda state, distribution, token, drafted, context: (drafted + token, state),
        "proceed .* answers int32[2]",
    ),
    "update": (
        lambda state, draft, result: state._replace(draft_length=draft.length.astype(jnp.float32)),
        "update .* float32[2]",
    ),
}


def matched(pattern: str) -> str:
    return pattern.replace("[", r"\[").replace("]", r"\]")


@pytest.mark.parametrize("name", WRONG)
def test_a_decoder_refuses_a_wrong_answer_when_it_is_prefilled(name):
    function, words = WRONG[name]
    decoder, params = toy_decoder(static().replace(**{name: function}), rejection())
    with pytest.raises(ValueError, match=matched(f"the policy's {words}")):
        decoder.prefill(params, [[0, 1], [1, 0]], max_new_tokens=4)


def test_a_state_of_another_shape_and_an_answer_alone_are_named():
    mean = static().replace(begin=lambda state, context: (context.alive, state._replace(draft_length=ONE)))
    alone = static().replace(check=lambda state, distribution, drafted, context: context.alive)
    other = static().replace(check=lambda state, distribution, drafted, context: (context.alive, (state,)))
    for policy, words in (
        (mean, r"begin .*\.draft_length was int32\[2\] and is bool\[\]"),
        (alone, r"check .* must return \(answer, state\); it returns bool\[2\]"),
        (other, "check .* must return the state as it got it, StaticState; it returns"),
    ):
        decoder, params = toy_decoder(policy, rejection())
        with pytest.raises(ValueError, match=words):
            decoder.prefill(params, [[0, 1], [1, 0]], max_new_tokens=4)


def test_one_row_is_one_answer():
    decoder, params = toy_decoder(static().replace(check=WRONG["check"][0]), rejection())
    with pytest.raises(ValueError, match=r"must answer bool\[1\] for one row; it answers bool\[\]"):
        decoder.prefill(params, [[0, 1]], max_new_tokens=4)
    honest, params = toy_decoder(adaedl(), rejection())
    assert np.all(honest.prefill(params, [[0, 1]], max_new_tokens=4).length == 2)


RULE = """
import jax.numpy as jnp
from specdec_jax.stopping import static

def my_rule():
    def check(state, distribution, drafted, context):
        return {answer}, state
    return static().replace(check=check)
"""


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (
            "jnp.all(distribution.entropy < 1)",
            "check (my_rule.check) must answer bool[2], one answer for each of 2 rows",
        ),
        ("drafted", "it answers int32[2]"),
        ("True", "it answers bool[]"),
        (
            "distribution.entropie < 1",
            "my_rule.py:7: AttributeError: 'Distribution' object has no attribute 'entropie'",
        ),
    ],
)
def test_every_command_refuses_a_policy_file_before_models_are_read(tmp_path, monkeypatch, capsys, answer, words):
    """With 2: 1 is verify-lossless's way to say that a rule is not lossless."""
    (tmp_path / "my_rule.py").write_text(RULE.format(answer=answer))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specdec_jax.loading.load._assemble", lambda *arguments: pytest.fail("weights were read"))
    for command in (["verify-lossless"], ["generate", "x"], ["chat"]):
        assert cli.main([*command, "--policy", "my_rule.py"]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: policy my_rule.py")
        assert words in captured.err and captured.err.count("\n") == 1


def test_an_honest_file_passes_also_where_it_reads_phases(tmp_path):
    (tmp_path / "my_rule.py").write_text(
        RULE.format(answer="context.monitor.phase < 1").replace("(check=check)", "(check=check, needs_phases=True)")
    )
    assert choose("policy", str(tmp_path / "my_rule.py")).needs_phases


def test_rows_are_asked_for_anew_where_the_state_does_not_change_with_them():
    def check(state, distribution, drafted, context):
        return jnp.zeros(1, bool), state

    def update(state, draft, result):
        return state

    def threshold(state):
        return jnp.zeros(1)

    answers = {"begin": lambda state, context: (context.alive, state), "check": check, "update": update}
    answers["threshold"] = threshold
    answers["proceed"] = lambda state, distribution, token, drafted, context: (context.alive, state)
    decoder, params = toy_decoder(static().replace(init=lambda batch: (), **answers), rejection())
    decoder.prefill(params, [[0, 1]], max_new_tokens=4)
    with pytest.raises(ValueError, match=r"answer for each of 2 rows; it answers bool\[1\]"):
        decoder.prefill(params, [[0, 1], [1, 0]], max_new_tokens=4)
