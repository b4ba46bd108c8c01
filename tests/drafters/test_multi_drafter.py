"""Several drafters at once: who is chosen, that the rest sits out and catches up; the text stays the target's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_llama
from drafting import carried_shapes
from refusals import refusals
from rules import counting

from specdec_jax import ModelParams, build_decoder, lossless, make_warp
from specdec_jax.drafters import model, ngram, prompt_lookup
from specdec_jax.drafters import multi_drafter as multi_drafter
from specdec_jax.drafters._parts import lookup
from specdec_jax.lossless.toys import table_model, toy_pair
from specdec_jax.stopping import adaedl, static
from specdec_jax.types import Drafter
from specdec_jax.verification import block, rejection

VOCAB, MOST, NEW = 5, 3, 60
TABLES = toy_pair(VOCAB, 0, distance=0.9)
GOOD, BAD = TABLES.target, toy_pair(VOCAB, 7).drafter


STATIC, REJECTION = static(), rejection()


def table(most=MOST):
    return model(table_model(VOCAB), most, catch_up=4)


BASE = table()
ALWAYS_FIRST = 0.1, 100.0  # costs at which the second never drafts


@functools.cache
def decoder_of(drafter, policy=STATIC, verifier=REJECTION):
    return build_decoder(table_model(VOCAB), drafter, policy, verifier, prefill_chunk=4)


def decode(drafter, params, *rules, temperature=1.0, prompts=((0, 1), (2, 3, 1)), **more):
    decoder = decoder_of(drafter, *rules)
    weights = ModelParams(TABLES.target, params)
    options = {"max_new_tokens": NEW, "seed": 3, "stop_ids": (), "record_rounds": NEW, "slots": 96, **more}
    state = decoder.prefill(weights, prompts, warp=make_warp(len(prompts), temperature=temperature), **options)
    return jax.tree.map(np.asarray, decoder.run(weights, state))


def rounds_of(state, row):
    return int(state.statistics.num_rounds[row])


@pytest.mark.seldom
@pytest.mark.parametrize(
    ("verifier", "drafters", "params"), [(rejection, 2, (BAD, GOOD)), (block, 1, (BAD,))], ids=["never_chosen", "alone"]
)
def test_one_drafter_among_several_is_that_drafter(verifier, drafters, params):
    """Joined alone, or with one never chosen, a drafter gives the same rounds: being joined changes nothing."""
    joined = multi_drafter([table() for _ in range(drafters)], costs=ALWAYS_FIRST[:drafters])
    rule, verification = adaedl(), verifier()
    cases = (table(), BAD), (joined, params)
    alone, among = (decode(*case, rule, verification) for case in cases)
    np.testing.assert_array_equal(among.tokens, alone.tokens)
    jax.tree.map(np.testing.assert_array_equal, among.statistics, alone.statistics)
    np.testing.assert_array_equal(among.record.proposed, alone.record.proposed)


def test_the_drafter_of_most_expected_tokens_per_time_drafts():
    """Round by round from what was recorded: the drafts accepted and verified, and the cost of a pass."""
    joined = multi_drafter([prompt_lookup(MOST), table(), table()], decay=0.8)
    state, drafts = decode(joined, (None, BAD, GOOD)), np.arange(MOST + 1)
    prior = np.array([[0.8, 1.8, 1.8], [1.0, 2.0, 2.0]])
    for row in range(2):
        learnt = prior
        record = jax.tree.map(lambda leaf, row=row: leaf[row, : rounds_of(state, row)].tolist(), state.record)
        assert set(record.drafter_id) == {0, 1, 2}
        for index, drafter in enumerate(record.drafter_id):
            shares, costs = (learnt[0] / learnt[1])[:, None], np.array([0.0, 0.1, 0.1])[:, None]
            rates = np.max(np.cumsum(shares**drafts, axis=1) / (1 + costs * drafts), axis=1)
            best_model = 1 + np.argmax(rates[1:])
            assert drafter in (np.argmax(rates), best_model)  # the model, where the lookup finds nothing
            learnt, accepted = prior + 0.8 * (learnt - prior), record.accepted[index]
            learnt[:, drafter] += accepted, min(accepted + 1, record.drafted[index])
        found = np.stack([state.drafter.accepted[row], state.drafter.verified[row]])
        np.testing.assert_allclose(found, learnt, rtol=1e-4)


def test_a_drafter_nobody_chose_does_not_run():
    """Its passes are behind `lax.cond`."""
    calls = []

    def source(*arguments):
        made = BASE.source(*arguments)

        def predict(*asked):
            jax.debug.callback(lambda: calls.append(1))
            return made.predict(*asked)

        return made._replace(predict=predict)

    joined = multi_drafter([BASE.replace(source=source), table()])
    state = decode(joined, (BAD, GOOD), prompts=((0, 1),))
    jax.effects_barrier()
    rounds = rounds_of(state, 0)
    chosen = state.record.drafter_id[0, :rounds] == 0
    assert 0 < np.sum(chosen) < rounds
    assert len(calls) == np.sum(state.record.drafter_passes[0, :rounds][chosen])


def repeats_last(most=MOST, only_after=None) -> Drafter:
    """Drafts the row's last token again and again, without a model; nothing unless that token is `only_after`."""

    def source(params, state, tokens, context):
        last = jnp.take_along_axis(tokens, context.length[:, None] - 1, axis=1)[:, 0]
        found = context.alive & (True if only_after is None else last == only_after)
        return lookup(state, lambda memory, drafted: (last, found, jnp.ones(last.shape)), None)

    keep = lambda params, state, tokens, length: state  # noqa: E731
    return Drafter(lambda params, batch, slots: jnp.zeros((batch,)), source, keep, most)


def asking_costs():
    """A policy that stops where a pass costs more than 1, and shows each row's cost."""

    def goes_on(state, *seen):
        return seen[-1].relative_drafter_cost <= 1.0, state

    return static().replace(
        init=lambda batch: jnp.full((batch,), -1.0),
        begin=lambda state, context: (jnp.full(context.length.shape, True), context.relative_drafter_cost),
        check=goes_on,
        proceed=goes_on,
        threshold=lambda state: state,
        hyperparameters={},
    )


def test_rules_get_the_relative_cost_of_the_drafter_that_drafts():
    """In passes of the first model: a lookup is free, and a drafter of twice the cost costs two."""
    joined = multi_drafter([prompt_lookup(MOST), table(), table()], costs=[0.0, 0.1, 0.2], decay=0.5)
    state = decode(joined, (None, BAD, GOOD), asking_costs())
    rounds = rounds_of(state, 0)
    who, thresholds, drafted = (
        getattr(state.record, name)[0, :rounds] for name in ("drafter_id", "threshold", "drafted")
    )
    assert set(who.tolist()) == {0, 1, 2}
    emitted_before = np.concatenate([[0], np.cumsum(state.record.emitted[0, :rounds])[:-1]])
    longest = np.minimum(MOST, NEW - emitted_before - 1)  # the last token of a text is not drafted
    np.testing.assert_allclose(thresholds[longest > 0], np.array([0.0, 1.0, 2.0])[who[longest > 0]])
    assert np.all(drafted[who == 2] == 0) and np.all((drafted == longest)[who == 1])
    assert np.sum((who == 1) & (longest == MOST)) > 2


def test_drafters_that_all_choose_their_tokens_keep_no_distributions():
    """A second drafter without distributions: no round fills a buffer, and the loop carries none."""
    chooses = BASE.replace(source=lambda *arguments: BASE.source(*arguments)._replace(chosen=True))
    weights = ModelParams(TABLES.target, (None, GOOD))
    for second, kept in ((BASE, True), (chooses, False)):
        decoder = decoder_of(multi_drafter([prompt_lookup(MOST), second]))
        state = jax.eval_shape(lambda decoder=decoder: decoder.prefill(weights, [[0, 1]], max_new_tokens=9))
        assert ((1, MOST, VOCAB) in carried_shapes(decoder, weights, state)) == kept


def test_a_drafter_without_drafts_hands_over_in_the_same_round():
    """To the best of those with a model; a lookup without drafts leaves no evidence."""
    joined = multi_drafter([repeats_last(only_after=2), table(), table()], costs=[0.0, 0.5, 0.5])
    state = decode(joined, (None, BAD, GOOD), seed=1)
    for row in range(2):
        rounds = rounds_of(state, row) - 1
        begins = np.concatenate([[0], np.cumsum(state.record.emitted[row, :rounds])])[:-1] + state.prompt_length[row]
        last, chosen = state.tokens[row, begins - 1], state.record.drafter_id[row, :rounds]
        assert np.all(chosen[last != 2] > 0) and 0 in chosen[last == 2]
        assert chosen[last != 2][:2].tolist() == [1, 2] and np.mean(chosen[last != 2] == 2) > 0.8
        assert np.all(state.record.drafted[row, :rounds] > 0)


def test_a_rule_is_asked_by_one_drafter_a_round():
    """What a lookup asked before it handed its row over is as if it had not been: the rule counts one drafter's
    questions. Without memory the model is never chosen twice in a row, so that its second round was handed to it.
    """
    joined, lengths = multi_drafter([prompt_lookup(MOST), table()], decay=0.0), [2, 3, 0, 1]
    prompts, temperatures = ((0, 1), (2, 3, 1), (4,), (3, 3)), [1.0, 0.0, 1.0, 0.9]
    options = {"prompts": prompts, "temperature": temperatures, "policy_hyperparameters": {"length": lengths}}
    state = decode(joined, (None, BAD), counting(), **options)
    handed = 0
    for row, length in enumerate(lengths):
        rounds = rounds_of(state, row)
        record = jax.tree.map(lambda leaf, row=row, rounds=rounds: leaf[row, :rounds], state.record)
        asked = jax.tree.map(lambda leaf, row=row: int(leaf[row]), state.policy)
        room = NEW - np.concatenate([[0], np.cumsum(record.emitted)[:-1]]) > 1  # a last token is not drafted
        assert asked.begins == np.sum(room)
        assert asked.checks == np.sum(np.isfinite(record.entropy))
        assert asked.proceeds == np.sum(record.drafted) and asked.updates == rounds
        assert (asked.proceeds > 0) == (length > 0)
        handed += int(np.sum((record.drafter_id[1:] == 1) & (record.drafter_id[:-1] == 1)))
    assert handed > 20 and set(np.unique(state.record.drafter_id)) == {0, 1}


@pytest.mark.optimised
def test_the_text_is_the_targets_in_distribution():
    """A choice that follows acceptance, one-hot drafts beside drawn ones: the whole decoder by chi-square."""
    tables, small = toy_pair(3, 0), table_model(3)
    models = [model(small, 2, catch_up=4) for _ in range(2)]
    drafter = multi_drafter([repeats_last(2), *models], decay=0.3)
    decoder = build_decoder(small, drafter, static(), rejection(), prefill_chunk=4)
    params = ModelParams(tables.target, (None, tables.drafter, toy_pair(3, 1).drafter))
    options = {"policy_hyperparameters": {"draft_length": 2}, "sequences": 24_576}
    report = lossless.test_by_sampling(decoder, params, **options)
    assert report.lossless, report


test_what_is_refused = refusals(
    (lambda: multi_drafter([]), "at least one drafter"),
    (lambda: multi_drafter([table(2), table(3)]), r"one max_draft_length, got \[2, 3\]"),
    (lambda: multi_drafter([table()], costs=[0.1, 0.2]), "costs must be 1 numbers"),
    (lambda: multi_drafter([table(), model(table_model(3), MOST)]), r"one vocabulary, got \[3, 5\] entries"),
    (lambda: multi_drafter([table(), table()]).init((BAD,), 1, 8), "2 drafters need as many parameters"),
    (lambda: ngram(slots=100), "power of two"),
    (lambda: ngram(slots=2), "at least 4"),
    (lambda: prompt_lookup(longest=1, shortest=2), "shortest 2"),
    (lambda: prompt_lookup(shortest=0), "shortest 0"),
)


LONGEST, LIMITS = 3, [36, 36, 9]
PROMPTS = [[7, 3, 9], list(range(3, 20)), [5, 9, 2, 2, 60, 1]]  # the second takes more than four passes of catching up
WORSE, TARGET = 1, 2  # places among the drafters, behind a lookup


def play(decoder, weights, state):
    """Every state of a generation from its prompt on, copied before the next round takes its buffers."""
    states = [jax.tree.map(np.array, state)]
    while not states[-1].done.all():
        state = decoder.run(weights, state, rounds=1)
        states.append(jax.tree.map(np.array, state))
    return states


@pytest.fixture(scope="module")
def played():
    """The rounds of three rows, one of them greedy, and of conversations that go on from there: longer, forked, alike.

    The last drafter is the target itself. Gives the model, the drafters' parameters, and both lists of states.
    """
    llama, target, worse = tiny_llama.noisy_pair(tiny_llama.variant(max_position_embeddings=128))
    params = (None, worse, target)
    three = [prompt_lookup(LONGEST), *[model(llama, LONGEST, catch_up=4)] * 2]
    joined = multi_drafter(three, costs=[0.0, 0.1, 0.15], decay=0.1)  # none is best for long
    decoder = build_decoder(llama, joined, static(), rejection(), prefill_chunk=8)
    weights = ModelParams(target, params)
    options = {
        "max_new_tokens": LIMITS, "warp": make_warp(3, [0.0, 1.0, 0.8], top_k=[0, 0, 9]), "slots": 96, "seed": 3,
        "record_rounds": max(LIMITS), "policy_hyperparameters": {"draft_length": LONGEST}, "stop_ids": (),
    }  # fmt: skip
    with jax.default_matmul_precision("highest"):
        first = play(decoder, weights, decoder.prefill(weights, PROMPTS, **options))
        texts = [row[:length].tolist() for row, length in zip(first[-1].tokens, first[-1].length, strict=True)]
        prompts = [[*texts[0], 8, 1, 30, 4, 4, 4], [*texts[1][:9], 2], [*texts[2], 11]]
        given = jax.tree.map(jnp.asarray, first[-1])
        second = play(decoder, weights, decoder.extend(weights, given, prompts, **options))
        yield llama, params, (first, second)


@pytest.mark.parametrize("index", [WORSE, TARGET])
def test_a_cache_is_one_pass_over_the_text(played, index):
    """After the prompt and every round: drafts rejected and accepted whole, idle rounds, and a text that goes on."""
    llama, params, conversations = played
    for first, *later in conversations:
        assert (first.drafter.states[index].valid >= first.length - 2).all()
        before = first.drafter.states[index].valid
        for state in (first, *later):
            drafter, rows, last = state.drafter.states[index], np.arange(3), state.statistics.num_rounds - 1
            fed = (state.record.drafted[rows, last] > 0) & (state.record.drafter_id[rows, last] == index)
            assert (drafter.valid <= np.where(fed, state.length, before)).all(), "an idle drafter was fed"
            assert (drafter.valid[fed] >= state.length[fed] - 2).all() and (drafter.valid <= state.length - 1).all()
            tiny_llama.assert_filled(llama, params[index], drafter, (later or [first])[-1].tokens)
            before = drafter.valid
        who = later[-1].record.drafter_id[:2]
        back = np.sum((who[:, 1:] == TARGET) & (who[:, :-1] != TARGET), axis=1)
        assert (back >= 2).all(), "the target must have sat out"


def test_a_rule_that_drafts_nothing_feeds_nobody(played):
    """Whoever is chosen: rounds without drafts cost no drafter pass, and nothing that was fed is lost."""
    llama, params, _ = played
    joined = multi_drafter([model(llama, LONGEST, catch_up=4)] * 2)
    decoder = build_decoder(llama, joined, static(), rejection(), prefill_chunk=8)
    weights = ModelParams(params[TARGET], params[1:])
    options = {"max_new_tokens": 9, "slots": 96, "policy_hyperparameters": {"draft_length": 0}, "stop_ids": ()}
    with jax.default_matmul_precision("highest"):
        states = play(decoder, weights, decoder.prefill(weights, PROMPTS, **options))
    for index in range(2):
        fed = [state.drafter.states[index].valid.tolist() for state in states]
        assert fed == fed[:1] * len(states) and min(fed[0]) > 0
