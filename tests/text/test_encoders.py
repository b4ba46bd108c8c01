"""From text to text through a model with an encoder: the prompt is what it reads, and the answer alone comes out."""

import pytest
from tiny_pair import write_pair as write_llamas
from tiny_t5 import write_pair

from specdec_jax.loading import load_model
from specdec_jax.stopping import static
from specdec_jax.text.beam_search import beam_search
from specdec_jax.text.continuous_batching import cache_bytes, complete, size_of
from specdec_jax.text.generation import build_pair, generate, prepare
from specdec_jax.text.pair import SMOLLM2_DRAFTER, measured_pair
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.streaming import stream

PROMPTS = ("the cat. a dog?", "sing: " + "abc, the. " * 20, "é日本", "a")
SAMPLING = SamplingParams(max_new_tokens=20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_pair(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def tiny(folders):
    target, drafter = folders
    options = {"policy": static(draft_length=3), "max_draft_length": 3, "verification_widths": (4,)}
    return build_pair(target, drafter, **options, dtype="float32")


@pytest.fixture(scope="module")
def plain(folders):
    return build_pair(folders[0], None, verification_widths=(4,), dtype="float32")


@pytest.fixture(scope="module")
def expected(plain):
    return generate(list(PROMPTS), SAMPLING, pair=plain)


def test_answers_are_those_of_plain_decoding(tiny, expected):
    """Together, alone and streamed; the prompt is the source and its end, the decoder's first token is in no answer."""
    together = generate(list(PROMPTS), SAMPLING, pair=tiny)
    assert [one.tokens for one in together] == [one.tokens for one in expected]
    assert sum(one.statistics["num_accepted_tokens"] for one in together) > 0
    alone = generate(PROMPTS[0], SAMPLING, pair=tiny)
    assert (alone.text, alone.tokens) == (expected[0].text, expected[0].tokens)
    assert alone.prompt_tokens == tiny.target.tokenizer.encode(PROMPTS[0], add_special=True)
    assert alone.prompt_tokens[-1] == 1 and len(alone.tokens) == 20
    assert len({tuple(one.tokens) for one in expected}) == len(PROMPTS)
    chunks = stream(PROMPTS[1], SAMPLING, pair=tiny)
    assert "".join(chunk.text for chunk in chunks) == expected[1].text
    assert chunks.result().tokens == expected[1].tokens


@pytest.mark.seldom
def test_rows_take_the_next_source_of_their_size(tiny, plain):
    prompts = [PROMPTS[number % 2] + "abcdefgh"[number] for number in range(5)]
    requests = [prepare(tiny, [text], SamplingParams(max_new_tokens=5 + 3 * i)) for i, text in enumerate(prompts)]
    sizes = {size_of(tiny, request) for request in requests}
    assert len(sizes) == 2 and {size.slots for size in sizes} == {128}
    found = {done.index: done for done in complete(tiny, requests, 2)}
    for index, text in enumerate(prompts):
        wanted = generate(text, SamplingParams(max_new_tokens=5 + 3 * index), pair=plain)
        assert found[index].result.tokens == wanted.tokens
        assert found[index].source_slots == size_of(tiny, requests[index]).source
    small, large = sorted(sizes)
    c = tiny.target.config
    of_a_row = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * 4 * (large.source - small.source)
    assert cache_bytes(tiny, 2, *large) - cache_bytes(tiny, 2, *small) == 2 * 2 * of_a_row


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"prompt": "a", "system": "b"}, "has an encoder and no chat"),
        ({"prompt": [{"role": "user", "content": "a"}]}, "has an encoder and no chat"),
        ({"prompt": "a" * 1100}, r"source 0 of 1\d\d\d tokens exceeds the target's most, 1024"),
    ],
)
def test_prompts_that_are_refused(tiny, arguments, named):
    with pytest.raises(ValueError, match=named):
        generate(arguments.pop("prompt"), SAMPLING, pair=tiny, **arguments)


def test_models_that_do_not_go_together(folders, tmp_path):
    target, drafter = folders
    other, _ = write_llamas(tmp_path)
    with pytest.raises(ValueError, match="have different vocabularies"):
        build_pair(target, other, dtype="float32")
    with pytest.raises(ValueError, match="have different vocabularies"):
        build_pair(other, drafter, dtype="float32")


def test_a_target_nobody_named_a_drafter_for(folders, expected, capsys):
    """Where a drafter is SmolLM2's alone, what the source says is looked up."""
    pair = measured_pair(folders[0], SMOLLM2_DRAFTER, max_draft_length=3, verification_widths=(4,), dtype="float32")
    (line,) = pair.notices
    assert line.startswith("prompt_lookup drafts for") and capsys.readouterr().err == f"specdec_jax: {line}\n"
    assert pair.decoder.parts.drafter.name == "prompt_lookup"
    assert [one.tokens for one in generate(list(PROMPTS), SAMPLING, pair=pair)] == [one.tokens for one in expected]


def test_beams_read_the_source_too(folders, expected):
    """A single beam is greedy decoding; more find what is at least as probable."""
    target = load_model(folders[0], dtype="float32")
    one = beam_search(PROMPTS[0], target=target, width=1, max_new_tokens=20)
    assert one[0].tokens == expected[0].tokens
    assert beam_search(PROMPTS[0], target=target, width=3, max_new_tokens=20)[0].score >= one[0].score


def test_bytes_in_and_out(tmp_path):
    """ByT5's: no tokenizer.json, whole characters in a stream, and every byte a token."""
    target, drafter = write_pair(tmp_path, of_bytes=True)
    pair = build_pair(target, drafter, max_draft_length=3, verification_widths=(4,), dtype="float32")
    sampling = SamplingParams(max_new_tokens=40, temperature=1.0, seed=3)
    chunks = stream("né日", sampling, pair=pair)
    text = "".join(chunk.text for chunk in chunks)
    found = chunks.result()
    assert found.prompt_tokens == [byte + 3 for byte in "né日".encode()] + [1]
    assert text == found.text == pair.target.tokenizer.decode(found.tokens) and len(found.tokens) > 20
