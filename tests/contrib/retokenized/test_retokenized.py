"""Text of a drafter that is tokenised again: what the target makes of it, what is accepted, and what comes out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from spelling_models import TEXT, WORDS, byte_level, fixed_text_model, following, letters, sentence_piece, sizes_of
from tiny_llama import assert_filled, one_pass, random_llama, variant
from tokenizers import Tokenizer as Backend
from tokenizers import models

from specdec_jax import ModelParams, build_decoder, lossless
from specdec_jax.contrib.retokenized.byte_pairs import BYTES, MORE, is_bpe, retokenize, tables
from specdec_jax.contrib.retokenized.drafter import aligned, own_length, retokenized
from specdec_jax.contrib.trees.hooks import draws_siblings
from specdec_jax.drafters import model, multi_drafter
from specdec_jax.drafters.reading import drafter_of
from specdec_jax.loading import Tokenizer
from specdec_jax.loading.across import ids_by_key, keys_of, translate_vocabulary
from specdec_jax.models import llama
from specdec_jax.stopping import adaedl, at_least, static, survival
from specdec_jax.types import Hidden
from specdec_jax.verification import rejection

MOST = 4
PAIRS = {
    "words for words": lambda: (byte_level(400, WORDS), byte_level(330)),
    "pieces for words": lambda: (byte_level(380), sentence_piece(300)),
    "words for pieces": lambda: (sentence_piece(300), byte_level(400, WORDS)),
}
BOTH = "words for pieces"
NEW = 60  # tokens


def decoder_of(target, drafter, policy, most=MOST):
    """A decoder of two loaded models, the drafter's text tokenised again, and its parameters."""
    joined = translate_vocabulary(target, drafter, "text")
    decoder = build(target.model, drafter_of(joined.model, most), policy, most)
    return decoder, ModelParams(target.params, joined.params)


@functools.cache
def build(target, drafter, policy, most=MOST):
    return build_decoder(target, drafter, policy, rejection(), prefill_chunk=16)


def recited(name, remembered=TEXT):
    """The tokenizers of a pair that recites, its decoder and parameters; the drafter remembers the text so."""
    target, drafter = PAIRS[name]()
    models = fixed_text_model(target, TEXT), fixed_text_model(drafter, remembered)
    return target, drafter, *decoder_of(*models, static(draft_length=MOST))


def drafted(target, drafter, begun):
    """(drafts, accepted) after `begun` bytes of the text, by the two tokenizers; None: half a character is drafted."""
    theirs, ours = following(drafter, TEXT), following(target, TEXT)
    keys, sizes, said = keys_of(drafter), sizes_of(target), b""
    for _ in range(MOST):
        said += keys[int(theirs[begun + len(said)])]
    text = said.decode(errors="ignore")
    if text.encode() != said:
        return None
    drafts, accepted = target.encode(text)[:MOST], 0
    while accepted < len(drafts) and drafts[accepted] == ours[begun]:
        begun += sizes[drafts[accepted]]
        accepted += 1
    return len(drafts), accepted


@pytest.mark.often(1)
@pytest.mark.parametrize("name", PAIRS)
def test_a_target_that_says_what_is_drafted_accepts_it(name):
    """Round by round as many drafts, and as many accepted, as the tokenizers themselves would give."""
    target, drafter, decoder, params = recited(name)
    tokens, sizes = target.encode(TEXT), sizes_of(target)
    state = decoder.prefill(params, [tokens[:6]] * 2, max_new_tokens=[NEW, 8], stop_ids=(), record_rounds=64)
    state = decoder.run(params, state)
    assert state.tokens[0, : 6 + NEW].tolist() == tokens[: 6 + NEW]
    begun, seen = 6, []
    record = np.stack([state.record.drafted, state.record.accepted, state.record.emitted])[:, 0]
    for drafts, accepted, emitted in record.T:
        expected = drafted(target, drafter, int(sizes[tokens[:begun]].sum()))
        begun += emitted
        if expected is not None and begun < NEW:  # the last rounds may be cut short
            assert (drafts, accepted) == expected
            seen.append(expected)
    proposed, right = np.sum(seen, axis=0)
    assert len(seen) > 8 and right > 0.7 * proposed > len(seen)


def test_the_end_is_drafted_by_its_role():
    target, _, decoder, params = recited(BOTH)
    tokens = target.encode(TEXT)
    prompts = [tokens[:-3], tokens[:-2]]
    state = decoder.run(params, decoder.prefill(params, prompts, max_new_tokens=[NEW, 8], stop_ids=target.eos_ids))
    for row in range(2):
        assert state.tokens[row, : int(state.length[row])].tolist() == [*tokens, *target.eos_ids]
    assert int(state.statistics.num_accepted_tokens.sum()) >= 4 and int(state.statistics.num_rounds.max()) <= 2


def checked_own_text(own, target, drafter):
    """That a state's own text is that of its row, and that its cache is what was fed of it."""
    ours, theirs = keys_of(target), keys_of(drafter)
    for row, place in np.argwhere(own.ends >= 0):
        if place <= own.spelled[row]:
            read, spelled = own.tokens[row, : own.ends[row, place]], own.text[row, :place]
            assert b"".join(theirs[token] for token in read) == b"".join(ours[token] for token in spelled)
    held = np.arange(own.tokens.shape[1])[None, :] < own.valid[:, None]
    assert (own.cache.tokens == own.tokens)[held].all() and (own.valid <= own_length(own)).all()


def badly(text):
    """The text as one remembers it badly: a letter in nine is another."""
    letters = list(text)
    for at in range(7, len(letters), 9):
        if letters[at].isascii() and letters[at].isalpha():
            letters[at] = "z"
    return "".join(letters)


@pytest.mark.parametrize("name", PAIRS)
def test_after_rejections_it_goes_on_where_both_vocabularies_end(name):
    """Its own text is that of the row after every round, and its cache is what was fed of it."""
    target, drafter, decoder, params = recited(name, badly(TEXT))
    tokens, across = target.encode(TEXT), 0
    state = decoder.prefill(params, [tokens[:6], tokens[:21]], max_new_tokens=[NEW, 8], stop_ids=(), record_rounds=64)
    for _ in range(7):
        state = decoder.run(params, state, rounds=1)
        own = jax.tree.map(np.asarray, state.drafter)
        checked_own_text(own, target, drafter)
        assert (np.asarray(state.length) - own.spelled <= MOST + 1).all()
        across += sum(int((own.ends[row, : own.spelled[row]] < 0).sum()) for row in range(2))
    statistics = state.statistics
    assert 0 < int(statistics.num_accepted_tokens.sum()) < int(statistics.num_draft_tokens.sum())
    assert across, "its own tokens across several of the target's stay as it drafted them"
    for row in range(2):
        assert state.tokens[row, : int(state.length[row])].tolist() == tokens[: int(state.length[row])]


def test_a_text_that_is_cut_back_is_read_from_the_last_place_where_both_end():
    target, _, decoder, params = recited(BOTH)
    tokens = target.encode(TEXT)
    state = decoder.prefill(params, [tokens[:6]] * 2, max_new_tokens=[NEW, 8], stop_ids=(), record_rounds=64)
    state = decoder.run(params, state)
    ends = np.asarray(state.drafter.ends[0])
    inside = int(np.flatnonzero(ends[: int(state.drafter.spelled[0])] < 0)[0])  # in the middle of one of its own tokens
    cut = aligned(state.drafter, state.tokens, jnp.asarray([inside, 3], jnp.int32))
    back = int(cut.spelled[0])
    assert back < inside and (ends[back + 1 : inside + 1] < 0).all() and ends[back] >= 0
    assert int(own_length(cut)[0]) == ends[back] >= int(cut.valid[0])
    changed = state.tokens.at[0, 9].set(0)
    assert int(aligned(state.drafter, changed, state.length).spelled[0]) <= 9


POLICIES = [static(draft_length=MOST), at_least(2, adaedl()), survival()]


def improvised(name, policy):
    """A decoder of two random models, its parameters, and a state: a text in it outgrows the drafter's cache."""
    target, drafter = PAIRS[name]()
    both = random_llama(target, seed=1, rows=3), random_llama(drafter, seed=2, rows=5)
    decoder, params = decoder_of(*both, policy)
    long = int(np.argmax(sizes_of(target)))
    prompts = [target.encode("It's"), target.encode(" rain in Spain"), [7], [long] * 30]
    return decoder, params, prompts, decoder.prefill(params, prompts, max_new_tokens=16, slots=56, stop_ids=())


@pytest.mark.often(1)
@pytest.mark.parametrize(("name", "policy"), zip(PAIRS, POLICIES, strict=True), ids=str)
def test_greedy_batches_decode_what_plain_decoding_does(name, policy):
    """Random models say bytes that are no text, special tokens and padding."""
    decoder, params, prompts, state = improvised(name, policy)
    state = decoder.run(params, state)
    logits, _ = one_pass(decoder.parts.target, params.target, state.tokens, state.tokens.shape[1])
    for row, prompt in enumerate(prompts):
        begin, end = len(prompt), len(prompt) + 16
        assert state.tokens[row, begin:end].tolist() == logits[row, begin - 1 : end - 1].argmax(-1).tolist()
    assert int(state.statistics.num_draft_tokens.sum()) > 0


def test_what_it_reads_is_in_its_cache():
    name, policy = next(iter(PAIRS)), POLICIES[0]
    decoder, params, prompts, state = improvised(name, policy)
    loaded = random_llama(PAIRS[name]()[1], seed=2, rows=5)
    for _ in range(3):
        within = state.drafter._replace(valid=state.drafter.valid.at[-1].set(0))  # the last has outgrown its own
        assert_filled(loaded.model, loaded.params, within, state.drafter.tokens)
        assert (state.drafter.valid[:-1] > 0).all() or len(prompts[2]) == 1
        state = decoder.run(params, state, rounds=1)


def test_among_several_drafters_it_goes_on_where_it_was_left():
    """Beside one of the target's own vocabulary, in rounds that each of them sits out by turns."""
    target, drafter = PAIRS[BOTH]()
    said, remembered = fixed_text_model(target, TEXT), fixed_text_model(drafter, badly(TEXT))
    rival = fixed_text_model(target, badly(badly(TEXT[:100]) + TEXT[100:]))
    joined = translate_vocabulary(said, remembered, "text")
    several = multi_drafter([drafter_of(joined.model, MOST), model(rival.model, MOST)], decay=0.5)
    decoder = build(said.model, several, static(draft_length=MOST))
    params, tokens = ModelParams(said.params, (joined.params, rival.params)), target.encode(TEXT)
    prompts, options = [tokens[:6], tokens[:21]], {"stop_ids": (), "record_rounds": 64}
    state = decoder.prefill(params, prompts, max_new_tokens=[NEW, NEW], **options)
    for _ in range(64):
        state = decoder.run(params, state, rounds=1)
        checked_own_text(jax.tree.map(np.asarray, state.drafter.states[0]), target, drafter)
        if bool(state.done.all()):
            break
    for row, prompt in enumerate(prompts):
        assert state.tokens[row, : len(prompt) + NEW].tolist() == tokens[: len(prompt) + NEW]
        rounds = int(state.statistics.num_rounds[row])
        who, accepted = (np.asarray(leaf)[row, :rounds] for leaf in (state.record.drafter_id, state.record.accepted))
        turns = int((who[1:] != who[:-1]).sum())
        assert turns > 3 and accepted[who == 0].sum() > 0 < accepted[who == 1].sum()


@pytest.mark.optimised
def test_the_whole_decoder_draws_from_the_target():
    """Letters; drafts that were chosen are verified as such."""
    target = letters(["a", "b", "c", "ab", "abc", "ca"], [("a", "b"), ("ab", "c"), ("c", "a")])
    other = random_llama(letters(["b", "bc", "a", "c", "cab"], [("b", "c")]), seed=5)
    decoder, params = decoder_of(random_llama(target, seed=1), other, static(draft_length=2), 2)
    report = lossless.test_by_sampling(decoder, params, warp={"temperature": 1.5}, tokens=3, sequences=8192)
    assert report.lossless and report.drafted[1] > 500


def test_no_siblings_are_drawn_and_what_is_refused():
    """Its model's distributions are over the tokens that both have, and its drafts are not drawn from them."""
    whole = llama.language_model(variant(vocab_size=8), jnp.float32)
    assert draws_siblings(model(whole)) and not draws_siblings(retokenized(whole, 8))
    assert not draws_siblings(retokenized(whole, 8).replace(commit=retokenized(whole, 8).commit))
    assert retokenized(whole, 8) == retokenized(whole, 8)
    with pytest.raises(ValueError, match="does not offer its head apart"):
        retokenized(whole.replace(hidden=Hidden()), 8)


TOKENIZERS = {
    "GPT-2's words": lambda: byte_level(380),
    "Llama 3's words": lambda: byte_level(400, WORDS),
    "no words": lambda: sentence_piece(300),
}
DRAFTER = byte_level(330, text=TEXT[::-1])  # with little in common, and no special token but the end's role
LONGEST = 8


def tokenised_again(target, drafter, drafts, rows=None):
    """(tokens, own tokens that have ended with each) of every draft."""
    found = tables(target, drafter, rows or drafter.vocab_size)
    tokens = np.zeros((len(drafts), LONGEST), np.int32)
    for row, draft in enumerate(drafts):
        tokens[row, : len(draft)] = draft
    length = jnp.asarray([len(draft) for draft in drafts], jnp.int32)
    again = jax.jit(retokenize, static_argnums=3)(found, jnp.asarray(tokens), length, target.vocab_size)
    kept = [int(count) for count in again[1]]
    return [(again[0][row, :n].tolist(), again[2][row, :n].tolist()) for row, n in enumerate(kept)]


@pytest.mark.parametrize("name", TOKENIZERS)
def test_whatever_is_drafted_is_tokenised_as_the_target_does(name):
    """Every eight tokens of a text from a word on, of another text in other letters, and of runs of spaces."""
    target = TOKENIZERS[name]()
    words = TEXT.split(" ")
    texts = [" " + " ".join(words[at:]) for at in range(len(words))] + ["\n\n\n    x = 1\n", "   y  (z)\n", "    \n\nw"]
    drafts = [DRAFTER.encode(text)[:LONGEST] for text in texts]
    whole = [DRAFTER.decode(draft) for draft in drafts]
    complete = [row for row, text in enumerate(whole) if "\ufffd" not in text]
    found = tokenised_again(target, DRAFTER, [drafts[row] for row in complete])
    assert len(complete) > 50
    for row, (tokens, _) in zip(complete, found, strict=True):
        assert tokens == target.encode(whole[row])[:LONGEST], whole[row]


def test_it_says_where_both_vocabularies_end():
    target, drafter = DRAFTER, byte_level(380)  # whose tokens are longer
    draft = drafter.encode(" rain, they'd")[:LONGEST]
    ((tokens, ends),) = tokenised_again(target, drafter, [draft])
    ours, theirs = keys_of(target), keys_of(drafter)
    assert -1 in ends and max(ends) > 1
    for place, own in enumerate(ends):
        text = b"".join(ours[token] for token in tokens[: place + 1])
        prefixes = {b"".join(theirs[token] for token in draft[:n]): n for n in range(1, len(draft) + 1)}
        assert own == prefixes.get(text, -1)


@pytest.mark.parametrize("name", TOKENIZERS)
def test_it_ends_before_what_the_target_cannot_say(name):
    """A special token that the target lacks; half a character, unless the target has tokens for its bytes."""
    target, ids = TOKENIZERS[name](), ids_by_key(DRAFTER)
    mine, pad = (DRAFTER.backend.token_to_id(word) for word in ("<|mine|>", "<|pad|>"))
    rain, dash = DRAFTER.encode(" rain"), [ids[bytes([byte])] for byte in "—".encode()]
    drafts = [[*rain, mine, *rain], [pad], [*rain, *dash[:2]], [*rain, *dash], [*rain, DRAFTER.eos_ids[0], *rain]]
    drafts = [draft[:LONGEST] for draft in drafts]
    found = [tokens for tokens, _ in tokenised_again(target, DRAFTER, drafts)]
    plain = target.encode(" rain")
    if name == "no words":  # it has neither special token, and characters
        assert found[:3] == [plain, [], plain]
    else:
        assert found[0] == target.encode(DRAFTER.decode(drafts[0], skip_special=False))[:LONGEST]
        assert found[1] == target.encode("<|pad|>")
        assert b"".join(keys_of(target)[token] for token in found[2]) == b" rain" + "—".encode()[:2]
    assert found[3] == target.encode(" rain—")
    assert found[4][: len(plain) + 1] == [*plain, target.eos_ids[0]]


def test_a_text_beyond_the_room_is_cut():
    """Eight tokens of many spaces: what is proposed still begins the text."""
    drafter, target = sentence_piece(300), byte_level(380)
    run = drafter.backend.token_to_id("    ")
    drafter.backend.add_tokens([" " * 24])
    long = drafter.backend.token_to_id(" " * 24)
    for draft in ([run] * LONGEST, [long] * LONGEST):
        ((tokens, _),) = tokenised_again(target, drafter, [draft])
        text = target.decode(tokens)
        assert text and set(text) == {" "} and len(text) <= BYTES * LONGEST + MORE


def test_padding_is_never_proposed_and_other_tokenizers_are_refused():
    target = byte_level(380)
    more = DRAFTER.vocab_size + 5  # rows that pad the drafter's embedding
    draft = [*DRAFTER.encode(" rain"), more - 1]
    ((tokens, _),) = tokenised_again(target, DRAFTER, [draft], rows=more)
    assert tokens == target.encode(" rain")
    unigram = Tokenizer(Backend(models.Unigram([("a", 0.0)])), {})
    assert not is_bpe(unigram) and is_bpe(DRAFTER)
    with pytest.raises(ValueError, match="byte-pair encoding, and the target's tokenizer is Unigram"):
        tables(unigram, DRAFTER, DRAFTER.vocab_size)
