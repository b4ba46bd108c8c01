"""Streaming: chunks are the text, in pieces that say what became of each token; nothing is shown and taken back."""

import pytest
from scripted import EOS, OPTIONS, PROMPT, scripted_pair, tokenizer, tokens_of, wrong_at

from specdec_jax.text.generation import find_stop, generate
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.streaming import Chunk, Piece, _HeldText, stream

TEXT = "héllo 🙂 wörld, 你好: 1234 hello hello"


def streamed(pair, rounds=1, **sampling):
    chunks = stream(PROMPT, SamplingParams(**{"max_new_tokens": 64, **sampling}), pair=pair, rounds=rounds, **OPTIONS)
    return list(chunks), chunks.result()


@pytest.fixture(scope="module")
def script():
    return tokens_of(TEXT)


@pytest.fixture(scope="module")
def pair(script):
    """Every emoji is four tokens, so rounds of up to four end inside characters; some drafts are wrong."""
    return scripted_pair(script, wrong_at(script, 4, 6, 7, 17, 20, 21))


@pytest.mark.parametrize("rounds", [1, 3, 100])
def test_chunks_together_are_the_text_and_the_tokens_of_generate(pair, script, rounds):
    chunks, result = streamed(pair, rounds=rounds)
    whole = generate(PROMPT, SamplingParams(max_new_tokens=64), pair=pair, record=True, **OPTIONS)
    assert "".join(chunk.text for chunk in chunks) == result.text == whole.text == TEXT
    assert [token for chunk in chunks for token in chunk.tokens] == result.tokens == whole.tokens == [*script, EOS]
    assert result.finish_reason == "stop"
    assert result.statistics == whole.statistics


def test_pieces_are_the_text_by_kind_and_no_chunk_ends_inside_a_character(pair):
    chunks, _ = streamed(pair)
    assert len(chunks) > 8 and any(chunk.tokens and not chunk.text for chunk in chunks)  # some inside a character
    for chunk in chunks:
        assert "\ufffd" not in chunk.text
        assert "".join(piece.text for piece in chunk.pieces if piece.kind != "rejected") == chunk.text
    struck_out = [piece.text for chunk in chunks for piece in chunk.pieces if piece.kind == "rejected"]
    assert len(struck_out) == sum(1 for chunk in chunks if chunk.rejected) > 2
    assert all(text.startswith("#") for text in struck_out)


def test_the_kinds_of_a_known_round():
    script = tokens_of("abcdefgh")
    chunks, _ = streamed(scripted_pair(script, wrong_at(script, 5)))
    assert chunks[0].kinds == ["accepted", "accepted", "accepted", "bonus"]
    assert chunks[1].kinds == ["accepted", "recovered"] and chunks[1].rejected == tokens_of("#g")
    assert [tuple(piece) for piece in chunks[1].pieces] == [("e", "accepted"), ("#g", "rejected"), ("f", "recovered")]
    chunks, _ = streamed(scripted_pair(tokens_of("ab"), tokens_of("ab###")))  # before the end of the sequence, too
    assert [tuple(piece) for chunk in chunks for piece in chunk.pieces][-1] == ("#", "rejected")
    a, b, c, d, x, y = tokens_of("abcdxy")
    held = _HeldText(tokenizer(), [])
    held.add(Chunk("", [], [a, b, c, d], ["accepted", "branch", "branch", "bonus"], [x, y], 0.0), set())
    shown = [("a", "accepted"), ("xy", "rejected"), ("b", "branch"), ("c", "branch"), ("d", "bonus")]
    assert held.release(everything=True) == [Piece(*each) for each in shown]


def test_an_ordinary_token_that_ends_the_text_is_no_part_of_it():
    chunks, result = streamed(scripted_pair(tokens_of("one two"), tokens_of("one two")), stop_ids=tokens_of(" "))
    assert "".join(chunk.text for chunk in chunks) == result.text == "one"  # an ordinary token, asked to be an end
    assert result.tokens == tokens_of("one ")


def test_half_a_character_at_the_limit_comes_out_as_decode_has_it():
    script = tokens_of("a" * 62 + "🙂")
    chunks, result = streamed(scripted_pair(script, script))
    assert result.finish_reason == "length"
    assert "".join(chunk.text for chunk in chunks) == result.text == tokenizer().decode(script[:64])
    assert chunks[-1].tokens == [] and chunks[-1].pieces[0].kind == "bonus"
    cut = tokens_of("ab🙂")[:3]
    chunks, _ = streamed(scripted_pair(cut, cut))
    assert chunks[-1].pieces == [Piece("\ufffd", "accepted")]


@pytest.mark.parametrize("rounds", [1, 2, 100])
@pytest.mark.parametrize("stop", [["STOP"], ["never", "OP h"], "STOP"])
def test_a_stop_string_across_rounds_ends_the_text_before_it(stop, rounds):
    script = tokens_of("one ST two STOP hello")
    pair = scripted_pair(script, wrong_at(script, 2, 13))
    chunks, result = streamed(pair, stop=stop, rounds=rounds)
    text = "one ST two ST" if "never" in stop else "one ST two "
    assert "".join(chunk.text for chunk in chunks) == result.text == text
    assert "".join(p.text for chunk in chunks for p in chunk.pieces if p.kind != "rejected") == text
    assert result.finish_reason == "stop_string"
    whole = generate(PROMPT, SamplingParams(max_new_tokens=64, stop=stop), pair=pair, record=True, **OPTIONS)
    assert (whole.text, whole.finish_reason) == (text, "stop_string")


def test_stop_strings_wait_no_longer_than_they_must_and_the_one_complete_first_cuts():
    script = tokens_of("abcdefghijkl")
    chunks, _ = streamed(scripted_pair(script, script), stop=["cdX", "a very long stop string"])
    assert [chunk.text for chunk in chunks][:2] == ["ab", "cdefgh"]
    words = ["bcdef", "cd"]
    assert find_stop("abcd", words) == find_stop("abcdef", words) == 2
    assert find_stop("abxcd", ["x", "abxcd"]) == 2
    assert find_stop("nothing", words) is None
    script = tokens_of("abcdefgh")
    pair = scripted_pair(script, script)
    results = {rounds: streamed(pair, stop=words, rounds=rounds)[1] for rounds in (1, 100)}
    assert {result.text for result in results.values()} == {"ab"}
    assert results[1].tokens == script[:4]  # the generation ended with the text


def test_leaving_the_loop_leaves_the_result_so_far(pair, script):
    chunks = stream(PROMPT, SamplingParams(max_new_tokens=64), pair=pair, **OPTIONS)
    first, second = next(chunks), next(chunks)
    result = chunks.result()
    assert result.finish_reason == "interrupted"
    assert result.tokens == first.tokens + second.tokens == script[: len(result.tokens)]
    assert result.statistics["num_rounds"] == 2


def test_bad_input_is_refused_at_the_call(pair):
    with pytest.raises(ValueError, match=r"rounds must lie in \[1, inf\), got 0"):
        stream(PROMPT, pair=pair, rounds=0)
    with pytest.raises(ValueError, match="temprature.*did you mean 'temperature'"):
        stream(PROMPT, pair=pair, temprature=1.0)
