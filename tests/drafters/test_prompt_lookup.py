"""Lookup and n-gram drafters: what they propose is what loops and dictionaries find, and no output changes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from drafting import draft_once
from stopping_cases import context

from specdec_jax import lossless, make_warp, summarise
from specdec_jax.drafters._parts import right_or_wrong
from specdec_jax.drafters.ngram import CANDIDATES, WAYS, hashes, ngram, table_of
from specdec_jax.drafters.no_drafter import no_drafter
from specdec_jax.drafters.prompt_lookup import find, prompt_lookup
from specdec_jax.stopping import accepted_length_ema, adaedl, draft_and_verify, static
from specdec_jax.verification import block, greedy, rejection


def looked_up(text, longest, shortest, most):
    """(draft, tokens matched) of one text, by loops."""
    for size in range(min(longest, len(text) - 1), shortest - 1, -1):
        for end in range(len(text) - 1, size - 1, -1):  # the token after the match, the latest first
            if text[end - size : end] == text[-size:]:
                copy = list(text)
                for _ in range(most):
                    copy.append(copy[end + len(copy) - len(text)])
                return copy[len(text) :], size
    return [], 0


def context_of(lengths, budgets):
    return context(len(lengths), budget=jnp.array(budgets, jnp.int32))._replace(length=jnp.array(lengths, jnp.int32))


def rows_of(texts, slots):
    """(tokens [B, slots], lengths [B]); what lies beyond a text must not matter."""
    tokens = np.random.default_rng(1).integers(0, 4, (len(texts), slots)).astype(np.int32)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = text
    return jnp.array(tokens), jnp.array([len(text) for text in texts], jnp.int32)


def drafts_of(drafter, texts, state=(), slots=96, policy=None, **hyperparameters):
    """(Draft, LoopResult) of one round on those texts."""
    policy, (tokens, lengths) = policy or static(), rows_of(texts, slots)
    now = context_of(lengths, [drafter.max_draft_length] * len(texts))
    return draft_once(drafter, None, state, tokens, now, policy, policy.init(len(texts), **hyperparameters))[:2]


@pytest.mark.parametrize(("longest", "shortest", "vocab"), [(3, 1, 4), (5, 2, 3), (2, 2, 6), (1, 1, 12)])
def test_drafts_are_what_a_loop_finds(longest, shortest, vocab):
    """Random texts of all lengths, one to the whole of the slots; rows side by side."""
    rng, slots = np.random.default_rng(vocab), 24
    texts = [rng.integers(0, vocab, n).tolist() for n in [*range(1, slots + 1), *range(1, slots + 1)]]
    drafter = prompt_lookup(5, longest, shortest)
    draft, _ = drafts_of(drafter, texts, slots=slots, draft_length=5)
    tokens, lengths = rows_of(texts, slots)
    _, matched = find(tokens, lengths, longest, shortest)
    sizes = set()
    for row, text in enumerate(texts):
        expected, size = looked_up(text, longest, shortest, 5)
        assert draft.tokens[row, : int(draft.length[row])].tolist() == expected, text
        assert int(matched[row]) == size
        sizes.add(size)
    assert sizes == {0, *range(shortest, longest + 1)}
    assert draft.log_q is None and bool(np.all(draft.one_hot))
    assert drafter.source(None, (), tokens, context_of([1] * len(texts), [5] * len(texts))).cost == 0


def test_policies_see_a_longer_match_as_less_uncertain():
    """Matches of 1, 2 and 3 tokens; three tokens into a copy it is three tokens longer."""
    texts = [[5, 1, 6, 1], [5, 1, 2, 6, 1, 2], [5, 1, 2, 3, 6, 1, 2, 3]]
    _, info = drafts_of(prompt_lookup(3), texts, draft_length=3)
    long = np.arange(3)[:, None] + 1 + np.arange(3)[None, :]
    chance = (long + 0.5) / (long + 1)
    np.testing.assert_allclose(info.max_prob, chance, rtol=1e-6)
    entropy = -(chance * np.log(chance) + (1 - chance) * np.log(1 - chance))
    np.testing.assert_allclose(info.entropy, entropy, rtol=1e-5)
    drafts, _ = drafts_of(prompt_lookup(3), texts, policy=adaedl())
    assert drafts.length.tolist() == [0, 0, 3]  # AdaEDL at its defaults trusts three tokens


def test_the_distribution_for_policies_is_a_distribution():
    distribution = right_or_wrong(jnp.array([2, 0], jnp.int32), jnp.array([0.75, 1.0], jnp.float32), 5)
    assert distribution.log_prob is not None
    np.testing.assert_allclose(np.exp(distribution.log_prob), [[0.0625, 0.0625, 0.75, 0.0625, 0.0625], [1, 0, 0, 0, 0]])
    np.testing.assert_allclose(distribution.margin, [0.5, 1.0])
    chances = jnp.linspace(0.01, 1.0, 100)
    uncertainty = np.asarray(right_or_wrong(jnp.zeros((100,), jnp.int32), chances, None).entropy)
    # more certain means less entropy, below one half too
    assert np.all(np.diff(uncertainty) < 0) and uncertainty[-1] == 0
    assert right_or_wrong(jnp.array([2]), jnp.array([0.5]), None).log_prob is None


LOSSLESS = {  # rules that read the drafted token's probability, or adapt to the lengths accepted
    "lookup": (prompt_lookup(3, vocab_size=3), draft_and_verify(step=0.9, threshold_decay=0.2, threshold=0.3)),
    "ngram": (ngram(3, 3, slots=32), accepted_length_ema()),
}


@pytest.mark.often(1)
@pytest.mark.optimised
@pytest.mark.parametrize("name", LOSSLESS)
@pytest.mark.parametrize("verifier", [rejection(), block()], ids=["rejection", "block"])
def test_the_whole_decoder_is_lossless(name, verifier):
    drafter, policy = LOSSLESS[name]
    decoder, params = lossless.toy_decoder(policy, verifier, drafter=drafter)
    prompt = [0, 1, 2, 0, 1]
    report = lossless.test_by_sampling(decoder, params, prompt, sequences=16_384)
    assert report.lossless and report.cells > 40, report
    state = decoder.prefill(params, [prompt] * 64, max_new_tokens=8, warp=make_warp(64, 1.0))
    drafted = np.asarray(decoder.run(params, state).statistics.num_draft_tokens)
    assert drafted.sum() > 64  # a decoder that never drafts proves nothing


def test_a_source_is_looked_in_as_if_the_text_went_on_from_it():
    """Each row's own, and never what pads it: no token is below zero."""
    drafter, tokens = prompt_lookup(3), np.full((3, 12), 7, np.int32)
    for row, source in enumerate(([9, 5, 6, 7, 8, 1], [5, 6, 4, 3, 2, 30, 31, 1], [1])):
        tokens[row, : len(source)] = source
    state = drafter.init(None, 3, 8, (jnp.asarray(tokens), jnp.asarray([6, 8, 1], jnp.int32)))
    texts = jnp.asarray([[0, 5, 6, 0, 0, 0, 0, 0], [0, 44, 5, 6, 0, 0, 0, 0], [0, 7, 7, 0, 0, 0, 0, 0]], jnp.int32)
    now = context_of([3, 4, 3], [3, 3, 3])
    draft, *_ = draft_once(drafter, None, state, texts, now, static(), static().init(3))
    assert draft.tokens.tolist() == [[7, 8, 1], [4, 3, 2], [7, 7, 7]] and draft.length.tolist() == [3, 3, 3]
    alone = drafter.init(None, 3, 8)
    draft, *_ = draft_once(drafter, None, alone, texts, now, static(), static().init(3))
    assert draft.length.tolist() == [0, 0, 3]


class Counts:
    """What the table should hold, with lists: per context length, per bucket, contexts and candidates latest first."""

    def __init__(self, order, buckets):
        self.buckets = buckets
        self.orders = {m: [[] for _ in range(buckets)] for m in range(1, order)}
        self.dropped = 0

    def bucket(self, context):
        place, _ = hashes(jnp.array([context], jnp.int32), self.buckets)
        return self.orders[len(context)][int(place[0, -1])]

    def entry(self, context):
        return next((entry for entry in self.bucket(context) if entry[0] == tuple(context)), None)

    def make_room(self, bucket):
        if len(bucket) == WAYS:
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
        elif len(entry[1]) == CANDIDATES:
            least = min(count for _, count in entry[1])
            entry[1].pop(max(i for i, (_, count) in enumerate(entry[1]) if count == least))
        entry[1].insert(0, (token, found.get(token, 0) + 1))

    def count_text(self, text, begin=0):
        for place in range(begin, len(text)):
            for m in self.orders:
                if m <= place:
                    self.count(text[place - m : place], text[place])

    def next(self, text):
        """(token, its count, its context's total, context length) after a text, or None."""
        for m in reversed(self.orders):
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
            chances.append((count + m - 0.5) / (total + m))
        return made, chances


def same_drafts(drafter, state, texts, oracles):
    most = drafter.max_draft_length
    draft, info = drafts_of(drafter, texts, state, draft_length=most)
    for row, (text, oracle) in enumerate(zip(texts, oracles, strict=True)):
        made, chances = oracle.draft(text, most)
        length = int(draft.length[row])
        assert draft.tokens[row, :length].tolist() == made, text
        np.testing.assert_allclose(info.max_prob[row, :length], chances, rtol=1e-6)
    assert draft.log_q is None and bool(np.all(draft.one_hot))
    return draft


@pytest.mark.parametrize(("order", "slots", "vocab"), [(4, 512, 4), (2, 512, 7), (3, 4, 5)])
def test_counts_and_drafts_are_a_dictionarys(order, slots, vocab):
    """Random texts that grow by a few tokens at a time, rows side by side; the small table gives contexts up."""
    rng, drafter = np.random.default_rng(order + slots), ngram(4, order, slots)
    texts = [rng.integers(0, vocab, n).tolist() for n in (1, 9, 30)]
    oracles = [Counts(order, slots // WAYS) for _ in texts]
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
            assert int(np.sum(np.asarray(state.table.count[row]))) == total


def test_a_text_that_is_cut_back_keeps_its_counts():
    """Row 0 is cut to two tokens and goes on otherwise; row 1 only goes on."""
    drafter, before = ngram(3, 3, slots=64), [[1, 2, 3, 1, 2, 3], [4, 5, 4]]
    after = [[1, 2, 9, 1, 2, 9, 1], [4, 5, 4, 5]]
    (tokens, lengths), commit = rows_of(before, 96), jax.jit(drafter.commit)
    state = commit(None, drafter.init(None, 2, 96), tokens, lengths)
    state = commit(None, state, tokens, jnp.array([2, 3], jnp.int32))  # as Decoder.extend tells it
    state = commit(None, state, *rows_of(after, 96))
    oracles = [Counts(3, 16), Counts(3, 16)]
    oracles[0].count_text(before[0])
    oracles[0].count_text(after[0], 2)
    oracles[1].count_text(after[1])
    same_drafts(drafter, state, after, oracles)
    other = [[7, 2, 3], [4]]  # "2 3" was seen in the old text alone
    assert int(drafts_of(drafter, other, state, draft_length=1)[0].length[0]) == 1


def test_a_table_serves_another_prompt():
    drafter = ngram(3, 3, slots=64)
    tokens, lengths = rows_of([[9, 9], [1, 2, 3, 4]], 16)
    empty = drafter.init(None, 2, 16)
    assert len({leaf.unsafe_buffer_pointer() for leaf in jax.tree.leaves(empty)}) == 4  # it can be donated
    fresh = drafter.init(learnt := table_of(jax.jit(drafter.commit)(None, empty, tokens, lengths), 1), 2, 16)
    draft, _ = drafts_of(drafter, [[1], [5, 2]], fresh, draft_length=3)
    assert draft.tokens.tolist()[0] == [2, 3, 4] and draft.tokens[1, :2].tolist() == [3, 4]
    assert draft.length.tolist() == [3, 2]
    with pytest.raises(ValueError, match="must be those it was learnt with"):
        ngram(3, 4, slots=64).init(learnt, 1, 16)


def decoded(drafter, prompts, slots):
    decoder, params = lossless.toy_decoder(static(), greedy(), vocab_size=6, toy=3, drafter=drafter)
    return decoder, params, decoder.run(params, decoder.prefill(params, prompts, max_new_tokens=30, slots=slots))


def test_greedy_output_is_plain_decodings_and_only_it_is_counted():
    """To the last slot; afterwards every n-gram of the text is in the table exactly once."""
    prompts, slots = [[0, 1], [3, 2, 5, 4, 3, 2], [1]], 6 + 30 + 5
    decoder, params, state = decoded(ngram(4, 3, slots=256), prompts, slots)
    *_, plain = decoded(no_drafter(), prompts, slots)
    for row, prompt in enumerate(prompts):
        text = state.tokens[row, : len(prompt) + 30].tolist()
        assert text == plain.tokens[row, : len(prompt) + 30].tolist()
        assert int(np.sum(np.asarray(state.drafter.table.count[row]))) == 2 * len(text) - 3
    figures = summarise(jax.tree.map(np.asarray, state.statistics))
    assert figures["num_accepted_tokens"] > 20 and figures["num_emitted_tokens"] == 90
    assert figures["num_draft_tokens"] > 0 and figures["drafter_passes"] == 0
    table, texts = table_of(state.drafter), [state.tokens[row, :20].tolist() for row in range(3)]
    extended = decoder.extend(params, state, texts, max_new_tokens=8)
    assert np.all(np.asarray(extended.drafter.counted) == 20)
    assert table.key.shape == (2, 64, 4)  # what was taken out outlives the donated state
