"""Several drafters at once: who is chosen, that the rest sits out and catches up; the text stays the target's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_llama
from refusals import refusals
from rules import counting

from specdec_jax import lossless
from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.drafters import model, ngram, prompt_lookup
from specdec_jax.drafters import multi_drafter as multi_drafter
from specdec_jax.drafters._parts import lookup
from specdec_jax.drafters.multi_drafter import MultiDrafterState, _learnt
from specdec_jax.lossless.toys import table_model, toy_pair, toy_phases
from specdec_jax.monitors import phases
from specdec_jax.stopping import adaedl, static
from specdec_jax.types import Drafter, StoppingPolicy
from specdec_jax.verification import block, rejection

VOCAB, MOST, NEW = 5, 3, 60
TABLES = toy_pair(VOCAB, 0, distance=0.9)
GOOD, BAD = TABLES.target, toy_pair(VOCAB, 7).drafter


STATIC, REJECTION = static(), rejection()


def table(most=MOST):
    return model(table_model(VOCAB), most, catch_up=4)


TWO = multi_drafter([table(), table()], drift=0.15, prior=8.0)


@functools.cache
def decoder_of(drafter, policy, verifier, monitor):
    return build_decoder(table_model(VOCAB), drafter, policy, verifier, monitor=monitor, prefill_chunk=4)


def decode(
    drafter,
    params,
    *,
    policy=STATIC,
    verifier=REJECTION,
    temperature=1.0,
    prompts=((0, 1), (2, 3, 1)),
    monitor=None,
    **more,
):
    decoder = decoder_of(drafter, policy, verifier, monitor)
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
    joined = multi_drafter([table() for _ in range(drafters)], prior=0.0, drift=0.0)
    rule, verification = adaedl(), verifier()
    cases = (table(), BAD), (joined, params)
    alone, among = (decode(*case, policy=rule, verifier=verification) for case in cases)
    np.testing.assert_array_equal(among.tokens, alone.tokens)
    jax.tree.map(np.testing.assert_array_equal, among.statistics, alone.statistics)
    np.testing.assert_array_equal(among.record.proposed, alone.record.proposed)


def learn_by_hand(tokens, time, who, emitted, paid, decay, drift):
    """The sums [N] of one row and phase after a round that `who` drafted and that took `paid` target passes."""
    tokens[who] = decay * tokens[who] + emitted
    time[who] = decay * time[who] + paid
    leader = tokens[who] / time[who]
    for other in set(range(len(tokens))) - {who}:
        tokens[other] += drift * (1.1 * leader - tokens[other])
        time[other] += drift * (1.0 - time[other])


def test_the_drafter_of_the_best_estimate_drafts():
    """Round by round from what was recorded: the tokens emitted and the drafter passes spent."""
    state = decode(TWO, (BAD, GOOD))
    for row in range(2):
        tokens, time = np.full(2, 8.0), np.ones(2)
        record = jax.tree.map(lambda leaf, row=row: leaf[row, : rounds_of(state, row)].tolist(), state.record)
        for index, who in enumerate(record.drafter_id):
            if sum(record.emitted[:index]) < NEW - 1:  # else nobody drafts
                assert who == np.argmax(tokens / time)
                paid = 1 + 0.1 * record.drafter_passes[index]
                learn_by_hand(tokens, time, who, record.emitted[index], paid, 0.8, 0.15)
        np.testing.assert_allclose(state.drafter.tokens[row, 0], tokens, rtol=1e-4)
        np.testing.assert_allclose(state.drafter.time[row, 0], time, rtol=1e-4)


def test_who_drafts_is_chosen_by_phase():
    """One is right after even tokens and the other after odd ones, which begin a round in the other phase."""
    even = (np.arange(VOCAB) % 2 == 0)[None, :, None]
    wrong = np.where(GOOD.min(axis=-1, keepdims=True) < GOOD, 0.0, 9.0).astype(np.float32)
    halves = np.where(even, GOOD, wrong), np.where(even, wrong, GOOD)
    joined = multi_drafter([table(), table()], decay=0.5, drift=0.05, prior=3.0)
    state = decode(joined, halves, monitor=toy_phases(), policy_hyperparameters={"draft_length": 1})
    for row in range(2):
        rounds = rounds_of(state, row) - 1
        chosen, phase = state.record.drafter_id[row, 12:rounds], state.record.phase[row, 12:rounds]
        assert set(phase.tolist()) == {0, 1} and np.mean(chosen == phase) > 0.8


def test_a_drafter_nobody_chose_does_not_run():
    """Its passes and commit are behind `lax.cond`; all read the prompt once."""
    calls = {"predict": 0, "commit": 0, "prefill": 0}

    def counted(drafter: Drafter) -> Drafter:
        def note(name):
            calls[name] += 1

        def source(*arguments):
            made = drafter.source(*arguments)

            def predict(*asked):
                jax.debug.callback(lambda: note("predict"))
                return made.predict(*asked)

            return made._replace(predict=predict)

        def commit(*arguments):
            jax.debug.callback(lambda: note("commit"))
            return drafter.commit(*arguments)

        def prefill(*arguments):
            jax.debug.callback(lambda: note("prefill"))
            return drafter.fill(*arguments)

        return drafter.replace(source=source, commit=commit, prefill=prefill)

    joined = multi_drafter([table(), counted(table())], drift=0.0, prior=4.0)
    state = decode(joined, (GOOD, BAD), prompts=((0, 1),))
    jax.effects_barrier()
    rounds = rounds_of(state, 0)
    others = state.record.drafter_id[0, :rounds] == 1
    assert 0 < np.sum(others) < rounds / 2
    assert calls["predict"] == np.sum(state.record.drafter_passes[0, :rounds][others])
    assert calls["prefill"] == 1 and calls["commit"] <= 2 * np.sum(others)  # before it drafts, and of what was accepted


def test_nobody_catches_up_for_a_row_that_drafts_nothing():
    """The last token of a text is the target's own; a drafter that sits out does not read it."""
    joined = multi_drafter([table(), table()], prior=0.0, drift=0.0)  # the first drafts always
    state = decode(
        joined, (BAD, GOOD), prompts=((0, 1),), max_new_tokens=8, policy_hyperparameters={"draft_length": MOST}
    )
    read = state.drafter.informed[0]
    assert read[1] == 2, "the prompt is all that the second has read"
    assert read[0] >= int(state.length[0]) - 1


def repeats_last(most=MOST, only_after=None) -> Drafter:
    """Drafts the row's last token again and again, without a model; nothing unless that token is `only_after`."""

    def source(params, state, tokens, context):
        last = jnp.take_along_axis(tokens, context.length[:, None] - 1, axis=1)[:, 0]
        found = context.alive & (True if only_after is None else last == only_after)
        return lookup(state, lambda memory, drafted: (last, found, jnp.ones(last.shape)), None)

    keep = lambda params, state, tokens, length: state  # noqa: E731
    return Drafter(lambda params, batch, slots: jnp.zeros((batch,)), source, keep, most)


def asking_costs():
    """A policy that stops where a pass costs more than its number, and says at its end each row's number."""

    def init(batch, highest=1.0):
        zeros = jnp.zeros((batch,), jnp.float32)
        return zeros + highest, zeros - 1.0

    def begin(state, context):
        return jnp.full(context.length.shape, True), (state[0], context.relative_drafter_cost)

    def check(state, distribution, drafted, context):
        return context.relative_drafter_cost <= state[0], state

    def proceed(state, distribution, token, drafted, context):
        return context.relative_drafter_cost <= state[0], state

    return StoppingPolicy(init, begin, check, proceed, lambda state, draft, result: state, lambda state: state[1])


def test_rules_get_the_relative_cost_of_the_drafter_that_drafts():
    """In passes of the first model: a lookup is free, and a drafter of twice the cost costs two."""
    joined = multi_drafter([prompt_lookup(MOST), table(), table()], costs=[0.0, 0.2, 0.4], drift=0.3, prior=30.0)
    state = decode(joined, (None, BAD, GOOD), policy=asking_costs())
    rounds = rounds_of(state, 0)
    who, thresholds, drafted = (
        getattr(state.record, name)[0, :rounds] for name in ("drafter_id", "threshold", "drafted")
    )
    assert set(who.tolist()) == {0, 1, 2}
    np.testing.assert_allclose(thresholds, np.array([0.0, 1.0, 2.0])[who])
    emitted_before = np.concatenate([[0], np.cumsum(state.record.emitted[0, :rounds])[:-1]])
    longest = np.minimum(MOST, NEW - emitted_before - 1)  # the last token of a text is not drafted
    assert np.all(drafted[who == 2] == 0) and np.all((drafted == longest)[who == 1])
    assert np.sum((who == 1) & (longest == MOST)) > 2


def test_a_lookup_alone_is_free_too():
    state = decode(prompt_lookup(MOST), None, policy=asking_costs(), policy_hyperparameters={"highest": 0.0})
    rounds = rounds_of(state, 0)
    assert np.all(state.record.threshold[0, :rounds] == 0.0) and state.record.drafted[0, :rounds].max() == MOST


def test_drafters_that_all_choose_their_tokens_keep_no_distributions():
    """A second drafter without distributions: no round fills a buffer, and the loop carries none."""
    draws = table()
    chooses = draws.replace(source=lambda *arguments: draws.source(*arguments)._replace(chosen=True))
    state = decode(multi_drafter([prompt_lookup(MOST), chooses]), (None, GOOD), temperature=0.0)
    assert state.statistics.num_emitted_tokens.tolist() == [NEW, NEW]


def test_a_drafter_without_drafts_hands_over_in_the_same_round():
    """To the best of those with a model; at this prior the lookup is believed in until it has drafted."""
    joined = multi_drafter([repeats_last(only_after=2), table(), table()], prior=4.0, drift=0.0)
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
    questions. With this drift no drafter is chosen twice in a row, so that one which drafts twice was handed the
    second round.
    """
    joined, lengths = multi_drafter([prompt_lookup(MOST), table()], prior=1e4, drift=1.0), [2, 3, 0, 1]
    prompts, temperatures = ((0, 1), (2, 3, 1), (4,), (3, 3)), [1.0, 0.0, 1.0, 0.9]
    options = {"prompts": prompts, "temperature": temperatures, "policy_hyperparameters": {"length": lengths}}
    state = decode(joined, (None, BAD), policy=counting(), **options)
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


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("verifier", [rejection, block])
def test_the_text_is_the_targets_in_distribution(verifier):
    """A choice that follows acceptance, one-hot drafts beside drawn ones, phases: the whole decoder by chi-square."""
    tables, small = toy_pair(3, 0), table_model(3)
    models = [model(small, 2, catch_up=4) for _ in range(2)]
    drafter = multi_drafter([repeats_last(2), *models], drift=0.3, decay=0.3)
    decoder = build_decoder(small, drafter, static(), verifier(), monitor=phases(), prefill_chunk=4)
    params = ModelParams(tables.target, (None, tables.drafter, toy_pair(3, 1).drafter))
    watch = {"enter": 0.9, "leave": 0.9, "minimum_length": 1, "decay": 0.3}
    options = {"policy_hyperparameters": {"draft_length": 2}, "monitor_hyperparameters": watch, "sequences": 24_576}
    report = lossless.test_by_sampling(decoder, params, **options)
    assert report.lossless, report


def test_estimates_are_the_written_down_sums():
    rng, cost = np.random.default_rng(0), np.array([0.0, 0.1, 0.4])
    tokens, time = np.full((2, 2, 3), 2.0), np.ones((2, 2, 3))
    sums = (jnp.asarray(x, jnp.float32) for x in (tokens, time))
    state = MultiDrafterState((), jnp.zeros((3, 2), jnp.int32), *sums, *[None] * 4)
    length = np.array([5, 9])
    for _ in range(30):
        who, phase, passes = rng.integers(0, 4, 2), rng.integers(0, 2, 2), rng.integers(0, 5, 2)
        emitted = rng.integers(0, 5, 2)
        as_array = lambda values: jnp.asarray(values, jnp.int32)  # noqa: E731
        seen = {"drafter": who, "phase": phase, "passes": passes, "length": length}
        state = state._replace(**{name: as_array(values) for name, values in seen.items()})
        length = length + emitted
        state = _learnt(state, as_array(length), jnp.asarray(cost, jnp.float32), 0.7, 0.1)
        for row in range(2):
            if who[row] == 3 or emitted[row] == 0:
                continue
            at, paid = (row, phase[row]), 1 + cost[who[row]] * passes[row]
            learn_by_hand(tokens[at], time[at], who[row], emitted[row], paid, 0.7, 0.1)
    np.testing.assert_allclose(state.tokens, tokens, rtol=1e-5)
    np.testing.assert_allclose(state.time, time, rtol=1e-5)


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
    joined = multi_drafter([prompt_lookup(LONGEST), *[model(llama, LONGEST, catch_up=4)] * 2], drift=0.5, prior=8.0)
    decoder = build_decoder(llama, joined, static(), rejection(), verification_widths=(4,), prefill_chunk=8)
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


def test_every_drafter_observes_the_prompt_and_the_drafting_one_what_was_accepted(played):
    for first, *later in played[2]:
        np.testing.assert_array_equal(first.drafter.informed, np.tile(first.length[:, None], 3))
        for index in (WORSE, TARGET):
            assert (first.drafter.states[index].valid >= first.length - 2).all()
        for state in (first, *later):
            rows, last = np.arange(3), state.statistics.num_rounds - 1
            drafted, who = state.record.drafted[rows, last] > 0, state.record.drafter_id[rows, last]
            np.testing.assert_array_equal(state.drafter.informed[rows, who][drafted], state.length[drafted])


@pytest.mark.parametrize("index", [WORSE, TARGET])
def test_a_cache_is_one_pass_over_the_text(played, index):
    """After the prompt and every round: drafts rejected and accepted whole, rounds sat out, and a text that goes on."""
    llama, params, conversations = played
    for states in conversations:
        for state in states:
            drafter, known = state.drafter.states[index], state.drafter.informed[:, index]
            assert (known - 2 <= drafter.valid).all() and (drafter.valid <= state.length - 1).all()
            tiny_llama.assert_filled(llama, params[index], drafter, states[-1].tokens)


def test_the_target_as_a_drafter_is_accepted_whole_whenever_it_comes_back(played):
    for *_, last in played[2]:
        for row in range(3):
            rounds = int(last.statistics.num_rounds[row])
            who = last.record.drafter_id[row, :rounds]
            drafted, accepted = last.record.drafted[row, :rounds], last.record.accepted[row, :rounds]
            np.testing.assert_array_equal(accepted[who == TARGET], drafted[who == TARGET])
            assert row == 2 or np.sum((who[1:] == TARGET) & (who[:-1] != TARGET)) >= 2, "it must have sat out"


def test_a_rule_that_drafts_nothing_feeds_nobody(played):
    """Whoever is chosen: rounds without drafts cost no drafter pass, and nothing that was fed is lost."""
    llama, params, _ = played
    joined = multi_drafter([model(llama, LONGEST, catch_up=4)] * 2, drift=0.5)
    decoder = build_decoder(llama, joined, static(), rejection(), verification_widths=(4,), prefill_chunk=8)
    weights = ModelParams(params[TARGET], params[1:])
    options = {"max_new_tokens": 9, "slots": 96, "policy_hyperparameters": {"draft_length": 0}, "stop_ids": ()}
    with jax.default_matmul_precision("highest"):
        states = play(decoder, weights, decoder.prefill(weights, PROMPTS, **options))
    for index in range(2):
        fed = [state.drafter.states[index].valid.tolist() for state in states]
        assert fed == fed[:1] * len(states) and min(fed[0]) > 0
