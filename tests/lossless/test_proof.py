"""The engine rejects ordinary mistakes, whatever the seed, and passes the honest code beside them."""

from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import wrong_rules
from jax import lax
from wrong_rules import verifier_with

from specdec_jax import lossless
from specdec_jax.app import cli
from specdec_jax.contrib.trees import comb, traversal
from specdec_jax.decoding.sampling import distribution, draw, policy_uniforms
from specdec_jax.drafters import model, multi_drafter, prompt_lookup
from specdec_jax.lossless import Drawing, constants_of, proof, rounds
from specdec_jax.lossless.drawing import Shape
from specdec_jax.lossless.enumeration import PHASES, UNWATCHED
from specdec_jax.lossless.real_size import ROUNDING, prove_real_size
from specdec_jax.lossless.results import Counterexample, Result, shortest
from specdec_jax.lossless.toys import drawn_pair, table_model
from specdec_jax.stopping import adaedl, static
from specdec_jax.types import Drafter, Next, Source
from specdec_jax.verification import rejection

REFUSED = {  # by which property, or in which words
    "forgets_one_hot": ("verifier", "rounds of"),
    "first_rows_temperature": ("verifier", "differs for the same row"),
    "no_drafts": ("verifier", "rounds of"),
    "two_truncations": ("verifier", "rounds of"),
    "at_08": ("verifier", "rounds of"),
    "late_draft": ("verifier", "rounds of"),
    "eps_guard": ("verifier", "float32, 49,152 tokens"),
    "half_precision": ("verifier", "rounds of"),
    "third_sibling": ("verifier", "rounds with siblings"),
    "deep_siblings": ("verifier", "rounds with siblings"),
    "neighbours_beside": ("policy", "policy's beside differs for the same row"),
    "late_neighbour": ("policy", "differs for the same row"),
    "seed_by_table": ("policy", "the whole decoder"),
    "learns_seed": ("policy", "the whole decoder"),
}


@pytest.mark.often(6)
@pytest.mark.optimised
@pytest.mark.parametrize("name", REFUSED)
def test_mistakes_are_refused(name):
    kind, says = REFUSED[name]
    rules = {"policy": static(draft_length=4), "verifier": rejection()} | {kind: getattr(wrong_rules, name)()}
    found = lossless.prove(**rules, seed=5)
    assert found.conclusion == lossless.NOT_LOSSLESS
    assert any(says in f"{row.name} {row.wrong}" for row in found.rows if not row.passed), found.rows


def never_ends(log_accept, draft, distributions, context):
    early = (draft.tokens == 151_645) & (distributions.top_token[:, :-1] != 151_645)
    return jnp.where(early, -jnp.inf, log_accept)


def greedy_if_cool(log_accept, draft, distributions, context):
    cool = ((context.warp.temperature > 0) & (context.warp.temperature < 0.25))[:, None]
    right = jnp.where(draft.tokens == distributions.top_token[:, :-1], 0.0, -jnp.inf)
    return jnp.where(cool, right, log_accept)


def bolder_late(log_accept, draft, distributions, context):
    return jnp.where((context.emitted == 40_321)[:, None], jnp.minimum(0.0, log_accept + 1.0), log_accept)


@pytest.mark.optimised
@pytest.mark.parametrize("accept", [never_ends, greedy_if_cool, bolder_late])
def test_a_mistake_at_one_number_is_found_by_the_constants_of_its_program(accept):
    wrong = verifier_with(accept)
    found = lossless.prove(static(), wrong, seed=1, shapes=1 if accept is never_ends else 5)
    assert found.conclusion == lossless.NOT_LOSSLESS and found.counterexample is not None
    number = {never_ends: 151_645, greedy_if_cool: 0.25, bolder_late: 40_321}[accept]
    assert number in found.constants and number not in constants_of(static(), rejection(), UNWATCHED)


def verifier_by(changed):
    """Rejection with other weights of the next token: (state, draft, weights [B, V]) -> the same; the state counts."""

    def verify(state, draft, distributions, context):
        lengths, following, _ = rejection().verify((), draft, distributions, context)
        return lengths, lambda accepted: changed(state, draft, following(accepted)), state + 1

    return rejection().replace(init=lambda batch: jnp.zeros((batch,), jnp.int32), verify=verify)


@pytest.mark.parametrize(("chosen", "length"), [(False, 1), (True, 2)])
def test_weights_too_large_at_real_vocabularies_are_seen_in_every_kind_of_draft(chosen, length):
    def changed(state, draft, weights):
        here = (draft.one_hot[:, 0] == chosen) & (draft.length == length)
        return jnp.where(here[:, None], weights + 1e-9, weights)

    assert prove_real_size(verifier_by(changed), Drawing(1), 49_152, warps=1).measure > ROUNDING


@pytest.mark.optimised
def test_a_mistake_after_many_rounds_is_found():
    late = verifier_by(lambda state, draft, weights: jnp.where((state > 200)[:, None], weights + 0.01, weights))
    shape = Shape(4, 1, 2, False, False)
    found = [rounds.prove_rounds(static(), late, Drawing(1), shape, rounds=n)[0] for n in (rounds.ROUNDS, rounds.MANY)]
    assert found[0].measure < rounds.TOLERANCE < found[1].measure


@pytest.mark.optimised
@pytest.mark.parametrize(
    ("policy", "verifier"), [(adaedl(), rejection()), (comb(), traversal())], ids=["chains", "trees"]
)
def test_honest_rules_pass_all_properties(policy, verifier, monkeypatch):
    monkeypatch.setattr(proof, "VOCABULARIES", proof.VOCABULARIES[: 3 if policy.drafts_chains else 1])
    found = lossless.prove(policy, verifier, seed=1, shapes=1)
    assert found.conclusion == lossless.LOSSLESS and all(row.passed for row in found.rows), found
    assert len(found.rows) == 5 + len(proof.VOCABULARIES) and sum(row.rounds for row in found.rows) > 2_000


# Drafters


def text_drafter(kind, longest, vocab):
    """Draws the text's tokens by their counts; `kind` is a mistake, or "honest"."""

    def source(params, state, tokens, context):
        rows = jnp.arange(len(tokens))[:, None]
        inside = jnp.arange(tokens.shape[1])[None] < context.length[:, None]
        counts = jnp.zeros((len(tokens), vocab)).at[rows, tokens].add(inside.astype(jnp.float32))
        logits = jnp.log((counts[:1] + jnp.zeros_like(counts) if kind == "first row" else counts) + 0.3)
        seen = distribution(logits, context.warp)
        weights = jnp.exp(logits if kind == "own temperature" else seen.log_prob)
        if kind == "top 32":
            weights *= jnp.zeros_like(weights).at[rows, lax.top_k(weights, min(32, vocab))[1]].set(1.0)

        def predict(memory, drafted, uniform):
            token = draw(weights, uniform)
            return Next(seen, token, token < 32_000 if kind == "special tokens" else None), memory

        def close(drafted):
            log_q = drafted.log_q
            if kind == "bfloat16":
                log_q = log_q.astype(jnp.bfloat16).astype(jnp.float32)
            last = jnp.take_along_axis(drafted.tokens, jnp.maximum(drafted.length - 1, 0)[:, None], axis=1)[:, 0]
            cut = (last == 0) & (drafted.length > 0) & (kind == "cut at the end")
            return state, drafted._replace(log_q=log_q, length=drafted.length - cut.astype(jnp.int32))

        return Source(lambda going: state, predict, lambda memory, *drawn: memory, close, cost=0.0)

    init = lambda params, batch, slots, source=None: jnp.zeros((batch,), jnp.int32)  # noqa: E731
    return Drafter(init, source, lambda params, state, tokens, length: state, longest)


WRONG_DRAFTERS = {
    "own temperature": "reported",
    "bfloat16": "sums to 1 +",
    "first row": "depend on the other rows",
    "special tokens": "is proposed depends on the token",
    "cut at the end": "is proposed depends on the token",
    "top 32": "lie beyond",
    "honest": "",
}


@pytest.mark.optimised
@pytest.mark.parametrize("kind", WRONG_DRAFTERS)
def test_a_drafter_draws_what_it_reports(kind, monkeypatch):
    monkeypatch.setattr(proof, "VOCABULARIES", (49_152,))
    numbers = constants_of(None, None, PHASES, text_drafter(kind, 3, 7))
    results = proof._drafter(lambda longest, vocab: text_drafter(kind, longest, vocab), Drawing(1, numbers))
    wrong = results[-1][1].wrong
    assert bool(wrong) == (kind != "honest") and WRONG_DRAFTERS[kind] in wrong


def test_drafters_with_models_are_swept_too():
    tables, vocab = drawn_pair(np.random.default_rng(0), 6, 3.0), 6
    small = model(table_model(vocab), 4, catch_up=4)
    several = multi_drafter((prompt_lookup(4, vocab_size=vocab), small))
    for drafter, params in ((small, tables.drafter), (several, (None, tables.drafter))):
        result = lossless.prove_law(drafter, params, Drawing(3), vocab_size=vocab, batch=4, rounds=3)
        assert not result.wrong and result.measure < 2e-5 and result.counts["drawn"] > 3


# What a run is


def test_a_seed_draws_the_same_again_and_another_one_other_cases():
    shapes = [next(Drawing(seed).shapes(8)) for seed in (1, 1, 2)]
    assert shapes[0] == shapes[1] != shapes[2]
    drawn = [Drawing(seed, [0.25]).requests(64, shapes[0], False, 4) for seed in (1, 1, 2)]
    for first, second, third in zip(*(requests.warp for requests in drawn), strict=True):
        assert np.array_equal(first, second) and not np.array_equal(first, third)
    temperature = drawn[0].warp.temperature
    ranges = [(0, 0), (1e-9, 0.3), (0.3001, 0.999), (1, 1), (1.001, 8)]
    assert all(np.any((temperature >= low) & (temperature <= high)) for low, high in ranges)
    assert np.any(drawn[0].limit < 5) and np.any(drawn[0].before > 1_000) and len(set(drawn[0].kind.tolist())) == 4
    fives = [shape for shape, _ in zip(Drawing(0).shapes(8), range(5), strict=False)]
    assert sorted(shape.longest for shape in fives)[:3] == [0, 1, 2] and max(shape.longest for shape in fives) == 8
    assert sum(shape.chosen for shape in fives) == 1


@pytest.mark.optimised
def test_minutes_draw_until_they_are_over_and_gaps_are_named(monkeypatch):
    monkeypatch.setattr(proof, "VOCABULARIES", ())
    monkeypatch.setattr(proof, "prove_whole", lambda *rules, **options: Result(1.0, {"drafts": 1, "rounds": 1}))
    clock = iter(range(0, 900, 20))
    monkeypatch.setattr(proof, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    never = static().replace(check=lambda state, seen, drafted, context: (jnp.zeros_like(context.alive), state))
    found = lossless.prove(never, rejection(), seed=0, shapes=1, max_draft_length=2, minutes=0.001)
    assert found.passes == 1 and found.gaps == ("the rule never drafted",) and found.conclusion == lossless.NOT_SHOWN
    by_chance = static().replace(
        check=lambda state, seen, drafted, context: (
            policy_uniforms(context, 1)[:, 0] * (1.0 + drafted.astype(float)) < 0.9,
            state,
        ),
        proceed=lambda state, seen, token, drafted, context: (jnp.ones_like(context.alive), state),
    )
    found = lossless.prove(by_chance, rejection(), seed=0, shapes=1, max_draft_length=2, minutes=0.6)
    assert found.passes == 2 and found.conclusion == lossless.LOSSLESS and found.seconds == 60


def test_the_shortest_counterexample_is_shown():
    one = Counterexample("round by round", (0, 1), {"temperature": 1.0}, (2, 1), 0.25, 0.5, draft=(2, 1, 0))
    later, drawn = one._replace(tokens=(2, 1, 0)), one._replace(tokens=(1,), sampled=True)
    assert shortest([None, later, drawn, one]) == one and shortest([None]) is None


FAILING = {
    "policy": (
        "from specdec_jax.stopping import static\n"
        "def bad():\n"
        "    def update(state, draft, result):\n"
        "        return state if draft.tokens.shape[1] == 3 else int(draft.length[0])\n"
        "    return static().replace(update=update)\n",
        "bad.py:4: no Python number can be made of an array",
    ),
    "drafter": (
        "from specdec_jax.drafters import prompt_lookup\n"
        "def bad(max_draft_length=3):\n"
        "    def source(*arguments):\n"
        "        return 1 / 0\n"
        "    return prompt_lookup(max_draft_length).replace(source=source)\n",
        "bad.py:4: ZeroDivisionError: division by zero",
    ),
    "monitor": (
        "from specdec_jax.monitors import phases\n"
        "def bad():\n"
        "    def observe(state, logits, result, context):\n"
        "        raise RuntimeError('no\\nmore')\n"
        "    return phases().replace(observe=observe)\n",
        "bad.py:4: RuntimeError: no more",
    ),
}


@pytest.mark.parametrize("kind", FAILING)
def test_an_error_in_a_users_file_is_one_line_and_2(kind, capsys, tmp_path):
    source, says = FAILING[kind]
    (tmp_path / "bad.py").write_text(source)
    assert cli.main(["verify-lossless", f"--{kind}", str(tmp_path / "bad.py")]) == 2
    said = capsys.readouterr()
    assert not said.out and said.err.count("\n") == 1 and says in said.err and said.err.startswith("error: ")
