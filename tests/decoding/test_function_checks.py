"""What a user's functions raise, or return wrong, is one line with file and line, before anything compiles."""

import re

import jax.numpy as jnp
import numpy as np
import pytest

from specdec_jax import ModelParams, build_decoder
from specdec_jax.app import cli
from specdec_jax.contrib.trees import comb, survival_tree, traversal
from specdec_jax.decoding.function_checks import check_parts
from specdec_jax.decoding.user_code import is_users
from specdec_jax.drafters import model
from specdec_jax.drafters.prompt_lookup import prompt_lookup
from specdec_jax.lossless import toy_decoder
from specdec_jax.lossless.toys import table_model, toy_phases
from specdec_jax.stopping import adaedl, static
from specdec_jax.text.strategies import choose
from specdec_jax.verification import rejection

TOKENS, MOST = 4, 3
ONE = jnp.array(True)
INNER, LOOKUP = rejection(), prompt_lookup(MOST, vocab_size=TOKENS)
TREE = survival_tree(siblings=2)


def verified(place, change):
    """`verify` of another verifier, with one of the three values that it returns changed."""

    def verify(*given):
        returned = INNER.verify(*given)
        return (*returned[:place], change(returned[place]), *returned[place + 1 :])

    return verify


def opened(**changed):
    """`source` of another drafter, with some of its functions changed."""
    return lambda *given: LOOKUP.source(*given)._replace(**changed)


def short(drafted):
    return (), drafted._replace(tokens=drafted.tokens[:, :1])


def predicting(change):
    def source(*given):
        made = LOOKUP.source(*given)
        return made._replace(predict=lambda *asked: change(*made.predict(*asked)))

    return source


def one_token(next, memory):
    return next._replace(token=next.token[:1]), memory


def raising(*given):
    raise KeyError("lost")


def branching(state, distribution, drafted, context):
    return (context.alive if distribution.entropy > 1.0 else ~context.alive), state


# Strategy, the field that is replaced, its replacement, what the message says: one row for each check and each seam.
WRONG = [
    (static(), "check", lambda state, *seen: (ONE, state), "must return (bool[2], .*): [0] is bool[]"),
    (static(), "proceed", lambda state, *seen: (seen[1], state), "policy's proceed .* [0] is int32[2]"),
    (static(), "update", lambda state, *seen: state._replace(draft_length=jnp.ones(2)), "update .* float32[2]"),
    (static(), "check", lambda *seen: ONE, "must return (bool[2], .*), not bool[]"),
    (static(), "check", lambda state, *seen: (seen[2].alive, (state,)), "check .* must return (bool[2], StaticState"),
    (static(), "check", branching, "`if`, .* use jnp.where"),
    (static(), "begin", lambda state, context: (int(context.length[0]) > 3, state), "no Python number can be made of"),
    (static(), "begin", lambda state, context: (np.asarray(context.length) > 3, state), "NumPy cannot read an array"),
    (static(), "update", lambda state: state, "the policy's update .* takes 1 positional argument but 3 were given"),
    (static(), "threshold", lambda state: jnp.float32(1), "threshold .* must return float32[2], not float32[]"),
    (INNER, "verify", lambda state, draft, *seen: draft.log_q + 1, "TypeError: .* 'NoneType'"),  # lookups have no q
    (static(), "init", lambda batch: {"x": jnp.zeros(())}, "init .* leaves are [2,...]; ['x'] is float32[]"),
    (static(), "init", lambda batch, size: size, "init: .* missing 1 required positional argument: 'size'"),
    (TREE, "beside", lambda *given: given[1][:, None] > 0, "must return int32[2,1], not bool[2,1]"),
    (TREE, "beside", raising, "KeyError: 'lost'"),
    (INNER, "verify", lambda state, draft: state, "the verifier's verify .* takes 2 positional arguments"),
    (INNER, "verify", lambda *given: INNER.verify(*given)[:2], "must return (log_prob_accepted,"),
    (INNER, "verify", verified(0, lambda chance: chance[:, 0]), "(float32[2,2], float32[2,4], ()): [0] is float32[2]"),
    (INNER, "verify", verified(1, lambda _: 3), "the second a function, not (float32[2,2], int, ())"),
    (
        INNER,
        "verify",
        verified(1, lambda _: lambda accepted: accepted),
        "must return (float32[2,2], float32[2,4], ()): [1] is int32[2]",
    ),
    (INNER, "verify", verified(1, lambda _: raising), "KeyError: 'lost'"),
    (INNER, "verify", verified(2, lambda _: ONE), "(float32[2,2], float32[2,4], ()), not (.*, bool[])"),
    (traversal(), "outcomes", raising, "KeyError: 'lost'"),
    (traversal(), "outcomes", lambda *given: given[2], "must return SiblingOutcomes(.*), not int32[2]"),
    (LOOKUP, "init", raising, "KeyError: 'lost'"),
    (LOOKUP, "source", raising, "KeyError: 'lost'"),
    (LOOKUP, "source", lambda *given: given[1], "source .* must return a Source, not"),
    (LOOKUP, "source", opened(close=short), "[0].tokens is int32[2,1]"),
    (LOOKUP, "source", opened(close=lambda drafted: drafted.length), "close with (state, LoopResult), not int32[2]"),
    (LOOKUP, "source", opened(keep=lambda *given: given[1]), "must keep a memory (), not int32[2]"),
    (LOOKUP, "source", predicting(lambda next, memory: next), "must predict (Next, memory), not Next"),
    (LOOKUP, "source", predicting(one_token), "must predict a token int32[2], not int32[1]"),
    (LOOKUP, "commit", lambda params, state, tokens, valid: valid, "commit .* must return (), not int32[2]"),
    (toy_phases(), "observe", lambda state, *given: (), "observe .* must return Phases.*, not ()"),
]


def decoder_of(changed):
    parts = {"StoppingPolicy": "policy", "Verifier": "verifier", "Drafter": "drafter", "Monitor": "monitor"}
    given = {"policy": static(), "verifier": rejection(), "drafter": LOOKUP, "monitor": None}
    given[parts[type(changed).__name__.replace("Tree", "Stopping" if hasattr(changed, "update") else "")]] = changed
    if getattr(changed, "siblings", 0) or getattr(changed, "outcomes", None) is not None:
        given["drafter"] = model(table_model(TOKENS), MOST)
        given["policy"] = changed if given["policy"] is changed else comb()
    table = jnp.zeros((TOKENS,) * 3)
    return build_decoder(table_model(TOKENS), **given), ModelParams(table, table)


@pytest.mark.widths
@pytest.mark.parametrize("strategy, name, function, words", WRONG)
def test_a_wrong_function_is_one_line(strategy, name, function, words):
    decoder, params = decoder_of(strategy.replace(**{name: function}))
    with pytest.raises(ValueError) as caught:
        check_parts(decoder.parts, params)
    message = str(caught.value)
    pattern = re.escape(words).replace(r"\.\*", ".*").replace(r"\ ", " ")
    assert re.match(r"\S*test_function_checks\.py:\d+: .*" + pattern, message) and "\n" not in message, message


def test_what_the_package_has_is_not_checked_and_would_pass():
    for policy, verifier in ((TREE, traversal()), (adaedl(), rejection())):
        decoder, params = toy_decoder(policy, verifier)
        assert not is_users([*decoder.parts][1:])
        drafter = decoder.parts.drafter
        changed = drafter.replace(commit=lambda *given, inner=drafter: inner.commit(*given))
        same = verifier.replace(verify=verified(0, lambda chance: chance.astype(jnp.float16)))  # any float will do
        check_parts(decoder.parts._replace(drafter=changed, verifier=same), params)


def test_a_decoder_that_nobody_checked_broadcasts_no_answer():
    """Its own check is of the shapes that jax would broadcast silently, where they are used."""
    for name in ("begin", "check", "proceed"):
        wrong = static().replace(**{name: lambda state, *seen: (ONE, state)})
        decoder, params = toy_decoder(wrong, rejection())
        with pytest.raises(ValueError, match=rf"the policy's {name} must answer bool\[2\], got shape \(\)"):
            decoder.run(params, decoder.prefill(params, [[0, 1], [1, 0]], max_new_tokens=4))
    honest, params = toy_decoder(adaedl(), rejection())
    check_parts(honest.parts, params)


RULE = """
import jax.numpy as jnp
from specdec_jax.stopping import static

def my_rule():
    def check(state, distribution, drafted, context):
        return {answer}, state
    return static().replace(check=check)
"""
VERIFIER = """
from specdec_jax.verification import rejection

def my_rule():
    def verify(state, draft, distributions, context):
        return {answer}
    return rejection().replace(verify=verify)
"""


@pytest.mark.parametrize(
    "kind, text, answer, words",
    [
        ("policy", RULE, "distribution.entropie < 1", "7: AttributeError: 'Distribution' object has no attribute"),
        ("verifier", VERIFIER, "state", "5: the verifier's verify (my_rule.verify) must return (log_prob_accepted, "),
    ],
)
def test_every_command_refuses_a_file_before_models_are_read(tmp_path, monkeypatch, capsys, kind, text, answer, words):
    """With 2: 1 is verify-lossless's way to say that a rule is not lossless."""
    (tmp_path / "my_rule.py").write_text(text.format(answer=answer))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("specdec_jax.loading.load._opened", lambda *arguments: pytest.fail("weights were read"))
    for command in (["verify-lossless"], ["generate", "x"], ["chat"]):
        assert cli.main([*command, f"--{kind}", "my_rule.py"]) == 2
        captured = capsys.readouterr()
        assert captured.out == "" and captured.err.startswith("error: my_rule.py:")
        assert words in captured.err and captured.err.count("\n") == 1


def test_an_honest_file_passes_also_where_it_reads_phases(tmp_path):
    (tmp_path / "my_rule.py").write_text(
        RULE.format(answer="context.monitor.phase < 1").replace(
            "(check=check)", "(check=check, reads=frozenset({'phases'}))"
        )
    )
    assert choose("policy", str(tmp_path / "my_rule.py")).needs_phases
