"""Requests to a tiny llama in float32: greedy equals plain, neighbours, resuming, extending, scoring, refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_llama
from refusals import refusals

from specdec_jax import ModelParams, SamplingParams, build_decoder, make_warp
from specdec_jax.decoding import default_widths
from specdec_jax.decoding.scoring import score
from specdec_jax.drafters import model
from specdec_jax.drafters import no_drafter as no_drafter
from specdec_jax.drafters.model import ModelDrafterState
from specdec_jax.lossless.toys import table_model, toy_pair
from specdec_jax.stopping import adaedl, at_least, static
from specdec_jax.verification import block, greedy, rejection

pytestmark = pytest.mark.usefixtures("exact_products")

CONFIG = tiny_llama.variant(max_position_embeddings=256)
# This llama is never sure, and often rejected: at the published hyperparameters lambda soon forbids every draft.
LIVELY = {"entropy_factor": 0.05, "threshold": 0.6, "step": 0.04, "threshold_decay": 0.2, "target_acceptance": 0.4}
POLICIES = {
    "static": (static(), {"draft_length": 3}),
    "adaedl": (adaedl(), LIVELY),
    "adaedl_keep": (adaedl(keep_checked_token=True), LIVELY),
    "at_least": (at_least(1, adaedl()), LIVELY),
}
VERIFIERS = {"rejection": rejection(), "block": block(), "greedy": greedy()}
PROMPTS = [[7], list(range(3, 40)), [5, 9, 2, 2, 60, 1]]  # the second is longer than two prefill chunks
NEW, SLOTS = 20, 128


@functools.cache
def pair():
    tiny, *params = tiny_llama.noisy_pair(CONFIG)
    return tiny, ModelParams(*params)


@functools.cache
def decoder_of(policy="adaedl", verifier="rejection", widths=(4,)):
    tiny, _ = pair()
    rule = POLICIES[policy][0]
    drafter = model(tiny, 3, catch_up=16)
    return build_decoder(tiny, drafter, rule, VERIFIERS[verifier], verification_widths=widths, prefill_chunk=16)


def begin(decoder, prompts=PROMPTS, policy="adaedl", **options):
    usual = {"max_new_tokens": NEW, "slots": SLOTS, "record_rounds": NEW, "policy_hyperparameters": POLICIES[policy][1]}
    return decoder.prefill(pair()[1], prompts, **usual | options)


def texts(state):
    rows = zip(np.asarray(state.tokens), np.asarray(state.length), strict=True)
    return [row[:length].tolist() for row, length in rows]


def decoded(decoder, prompts=PROMPTS, **options):
    return texts(decoder.run(pair()[1], begin(decoder, prompts, **options)))


@functools.cache
def plain():
    """Greedy decoding without a drafter, and without a cache to go wrong."""
    tiny, params = pair()

    @jax.jit
    def next_token(tokens, length):
        logits, _ = tiny.apply(params.target, tokens, tiny.init_cache(params.target, 1, SLOTS))
        return jnp.argmax(logits[0, length - 1])

    found = []
    for prompt in PROMPTS:
        text = list(prompt)
        for _ in range(NEW):
            padded = np.zeros((1, SLOTS), np.int32)
            padded[0, : len(text)] = text
            text.append(int(next_token(padded, len(text))))
        found.append(text)
    return found


@pytest.mark.often(3)
@pytest.mark.parametrize(
    "policy, verifier",
    [("static", "rejection"), ("adaedl", "rejection"), ("adaedl_keep", "block"), ("adaedl_keep", "rejection")]
    + [("at_least", "rejection"), ("static", "greedy"), ("adaedl", "greedy")],
)
def test_greedy_is_plain_decoding(policy, verifier):
    decoder = decoder_of(policy, verifier, widths=default_widths(3))
    state = decoder.run(pair()[1], begin(decoder, policy=policy))
    assert texts(state) == plain()
    accepted, drafted = (int(np.sum(getattr(state.statistics, f"num_{n}_tokens"))) for n in ("accepted", "draft"))
    assert 0 < accepted < drafted, "all drafts were alike: this proves little"


def history(state, row):
    return texts(state)[row], jax.tree.map(lambda leaf: np.asarray(leaf)[row], state.record)


def same_history(one, other):
    assert one[0] == other[0]
    drafted = np.arange(3) < one[1].drafted[:, None]
    for name in ("drafted", "accepted", "emitted", "drafter_passes", "discarded"):
        np.testing.assert_array_equal(getattr(one[1], name), getattr(other[1], name), err_msg=name)
    np.testing.assert_array_equal(one[1].proposed[drafted], other[1].proposed[drafted])
    for name in ("entropy", "max_prob", "threshold"):
        np.testing.assert_allclose(getattr(one[1], name), getattr(other[1], name), rtol=1e-4, err_msg=name)


def test_a_row_does_not_depend_on_its_neighbours():
    """Another text, another seed, another end and other hyperparameters beside it; one verification width."""
    decoder, params = decoder_of(), pair()[1]
    decode = lambda *prompts, **options: decoder.run(params, begin(decoder, prompts, **options))  # noqa: E731
    for temperature in (0.0, 0.9):
        one = history(decode(*PROMPTS, warp=make_warp(3, temperature), seed=[5, 6, 7]), 1)
        others = {
            "warp": make_warp(3, [0.0, temperature, 1.5], top_k=[1, 0, 3]),
            "seed": [0, 6, 1],
            "max_new_tokens": [3, NEW, 0],
            "policy_hyperparameters": {name: [0.1, number, 0.9] for name, number in LIVELY.items()},
        }
        same_history(one, history(decode([1, 2], PROMPTS[1], [3] * 9, **others), 1))
        same_history(one, history(decode(PROMPTS[1], warp=make_warp(1, temperature), seed=6), 0))
        assert one[1].drafted.any() and one[1].discarded.any(), "its rule decided nothing"


def snapshot(state):
    return jax.tree.map(np.array, (state.drafter, state.length))


def assert_caches_filled(state):
    """Both hold what one pass over the text writes; what lies beyond a row's length is never read."""
    tiny, params = pair()
    target = ModelDrafterState(state.target_cache, state.length - 1)
    for weights, filled in ((params.target, target), (params.drafter, state.drafter)):
        tiny_llama.assert_filled(tiny, weights, filled, np.asarray(state.tokens))


def test_the_drafters_cache_is_one_pass_over_the_text():
    """After the prompt, rejections, full acceptance and rounds sat out, and in rows that ended long ago."""
    decoder, (tiny, params) = decoder_of("static", "rejection", widths=default_widths(3)), pair()
    options = {"policy_hyperparameters": {"draft_length": [3, 0, 2]}, "max_new_tokens": [NEW, NEW, 9]}
    state = begin(decoder, policy="static", **options)
    first, turns = snapshot(state), [[3, 0, 2]] * 3 + [[0, 0, 2]] * 7  # the first drafts, and then sits out
    assert (first[1] - 2 <= first[0].valid).all()
    seen = [first]
    while not np.asarray(state.done).all():
        drafts = jnp.array(turns[(len(seen) - 1) % len(turns)], jnp.int32)
        state = decoder.run(params, state._replace(policy=state.policy._replace(draft_length=drafts)), rounds=1)
        seen.append(snapshot(state))
    assert all((drafter.valid >= length - 2)[[0, 2]].all() for drafter, length in seen[:4]), "fed less than was drafted"
    for drafter, length in seen:
        assert (drafter.valid <= length - 1).all()
        tiny_llama.assert_filled(tiny, params.drafter, drafter, np.asarray(state.tokens))
    counts = state.statistics
    assert 0 < int(counts.num_accepted_tokens[0]) < int(counts.num_draft_tokens[0]) and int(counts.num_drafts[1]) == 0
    np.testing.assert_array_equal([drafter.valid[1] for drafter, _ in seen], first[0].valid[1], "a pass was paid for")


def test_a_seed_gives_the_same_tokens_after_any_resume():
    options = {"warp": make_warp(3, 1.0), "seed": 12}
    whole = decoded(decoder_of(), **options)
    decoder, params = decoder_of(), pair()[1]
    state = begin(decoder, **options)
    while not np.asarray(state.done).all():
        state = decoder.run(params, decoder.step(params, state), rounds=3)
    assert texts(state) == whole
    assert texts(decoder.step(params, state)) == whole, "a finished state changed"
    assert decoded(decoder_of(), **{**options, "seed": 13}) != whole


def test_a_last_chunk_does_not_run_over_the_end():
    """No slot to spare: a chunk that began where the one before ended would be clamped and overwrite good entries.

    One row, because then the cache is written by `dynamic_update_slice`, which clamps.
    """
    decoder, params, prompt, new = decoder_of("static"), pair()[1], PROMPTS[1], 4
    state = begin(
        decoder, [prompt], policy="static", max_new_tokens=new, record_rounds=new, slots=len(prompt) + new + 4
    )
    state = decoder.run(params, state)
    assert texts(state) == [plain()[1][: len(prompt) + new]]
    assert_caches_filled(state)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    "change",
    [
        lambda text: [*text, 8, 1, 30],  # the whole text and more
        lambda text: text,  # the text itself
        lambda text: text[:-7],  # shorter
        lambda text: [*text[:4], 11, 12],  # a common prefix and something else
        lambda text: [50, *text],  # nothing in common
        lambda text: text[:1],
        lambda text: [*text, *range(1, 36)],  # more than two chunks at once
    ],
    ids=["longer", "same", "shorter", "forked", "disjoint", "one_token", "much_longer"],
)
def test_extending_is_prefilling_anew(temperature, change):
    decoder, params = decoder_of(), pair()[1]
    options = {"warp": make_warp(3, temperature), "seed": 4}
    state = decoder.run(params, begin(decoder, **options))
    prompts = [change(text) for text in texts(state)]
    prompts[0] = prompts[0][:9]  # rows go different ways
    fresh = begin(decoder, prompts, **options)
    options |= {"max_new_tokens": NEW, "record_rounds": NEW, "policy_hyperparameters": LIVELY}
    continued = decoder.extend(params, state, prompts, **options)
    lengths = np.array([len(prompt) for prompt in prompts])
    assert (np.asarray(continued.target_cache.length) == lengths - 1).all()
    assert (lengths - 2 <= np.asarray(continued.drafter.valid)).all()
    assert_caches_filled(continued)
    assert texts(decoder.run(params, continued)) == texts(decoder.run(params, fresh))


def test_extending_needs_the_states_own_shape():
    decoder, params = decoder_of(), pair()[1]
    state = begin(decoder)
    with pytest.raises(ValueError, match=r"\(3, 128\).*\(2, 128\)"):
        decoder.extend(params, state, PROMPTS[:2], max_new_tokens=4)
    assert not state.tokens.is_deleted()


@pytest.mark.parametrize("length", [2, 32, 33])
def test_a_score_is_what_both_models_say(length):
    tiny, params = pair()
    tokens = np.random.default_rng(length).integers(0, 61, (2, length)).astype(np.int32)
    scores = score(decoder_of(), params, tokens, make_warp(2, 0.7))
    for weights, chances, entropies in (
        (params.target, scores.log_p, scores.target_entropy),
        (params.drafter, scores.log_q, scores.drafter_entropy),
    ):
        logits, _ = jax.jit(tiny.apply)(weights, tokens, tiny.init_cache(weights, 2, length))
        distribution = np.asarray(jax.nn.log_softmax(logits.astype(jnp.float32) / 0.7), np.float64)[:, :-1]
        np.testing.assert_allclose(chances, np.take_along_axis(distribution, tokens[:, 1:, None], 2)[..., 0], atol=2e-4)
        np.testing.assert_allclose(entropies, -(np.exp(distribution) * distribution).sum(-1), atol=2e-4)


def test_a_score_without_a_drafter_leaves_its_part_open():
    small = table_model(5)
    decoder = build_decoder(small, no_drafter(), static(), rejection())
    scores = score(decoder, ModelParams(toy_pair(5).target), [[1, 2, 3]])
    assert np.isfinite(scores.log_p).all() and np.isnan(scores.log_q).all()
    for texts, message in (([[1]], r"got \[1\]"), ([[1, 2], [3]], r"got \[1, 2\]"), ([[1, 5]], "token")):
        with pytest.raises(ValueError, match=message):
            score(decoder, ModelParams(toy_pair(5).target), texts)


# What a caller's own program traces


def test_keys_are_seeds():
    one, four = jax.random.key(7), jax.random.split(jax.random.key(2), 3)
    raw = np.asarray(jax.random.key_data(four))
    for seed, numbers in (
        (one, [7, 8, 9]),
        (jax.random.PRNGKey(7), [7, 8, 9]),
        (jax.random.key(7, impl="rbg"), [7, 8, 9]),
        (jax.random.key(2**32 - 1), [2**32 - 1, 0, 1]),
        ([jax.random.key(5), one, jax.random.key(1)], [5, 7, 1]),
        (four, raw[:, 0] ^ raw[:, 1]),
        (jnp.asarray(raw), raw[:, 0] ^ raw[:, 1]),
    ):
        assert begin(decoder_of(), seed=seed).key[:, 1].tolist() == list(numbers), seed
    assert SamplingParams(seed=one).seed == SamplingParams(seed=jax.random.PRNGKey(7)).seed == 7  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="seed must be a whole number"):
        SamplingParams(seed=four)  # type: ignore[arg-type]


def test_a_traced_request_is_prefilled_as_one_that_is_not():
    """Prompts of several lengths, keys and a temperature are arguments of the program."""
    rows, keys = [jnp.array(prompt) for prompt in PROMPTS], jax.random.split(jax.random.key(2), 3)

    def traced(prompts, seed, temperature):
        return begin(decoder_of(), prompts, seed=seed, warp=make_warp(3, temperature))

    ours = jax.jit(traced)(rows, keys, jnp.float32(0.7))
    state = begin(decoder_of(), seed=keys, warp=make_warp(3, 0.7))
    for leaf, other in zip(jax.tree.leaves(ours), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-4)
    one = jax.jit(traced)(jnp.array([[1, 2]] * 3), jnp.int32(4), jnp.float32(1))
    assert one.key[:, 1].tolist() == [4, 5, 6] and one.tokens[:, :3].tolist() == [[1, 2, 0]] * 3
    with pytest.raises(ValueError, match="max_new_tokens decides the shape of the caches"):
        jax.jit(lambda count: begin(decoder_of(), max_new_tokens=count))(3)


# Refusals


def begun(prompts, **options):
    return begin(decoder_of(), prompts, **options)


def built(drafts=3, drafter=None, catch_up=16, **options):
    tiny, _ = pair()
    return build_decoder(tiny, model(drafter or tiny, drafts, catch_up=catch_up), static(), rejection(), **options)


def of_greedy(**warp):
    return begin(decoder_of("static", "greedy"), policy="static", warp=make_warp(3, **warp))


def test_a_wrong_keyword_names_the_call_and_all_that_it_takes():
    with pytest.raises(TypeError, match=r"Decoder.prefill .*'max_tokens'; did you mean 'max_new_tokens'\? .*, warp\)"):
        begun([[1]], max_tokens=3)


test_what_is_refused = refusals(
    (lambda: begun([[1], []]), "empty"),
    (lambda: begun([]), "empty"),
    (lambda: begun([[1, 61]]), "prompt 0.*61.*61"),
    (lambda: begun([[-1]]), "-1"),
    (lambda: begun([[1] * 250], slots=None), "250.*20.*256"),
    (lambda: begun([[1] * 110]), "128 cache slots.*134"),
    (lambda: begun([[1]], max_new_tokens=-1), "max_new_tokens.*-1"),
    (lambda: begun([[1]], seed=-1), "seed.*-1"),
    (lambda: begun([[1]], seed=2**32), "seed.*4294967296"),
    (lambda: begun([[1]], seed=0.5), "seed.*0.5"),
    (lambda: begun([[1]], seed=[1, 2]), "seed.*1.*2"),
    (lambda: begun([[1], [2]], seed=jax.random.PRNGKey(3)), "two seeds or one raw key"),
    (lambda: begun([[1]], seed=jax.random.split(jax.random.key(3))), r"seed.*\(2,\)"),
    (lambda: begun([1, 2]), "prompt 0 must be a sequence of tokens, got 1"),
    (lambda: begun([[1]], warp=make_warp(2)), "the warp is of 2 rows, and there are 1"),
    (lambda: begun([[1]], policy_hyperparameters={"threshold": 2.0}), "threshold.*2.0"),
    (lambda: of_greedy(temperature=[0.0, 0.8, 0.0]), r"temperature 0.*0\.8"),
    (lambda: built(verification_widths=(2,)), "2.*3.*4"),
    (lambda: built(verification_widths=(4, 2)), r"\(4, 2\)"),
    (lambda: built(verification_widths=(0, 4)), "0"),
    (lambda: built(prefill_chunk=1), "prefill_chunk.*1"),
    (lambda: built(drafter=table_model(5)), "5.*61"),
    (lambda: built(catch_up=1), "catch_up.*1"),
    (lambda: built(0), "max_draft_length.*0"),
)
