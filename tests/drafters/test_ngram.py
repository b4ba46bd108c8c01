"""The n-gram drafter counts what was emitted, once; it proposes what a dictionary proposes, and changes no output."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafting import draft_once
from test_prompt_lookup import context_of

import specdec_jax.drafters.ngram as _table
from specdec_jax import lossless
from specdec_jax.decoding import build_decoder
from specdec_jax.decoding.rounds import ModelParams
from specdec_jax.decoding.sampling import make_warp
from specdec_jax.decoding.statistics import summarise
from specdec_jax.drafters.ngram import ngram, table_of
from specdec_jax.drafters.no_drafter import no_drafter
from specdec_jax.lossless.toys import table_model, toy_pair
from specdec_jax.stopping import accepted_length_ema, static
from specdec_jax.types import Draft, Seen
from specdec_jax.verification import block, greedy, rejection

pytestmark = pytest.mark.slow


class Counts:
    """What the table should hold, with lists: per context length, per bucket, contexts and candidates latest first."""

    def __init__(self, lengths, buckets):
        self.lengths, self.buckets = lengths, buckets
        self.orders = {m: [[] for _ in range(buckets)] for m in lengths}
        self.dropped = 0

    def bucket(self, context):
        lengths = (len(context),)
        place, _ = _table.hashes(jnp.array([context], jnp.int32), lengths, self.buckets)
        return self.orders[len(context)][int(place[0, 0])]

    def entry(self, context):
        return next((entry for entry in self.bucket(context) if entry[0] == tuple(context)), None)

    def make_room(self, bucket):
        if len(bucket) == _table.WAYS:
            self.dropped += 1
            totals = [sum(count for _, count in entry[1]) for entry in bucket]
            bucket.pop(max(i for i, total in enumerate(totals) if total == min(totals)))

    def count(self, context, token):
        bucket, entry = self.bucket(context), self.entry(context)
        if entry is None:
            self.make_room(bucket)
            entry = (tuple(context), [])
        else:
            bucket.remove(entry)
        bucket.insert(0, entry)
        found = dict(entry[1])
        if token in found:
            entry[1].remove((token, found[token]))
        elif len(entry[1]) == _table.CANDIDATES:
            least = min(count for _, count in entry[1])
            entry[1].pop(max(i for i, (_, count) in enumerate(entry[1]) if count == least))
        entry[1].insert(0, (token, found.get(token, 0) + 1))

    def count_text(self, text, begin=0):
        for place in range(begin, len(text)):
            for m in self.lengths:
                if m <= place:
                    self.count(text[place - m : place], text[place])

    def next(self, text):
        """(token, its count, its context's total, context length) after a text, or None."""
        for m in reversed(self.lengths):
            entry = self.entry(text[-m:]) if m <= len(text) else None
            if entry is not None:
                most = max(count for _, count in entry[1])
                token = next(token for token, count in entry[1] if count == most)
                return token, most, sum(count for _, count in entry[1]), m
        return None

    def draft(self, text, most):
        made, chances = [], []
        while len(made) < most and (found := self.next([*text, *made])):
            token, count, total, m = found
            made.append(token)
            chances.append((max(count, 1) + m - 0.5) / (max(total, 1) + m))
        return made, chances


def rows_of(texts, slots):
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, 4, (len(texts), slots)).astype(np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return jnp.array(tokens), jnp.array([len(text) for text in texts], jnp.int32)


def drafts_of(drafter, state, texts, slots=96, **hyperparameters):
    policy, (tokens, lengths) = static(), rows_of(texts, slots)
    now = context_of(lengths, [drafter.max_draft_length] * len(texts))
    return draft_once(drafter, None, state, tokens, now, policy, policy.init(len(texts), **hyperparameters))[:2]


def same_drafts(drafter, state, texts, oracles):
    most = drafter.max_draft_length
    draft, info = drafts_of(drafter, state, texts, draft_length=most)
    for row, (text, oracle) in enumerate(zip(texts, oracles, strict=True)):
        made, chances = oracle.draft(text, most)
        length = int(draft.length[row])
        assert draft.tokens[row, :length].tolist() == made, text
        np.testing.assert_allclose(info.max_prob[row, :length], chances, rtol=1e-6)
    assert draft.log_q is None and bool(np.all(draft.one_hot))
    return draft


@pytest.mark.parametrize(
    ("order", "back_off", "slots", "vocab"), [(4, True, 512, 4), (3, False, 512, 7), (3, True, 4, 5)]
)
def test_counts_and_drafts_are_a_dictionarys(order, back_off, slots, vocab):
    """Random texts that grow by a few tokens at a time, rows side by side; the small table gives contexts up."""
    rng, drafter = np.random.default_rng(order + slots), ngram(4, order, back_off, slots)
    lengths = tuple(range(1, order)) if back_off else (order - 1,)
    texts = [rng.integers(0, vocab, n).tolist() for n in (1, 9, 30)]
    oracles = [Counts(lengths, slots // _table.WAYS) for _ in texts]
    state, drafted, commit = drafter.init(None, 3, 96), 0, jax.jit(drafter.commit)
    for _ in range(3):
        state = commit(None, state, *rows_of(texts, 96))
        for oracle, text in zip(oracles, texts, strict=True):
            oracle.count_text(text, getattr(oracle, "known", 0))
            oracle.known = len(text)
        drafted += int(np.sum(same_drafts(drafter, state, texts, oracles).length))
        texts = [text + rng.integers(0, vocab, rng.integers(0, 12)).tolist() for text in texts]
    assert drafted > 5
    assert (sum(oracle.dropped for oracle in oracles) > 0) == (slots == 4)
    if slots == 512:  # nothing was given up but candidates: every count stands in the table
        for row, oracle in enumerate(oracles):
            total = sum(c for buckets in oracle.orders.values() for b in buckets for e in b for _, c in e[1])
            assert int(np.sum(np.maximum(np.asarray(state.table.count[row]), 0))) == total


@pytest.mark.parametrize("keep", [True, False])
def test_a_text_that_is_cut_back_keeps_or_forgets(keep):
    """Row 0 is cut to two tokens and goes on otherwise; row 1 only goes on, and keeps its counts either way."""
    drafter, before = ngram(3, 3, slots=64, keep=keep), [[1, 2, 3, 1, 2, 3], [4, 5, 4]]
    after = [[1, 2, 9, 1, 2, 9, 1], [4, 5, 4, 5]]
    state = drafter.commit(None, drafter.init(None, 2, 96), *rows_of(before, 96))
    tokens, _ = rows_of(before, 96)
    state = drafter.commit(None, state, tokens, jnp.array([2, 3], jnp.int32))  # as Decoder.extend tells it
    state = drafter.commit(None, state, *rows_of(after, 96))
    oracles = [Counts((1, 2), 16), Counts((1, 2), 16)]
    if keep:
        oracles[0].count_text(before[0])
        oracles[0].count_text(after[0], 2)
    else:
        oracles[0].count_text(after[0])
    oracles[1].count_text(after[1])
    same_drafts(drafter, state, after, oracles)
    other = [[7, 2, 3], [4]]  # "2 3" was seen in the old text alone
    known = int(drafts_of(drafter, state, other, draft_length=1)[0].length[0])
    assert known == (1 if keep else 0)


def test_a_table_serves_another_prompt():
    drafter = ngram(3, 3, slots=64)
    tokens, lengths = rows_of([[9, 9], [1, 2, 3, 4]], 16)
    learnt = table_of(drafter.commit(None, drafter.init(None, 2, 16), tokens, lengths), 1)
    fresh = drafter.init(learnt, 2, 16)
    draft, _ = drafts_of(drafter, fresh, [[1], [5, 2]], draft_length=3)
    assert draft.tokens.tolist()[0] == [2, 3, 4] and draft.tokens[1, :2].tolist() == [3, 4]
    assert draft.length.tolist() == [3, 2]
    with pytest.raises(ValueError, match="must be those it was learnt with"):
        ngram(3, 4, slots=64).init(learnt, 1, 16)


def test_unseen_contexts_are_filled_and_counts_stand_above():
    """The draft 5, 6 after the text 1, 2: the target liked 7 then 8 after it, and 3 after 1, 2, 5."""
    drafter = ngram(4, 3, slots=64, fill=2)
    text, seen = [[1, 2]], jnp.array([[[5, 4], [3, -1], [7, 8], [0, 1], [0, 1]]], jnp.int32)
    tokens, lengths = rows_of(text, 96)
    state = drafter.commit(None, drafter.init(None, 1, 96), tokens, lengths)
    draft = Draft(jnp.array([[5, 6, 0, 0]], jnp.int32), None, jnp.ones((1, 4), bool), jnp.array([2], jnp.int32))
    one, none = jnp.array([1], jnp.int32), jnp.array([0], jnp.int32)
    state = drafter.commit(None, state, tokens, lengths, Seen(seen, one, one, draft))
    first = lambda after: drafts_of(drafter, state, [after], draft_length=1)[0]  # noqa: E731
    assert first([9, 5, 6]).tokens[0, 0] == 7 and first([2, 5]).tokens[0, 0] == 3
    assert first([2]).tokens[0, 0] == 5  # the text's end itself
    assert first([1]).tokens[0, 0] == 2  # counted: the fill does not touch it
    assert int(first([0]).length[0]) == 0  # positions beyond the draft are not read
    counted = drafter.commit(None, state, *rows_of([[1, 2, 5, 6, 8]], 96))
    assert drafts_of(drafter, counted, [[5, 6]], draft_length=1)[0].tokens[0, 0] == 8
    assert int(np.sum(np.maximum(np.asarray(state.table.count), 0))) == 1  # only "1 then 2" was ever written
    same = drafter.commit(None, state, tokens, lengths, Seen(seen + 1, one, none, draft))  # the row was done
    jax.tree.map(np.testing.assert_array_equal, state, same)


def test_a_fill_never_gives_up_what_was_counted():
    drafter, text = ngram(2, 2, slots=4, fill=1), [[1, 2, 3, 4, 5]]  # one bucket, full of the contexts 1 to 4
    tokens, lengths = rows_of(text, 96)
    state = drafter.commit(None, drafter.init(None, 1, 96), tokens, lengths)
    draft = Draft(jnp.array([[6, 7]], jnp.int32), None, jnp.ones((1, 2), bool), jnp.array([2], jnp.int32))
    seen = Seen(jnp.full((1, 3, 1), 8, jnp.int32), lengths - 1, jnp.ones_like(lengths), draft)
    after = drafter.commit(None, state, tokens, lengths, seen)
    jax.tree.map(np.testing.assert_array_equal, state, after)


def decoded(drafter, prompts, verifier=None, slots=64, params=None):
    decoder = build_decoder(table_model(6), drafter, static(), verifier or rejection(), prefill_chunk=4)
    params = ModelParams(toy_pair(6, 3).target, params)
    return decoder, decoder.run(params, decoder.prefill(params, prompts, max_new_tokens=30, slots=slots))


def test_greedy_output_is_plain_decodings_and_only_it_is_counted():
    """To the last slot, with fills; afterwards every n-gram of the text is in the table exactly once."""
    prompts, slots = [[0, 1], [3, 2, 5, 4, 3, 2], [1]], 6 + 30 + 5
    decoder, state = decoded(ngram(4, 3, slots=256, fill=2), prompts, greedy(), slots)
    plain = decoded(no_drafter(), prompts, slots=slots)[1]
    for row, prompt in enumerate(prompts):
        text = state.tokens[row, : len(prompt) + 30].tolist()
        assert text == plain.tokens[row, : len(prompt) + 30].tolist()
        assert int(np.sum(np.maximum(np.asarray(state.drafter.table.count[row]), 0))) == 2 * len(text) - 3
    figures = summarise(jax.tree.map(np.asarray, state.statistics))
    assert figures["num_accepted_tokens"] > 20 and figures["num_emitted_tokens"] == 90
    assert figures["num_draft_tokens"] > 0 and figures["drafter_passes"] == 0
    table, texts = table_of(state.drafter), [state.tokens[row, :20].tolist() for row in range(3)]
    params = ModelParams(toy_pair(6, 3).target)
    extended = decoder.extend(params, state, texts, max_new_tokens=8)
    assert np.all(np.asarray(extended.drafter.counted) == 20)
    assert table.key.shape == (2, 64, 4)  # what was taken out outlives the donated state


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("verifier", [rejection(), block()], ids=["rejection", "block"])
def test_the_whole_decoder_is_lossless(verifier):
    """Chi-square of what is drawn, fills on, with a rule that adapts to the lengths accepted."""
    policy = accepted_length_ema()
    decoder = build_decoder(table_model(3), ngram(3, 3, slots=32, fill=2), policy, verifier, prefill_chunk=4)
    params, prompt = ModelParams(toy_pair(3, 0).target), [0, 1, 2, 0, 1]
    report = lossless.test_by_sampling(decoder, params, prompt, sequences=16_384)
    assert report.lossless and report.cells > 40, report
    state = decoder.prefill(params, [prompt] * 64, max_new_tokens=8, warp=make_warp(64, 1.0))
    assert np.asarray(decoder.run(params, state).statistics.num_draft_tokens).sum() > 64
