"""Text in, text out: the same tokens as plain decoding, alone or in a batch, and what a request may ask for."""

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from refusals import refusals
from scripted import EOS, OPTIONS, PROMPT, scripted_pair, tokens_of, wrong_at
from tiny_t5 import write_pair as write_t5

from specdec_jax.contrib.beam_search import beam_search
from specdec_jax.loading import load_model
from specdec_jax.stopping import adaedl, static
from specdec_jax.text import generation
from specdec_jax.text.continuous_batching import cache_bytes, complete, size_of
from specdec_jax.text.generation import build_pair, decode, encode, generate, prepare
from specdec_jax.text.pair import SMOLLM2_DRAFTER, measured_pair
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.text.streaming import stream

PROMPTS = ["Why is the sky blue?", "Write a Python function that reverses a list."]
REAL = {"sampling": SamplingParams(max_new_tokens=24), "slots": 96, "record": True}


@pytest.fixture(scope="module")
def script():
    return tokens_of("one two three four")


@pytest.fixture(scope="module")
def scripted(script):
    return scripted_pair(script, wrong_at(script, 2, 9))


@pytest.fixture(scope="module")
def real(smollm2, smollm2_drafter):
    return build_pair(smollm2, smollm2_drafter, policy=static(draft_length=3), max_draft_length=3)


def test_real_output_is_english_and_streams_as_it_is_generated(real):
    assert " sky " in generate(PROMPTS[0], pair=real, **REAL).text
    options = {name: value for name, value in REAL.items() if name != "record"}
    chunks = stream(PROMPTS[1], pair=real, **options)
    whole = generate(PROMPTS[1], pair=real, **REAL)
    assert "def " in whole.text
    assert "".join(chunk.text for chunk in chunks) == chunks.result().text == whole.text
    assert chunks.result().statistics == whole.statistics
    assert whole.compile_seconds == 0  # a prompt of another length in the same slots compiled nothing


def test_a_batch_gives_each_prompt_what_it_gets_alone(tiny):
    prompts = ["hello", "a much longer prompt than that", "42"]
    options = {"pair": tiny, "chat": False, "slots": 96}
    for temperature in (0.0, 1.0):
        sampling = SamplingParams(max_new_tokens=12, temperature=temperature, seed=5)
        batch = generate(prompts, sampling, **options)
        alone = [generate(prompt, replace(sampling, seed=5 + row), **options) for row, prompt in enumerate(prompts)]
        assert [result.tokens for result in batch] == [result.tokens for result in alone]
        assert [result.text for result in batch] == [result.text for result in alone]
        assert [result.statistics for result in batch] == [result.statistics for result in alone]
        assert len({tuple(result.tokens) for result in batch}) == 3


def test_seconds_are_those_of_the_run_alone(scripted, monkeypatch):
    now = [0.0]
    monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def slow(real, takes):
        def called(*given, **named):
            now[0] += takes
            return real(*given, **named)

        return called

    for name, takes in {"start": 100.0, "finish": 1000.0}.items():
        monkeypatch.setattr(generation, name, slow(getattr(generation, name), takes))
    pair = scripted._replace(decoder=scripted.decoder._replace(run=slow(scripted.decoder.run, 5.0)))
    request = prepare(pair, [PROMPT], SamplingParams(max_new_tokens=8), **OPTIONS)
    assert decode(pair, request).results[0].seconds == 5.0


def test_prompts_go_through_the_template_with_a_system_prompt_or_as_they_are(scripted):
    target = scripted.target
    plain = encode(target, "hello", chat=False)
    assert plain == tokens_of("hello")
    assert encode(target, "hello") == tokens_of("user: hello</s>")
    assert encode(target, "hello", system="be brief") == tokens_of("system: be brief</s>user: hello</s>")
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]
    assert encode(target, messages) == tokens_of("user: hi</s>assistant: ho</s>")
    for prompt, system in (("hi</s>", None), ([*messages, {"role": "user", "content": "</s>"}], None), ("x", "</s>")):
        counts = [encode(target, prompt, system=system, parse_special=each).count(EOS) for each in (True, False)]
        assert counts[0] == counts[1] + 1, prompt
    assert encode(target, "hi</s>", chat=False) == tokens_of("hi</s>")  # the whole input of the model
    with pytest.raises(ValueError, match=r"first 1,472 of 5,000,010 characters .* exceed the target's context, 184"):
        encode(target, "abcde" * 1_000_000)
    options = {"pair": scripted, "record": True, **OPTIONS, "chat": True}
    result = generate(messages, SamplingParams(max_new_tokens=64), **options)
    assert result.prompt_tokens == encode(target, messages)  # messages are one prompt, not a batch


def requested(arguments, scripted):
    options = {"pair": scripted, **OPTIONS, **arguments}
    prompt, new = options.pop("prompt", "x"), options.pop("new", 8)
    generate(prompt, SamplingParams(max_new_tokens=new), **options)


test_bad_requests_are_refused_by_name = refusals(
    ({"prompt": ["fine", ""]}, "the prompt is empty"),
    ({"new": 1000}, "prompt 0 of 1 tokens and 1000 new ones exceed the target's context, 184"),
    ({"prompt": "x" * 170, "slots": 96}, "96 cache slots cannot hold"),
    ({"max_token": 3}, "generate has no option 'max_token'; did you mean"),
    ({"drafter": "ngram"}, "no option 'drafter' .the pair given already has one"),
    ({"temperature": 0.5}, r"no option 'temperature': it belongs in SamplingParams\(temperature=...\)"),
    ({"system": "be brief"}, "a system prompt and messages need the chat template"),
    by=requested,
)


def test_a_pair_decodes_under_other_strategies(scripted, script):
    """Other numbers compile nothing; other static options build another decoder over the same models."""
    generate(PROMPT, SamplingParams(max_new_tokens=64), pair=scripted, **OPTIONS)
    before = scripted.decoder.num_programs("run")
    one = generate(PROMPT, SamplingParams(max_new_tokens=64), pair=scripted, policy=static(draft_length=1), **OPTIONS)
    assert one.tokens == [*script, EOS] and one.statistics["mean_draft_length"] == 1
    numbers = {"temperature": 0.7, "top_k": 3, "top_p": 0.9, "min_p": 0.1}
    again = generate("another prompt", SamplingParams(max_new_tokens=20, **numbers), pair=scripted, **OPTIONS)
    assert again.compile_seconds == 0 and scripted.decoder.num_programs("run") == before
    kept = scripted.using(policy=adaedl(keep_checked_token=True))
    assert kept.decoder is not scripted.decoder
    assert kept.using(policy=static(draft_length=2)).decoder is scripted.decoder
    with pytest.raises(ValueError, match="a policy must be a StoppingPolicy, .* got 'static'"):
        scripted.using(policy="static")


WRONG = static().replace(threshold=lambda state: np.zeros(1, np.float32))  # right for one row
SHAPE = r"test_generation.py:\d+: the policy's threshold .* must return float32\[2\], not float32\[1\]"


test_what_does_not_fit_a_pair_is_refused = refusals(
    (
        lambda scripted: scripted.decoder.prefill(scripted.params, [[1]], policy=adaedl(), max_new_tokens=1),
        "built for static, not for adaedl",
    ),
    (
        lambda tiny: build_pair(tiny.target, tiny.target, max_draft_length=10**11),
        "100000000000 does not fit the target",
    ),
    (lambda tiny: build_pair(tiny.target, tiny.target, policy=WRONG), SHAPE),
    (lambda folders, tiny_folders: build_pair(folders[0], tiny_folders[0]), "have different vocabularies"),
    (lambda folders, tiny_folders: build_pair(tiny_folders[0], folders[1]), "have different vocabularies"),
)


SOURCES = ("the cat. a dog?", "sing: " + "abc, the. " * 20, "é日本", "a")
SAMPLING = SamplingParams(max_new_tokens=20)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return write_t5(tmp_path_factory.mktemp("t5"))


@pytest.fixture(scope="module")
def tiny_t5(folders):
    return build_pair(*folders, policy=static(draft_length=3), max_draft_length=3, dtype="float32")


@pytest.fixture(scope="module")
def plain(folders):
    return build_pair(folders[0], None, dtype="float32")


@pytest.fixture(scope="module")
def expected(plain):
    return generate(list(SOURCES), SAMPLING, pair=plain)


def test_answers_are_those_of_plain_decoding(tiny_t5, expected):
    """Together and streamed alone; the prompt is the source and its end, the decoder's first token is in no answer."""
    together = generate(list(SOURCES), SAMPLING, pair=tiny_t5)
    assert [one.tokens for one in together] == [one.tokens for one in expected]
    assert sum(one.statistics["num_accepted_tokens"] for one in together) > 0
    assert len({tuple(one.tokens) for one in expected}) == len(SOURCES)
    chunks = stream(SOURCES[0], SAMPLING, pair=tiny_t5)
    assert "".join(chunk.text for chunk in chunks) == expected[0].text
    alone = chunks.result()
    assert alone.tokens == expected[0].tokens and len(alone.tokens) == 20
    assert alone.prompt_tokens == tiny_t5.target.tokenizer.encode(SOURCES[0], add_special=True)
    assert alone.prompt_tokens[-1] == 1


@pytest.mark.seldom
def test_rows_take_the_next_source_of_their_size(tiny_t5, plain):
    prompts = [SOURCES[number % 2] + "abcdefgh"[number] for number in range(5)]
    requests = [prepare(tiny_t5, [text], SamplingParams(max_new_tokens=5 + 3 * i)) for i, text in enumerate(prompts)]
    sizes = {size_of(tiny_t5, request) for request in requests}
    assert len(sizes) == 2 and {size.slots for size in sizes} == {128}
    found = {done.index: done for done in complete(tiny_t5, requests, 2)}
    for index, text in enumerate(prompts):
        wanted = generate(text, SamplingParams(max_new_tokens=5 + 3 * index), pair=plain)
        assert found[index].result.tokens == wanted.tokens
        assert found[index].source_slots == size_of(tiny_t5, requests[index]).source
    small, large = sorted(sizes)
    c = tiny_t5.target.config
    of_a_row = 2 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * 4 * (large.source - small.source)
    assert cache_bytes(tiny_t5, 2, *large) - cache_bytes(tiny_t5, 2, *small) == 2 * 2 * of_a_row


test_prompts_that_are_refused = refusals(
    (lambda tiny_t5: generate("a", SAMPLING, pair=tiny_t5, system="b"), "has an encoder and no chat"),
    (
        lambda tiny_t5: generate([{"role": "user", "content": "a"}], SAMPLING, pair=tiny_t5),
        "has an encoder and no chat",
    ),
    (lambda tiny_t5: generate("a" * 1100, SAMPLING, pair=tiny_t5), r"source 0 of 1\d\d\d tokens exceeds the target's"),
)


def test_a_target_nobody_named_a_drafter_for(folders, expected, capsys):
    """Where a drafter is SmolLM2's alone, what the source says is looked up."""
    pair = measured_pair(folders[0], SMOLLM2_DRAFTER, max_draft_length=3, verification_widths=(4,), dtype="float32")
    (line,) = pair.notices
    assert line.startswith("prompt_lookup drafts for") and capsys.readouterr().err == f"specdec_jax: {line}\n"
    assert pair.decoder.parts.drafter.name == "prompt_lookup"
    assert [one.tokens for one in generate(list(SOURCES), SAMPLING, pair=pair)] == [one.tokens for one in expected]


def test_beams_read_the_source_too(folders, expected):
    target = load_model(folders[0], dtype="float32")
    one = beam_search(SOURCES[0], target=target, width=1, max_new_tokens=20)
    assert one[0].tokens == expected[0].tokens
