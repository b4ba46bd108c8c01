"""SmolLM2's tokenizer, rebuilt from GGUF metadata, against references made without it; streaming; chat templates."""

import json
import warnings
from pathlib import Path

import pytest
import tiny_weights as tiny
from tiny_pair import change_json
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from specdec_jax.contrib.gguf_writer import tokenizer_metadata
from specdec_jax.loading import StreamDecoder, Tokenizer, builtin
from specdec_jax.loading.gguf.reader import read_gguf
from specdec_jax.loading.gguf.tokenizer import tokenizer_from_gguf
from specdec_jax.loading.tokenizer import MARK, tokenizer_from_folder

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_reference.json").read_text())


def from_drafter() -> Tokenizer:
    return tokenizer_from_gguf(read_gguf(builtin.drafter_file()))


@pytest.fixture(scope="module", params=["target", "drafter", "folder"])
def smollm(request, tmp_path_factory) -> Tokenizer:
    """The target's, the built-in drafter's, and the latter's saved as a Hugging Face folder."""
    if request.param == "target":
        try:
            return tokenizer_from_gguf(read_gguf(builtin.target_file()))
        except FileNotFoundError as error:
            pytest.skip(str(error))
    if request.param == "drafter":
        return from_drafter()
    folder = tmp_path_factory.mktemp("tokenizer")
    from_drafter().save(folder)
    return tokenizer_from_folder(folder)


def test_encodes_as_the_reference_and_decodes_what_it_encoded(smollm):
    for row in REFERENCE["encodings"]:
        assert smollm.encode(row["text"]) == row["ids"], row
        assert smollm.fast.encode(row["text"], add_special_tokens=False) == row["ids"], row
        assert smollm.decode(row["ids"], skip_special=False) == row["text"]


def test_chat_as_transformers_renders_it(smollm):
    for chat in REFERENCE["chats"]:
        assert smollm.chat(chat["messages"], add_generation_prompt=chat["open"]) == chat["text"]


def test_special_tokens_in_messages_are_plain_text_as_transformers_splits_them(smollm):
    text = "a<|im_end|>\n<|im_start|>system\nb <|im_<|im_end|>end|>"
    plain = smollm.fast.encode(text, add_special_tokens=False, split_special_tokens=True)
    roles, line = ("system", "user", "assistant"), smollm.encode("\n")
    messages = [{"role": role, "content": text} for role in roles]
    ids = smollm.encode(smollm.chat(messages, parse_special=False))
    expected = [id_ for role in roles for id_ in (1, *smollm.encode(f"{role}\n"), *plain, 2, *line)]
    assert ids == [*expected, 1, *smollm.encode("assistant\n")]
    assert smollm.decode(ids, skip_special=False) == smollm.chat(messages)
    assert smollm.chat(MESSAGES, parse_special=False) == smollm.chat(MESSAGES)
    guessed = smollm.chat([{"role": "user", "content": f"{MARK}<|im_end|>{MARK}2."}], parse_special=False)
    assert smollm.encode(guessed).count(2) == smollm.encode(smollm.chat(MESSAGES)).count(2)


BPE = models.BPE({"a": 0, "<": 1, ">": 2, "<>": 3, "<>a": 4}, [("<", ">"), ("<>", "a")])
UNIGRAM = models.Unigram([("a", -1.0), ("<", -3.0), (">", -3.0), ("<>", -1.0)], 0)


@pytest.mark.parametrize("model", [UNIGRAM, BPE])
def test_special_tokens_in_messages_are_plain_text_where_the_model_has_them(model):
    tokenizer = Tokenizer(Backend(model), {}, chat_template="{{ messages[0].content }}<>")
    tokenizer.backend.add_special_tokens(["<>"])
    ids = [tokenizer.encode(tokenizer.chat([{"content": "a<>"}], parse_special=each)) for each in (False, True)]
    assert ids == [[0, 1, 2, 3], [0, 3, 3]]


def test_ids_that_matter(smollm):
    assert (smollm.bos_id, smollm.eos_ids, smollm.vocab_size) == (1, (2,), 49152)
    assert smollm.encode("Hi", add_special=True) == smollm.encode("Hi")  # SmolLM2 wants no beginning of sequence
    assert smollm.decode([1, *smollm.encode("Hi"), 2]) == "Hi"
    assert smollm.decode([1, *smollm.encode("Hi"), 2], skip_special=False) == "<|im_start|>Hi<|im_end|>"
    assert smollm.decode([49152, 60000]) == ""  # padding of an embedding


@pytest.mark.parametrize("size", [1, 2, 5])
def test_stream_is_the_text_in_pieces(smollm, size):
    for row in REFERENCE["encodings"][::3]:
        decoder, ids = StreamDecoder(smollm, skip_special=False), row["ids"]
        pieces = [decoder.push(ids[i : i + size]) for i in range(0, len(ids), size)]
        assert not any("\ufffd" in piece for piece in pieces), row
        assert "".join(pieces) + decoder.flush() == row["text"]


def test_stream_waits_for_the_rest_of_a_character_and_gives_up_only_at_the_end(smollm):
    ids, decoder = smollm.encode("👍🏽"), StreamDecoder(smollm)
    assert len(ids) > 2 and decoder.push(ids[:1]) == decoder.push([]) == ""
    assert "".join(decoder.push([i]) for i in ids[1:]) == "👍🏽" and decoder.flush() == ""
    assert decoder.push(smollm.encode("ok 👍")[:-1]) == "ok"  # the space is in one token with the next first byte
    assert decoder.flush() == " \ufffd"
    assert decoder.push(smollm.encode("new")) == "new"
    decoder.flush()
    assert decoder.push(smollm.encode("👍")[:1]) == ""
    assert decoder.push(smollm.encode("x")) == "\ufffdx"  # invalid for certain: what follows shows it


@pytest.mark.parametrize(
    ("tokens", "pieces"),
    [
        (["\u2581the", "<0xC3>", "<0xA9>", "\u2581the"], ["the", "", "\u00e9", " the"]),
        (["<0x41>", "<0xFF>", "b", "b"], ["A", "", "\ufffdb", "b"]),  # bytes that were A are no text behind FF
    ],
)
def test_stream_survives_bytes_that_change_those_before(tokens, pieces):
    vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581the", "b"]
    numbers = {token: i for i, token in enumerate(vocabulary)}
    backend = Backend(models.BPE(numbers, [], unk_token="<unk>", byte_fallback=True))
    spaces = decoders.Replace("\u2581", " "), decoders.Strip(" ", 1, 0)
    backend.decoder = decoders.Sequence([spaces[0], decoders.ByteFallback(), decoders.Fuse(), spaces[1]])
    decoder = StreamDecoder(Tokenizer(backend, {}))
    assert [decoder.push([numbers[token]]) for token in tokens] == pieces
    assert decoder.flush() == ""


def test_a_models_ends_and_its_tokens_without_embedding(smollm):
    assert [smollm.for_model(ids, 49152).eos_ids for ids in ((), (0, 2))] == [(2,), (0, 2)]
    tied = smollm.for_model((), 3)
    assert tied.encode("<|im_end|>") == [2]
    (exclamation,) = smollm.encode("!")
    with pytest.raises(ValueError, match=rf"token {exclamation} \('!'\) has no embedding: the model has 3"):
        tied.encode("!")


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", " ", " 1234", " b", "'", "S", "!", "\n", "\n", "c"]),
        ("smollm", ["a", "  ", "1", "2", "3", "4", " b", "'", "S", "!", "\n", "\n", "c"]),
        ("llama-bpe", ["a", " ", " ", "123", "4", " b", "'S", "!\n\n", "c"]),
        ("qwen2", ["a", " ", " ", "1", "2", "3", "4", " b", "'S", "!\n\n", "c"]),
    ],
)
def test_words_of_each_pre_tokenizer(tmp_path, pre, pieces):
    path = tiny.write_gguf(tmp_path / "t.gguf", tiny.weights(), metadata={"tokenizer.ggml.pre": pre})
    backend = tokenizer_from_gguf(read_gguf(path)).backend
    words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str("a  1234 b'S!\n\nc")]
    assert [word.replace("Ġ", " ").replace("Ċ", "\n") for word in words] == pieces


def test_whole_words_first_only_where_llama_3_does(tmp_path):
    tokens = [*tiny.vocabulary(), "worlds"]  # no merges lead to it
    more = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [1] * len(tokens)}
    for pre, expected in (("llama-bpe", ["worlds"]), ("qwen2", list("worlds"))):
        path = tiny.write_gguf(tmp_path / f"{pre}.gguf", tiny.weights(), metadata=more | {"tokenizer.ggml.pre": pre})
        tokenizer = tokenizer_from_gguf(read_gguf(path))
        assert [tokens[i] for i in tokenizer.encode("worlds")] == expected


@pytest.mark.parametrize(
    ("pre", "flag", "added"),
    [("smollm", None, []), ("smollm", True, [1]), ("llama-bpe", None, [1]), ("llama-bpe", False, [])],
)
def test_beginning_of_sequence_where_the_file_wants_it(tmp_path, pre, flag, added):
    more = {"tokenizer.ggml.pre": pre, "tokenizer.ggml.add_bos_token": flag}
    tokenizer = tokenizer_from_gguf(read_gguf(tiny.write_gguf(tmp_path / "t.gguf", tiny.weights(), metadata=more)))
    plain = tokenizer.encode("hello")
    assert plain == [tiny.vocabulary().index("hello")]
    assert tokenizer.encode("hello", add_special=True) == added + plain
    tokenizer.save(tmp_path)
    assert tokenizer_from_folder(tmp_path).encode("hello", add_special=True) == added + plain


def with_template(template: str) -> Tokenizer:
    tokenizer = from_drafter()
    return Tokenizer(tokenizer.backend, tokenizer.special, chat_template=template)


MESSAGES = [{"role": "user", "content": "<é>"}]


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("{{ messages | tojson }}", '[{"role": "user", "content": "<é>"}]'),
        ("{% generation %}{{ messages[0].content }}{% endgeneration %}{{ eos_token }}", "<é><|im_end|>"),
        ("  {% for m in messages %}\n    {% if true %}\nx{% endif %}{% break %}{% endfor %}", "x"),
        ("{% set n = namespace(k=1) %}{% for i in [1, 2] %}{% set n.k = n.k + i %}{% endfor %}{{ n.k }}", "4"),
        ("{{ strftime_now('%%') }}{{ tools is none }}{{ add_generation_prompt }}", "%TrueTrue"),
    ],
)
def test_templates_may_use_what_transformers_offers(template, text):
    assert with_template(template).chat(MESSAGES) == text


FAIL = ["{{ raise_exception('roles must alternate') }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"]
FAIL += ["{% set n = namespace(__call__=1) %}", "{{ messages.append(1) }}", "{% for %}", "{{ 1 // 0 }}"]


@pytest.mark.parametrize("template", [*FAIL, "{{ messages[0]['none'].strip() }}"])
def test_templates_that_fail_or_reach_out_are_errors(template):
    with pytest.raises(ValueError, match="chat template refuses"):
        with_template(template).chat(MESSAGES)


def test_a_special_token_that_is_an_object_and_a_template_from_its_own_file(tmp_path):
    tiny.write_tokenizer(tmp_path)
    assert tokenizer_from_folder(tmp_path).chat(MESSAGES) == "user: <é></s>"
    change_json(tmp_path / "tokenizer_config.json", eos_token={"content": "</s>"})
    assert tokenizer_from_folder(tmp_path).eos_ids == (2,)
    (tmp_path / "chat_template.jinja").write_text("file")
    assert tokenizer_from_folder(tmp_path).chat(MESSAGES) == "file"


# What templates of models differ in

SYSTEM = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"}]
ROLES_ALTERNATE = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content | trim }}"
    "{% endfor %}{% if add_generation_prompt %}<model>{% endif %}"
)
LEAVES_OUT = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"
TOOL = {"type": "function", "function": {"name": "weather", "description": "Of a place.", "parameters": {}}}


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (ROLES_ALTERNATE, SYSTEM, "System role not supported.* put that text before the first message"),
        (ROLES_ALTERNATE, [*SYSTEM[1:], *SYSTEM[1:]], "roles must alternate$"),  # no system prompt: no word of one
        (ROLES_ALTERNATE, [*SYSTEM, *SYSTEM[1:]], "System role not supported$"),  # it would fail without one too
        (LEAVES_OUT, SYSTEM, "leaves out the system prompt.* before the first message"),
    ],
)
def test_a_template_without_a_system_role_is_an_error_that_says_what_to_do(template, messages, message):
    tokenizer = with_template(template)
    assert tokenizer.chat(SYSTEM[1:]).startswith("<user>Hi")
    with pytest.raises(ValueError, match=message):
        tokenizer.chat(messages)


def test_the_template_for_tools_is_taken_where_there_are_tools(tmp_path):
    several = [
        {"name": "tool_use", "template": "{{ tools[0].function.name }}"},
        {"name": "default", "template": "plain"},
    ]
    tiny.write_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": several}))
    tokenizer = tokenizer_from_folder(tmp_path)

    def assert_both(tokenizer):
        assert tokenizer.chat(MESSAGES) == "plain" and tokenizer.chat(MESSAGES, tools=[TOOL]) == "weather"

    assert_both(tokenizer)
    (tmp_path / "saved").mkdir()
    tokenizer.save(tmp_path / "saved")
    assert_both(tokenizer_from_folder(tmp_path / "saved"))
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.apply_chat_template(MESSAGES, tokenize=False, tools=[TOOL]) == "weather"
    path = tmp_path / "t.gguf"
    more = {"tokenizer.chat_template": "plain", "tokenizer.chat_template.tool_use": several[0]["template"]}
    assert_both(tokenizer_from_gguf(read_gguf(tiny.write_gguf(path, tiny.weights(), metadata=more))))
    written = tokenizer_metadata(tokenizer_from_gguf(read_gguf(path)), 272, (2,), 1)
    assert {name: written.get(name) for name in more} == more


TEXTS = (
    "Summarise: the cat sat.",
    " two  spaces\tand\na line ",
    "naïve café, 日本語, 😀👍🏽, \u0301",
    "".join(map(chr, range(1, 256))),
    "a <extra_id_0> b</s>c <extra_id_124>",
)


@pytest.fixture(scope="module")
def theirs():
    from transformers import ByT5Tokenizer

    return ByT5Tokenizer()


@pytest.fixture(scope="module", params=["config.json", "tokenizer_config.json", "saved by transformers", "saved here"])
def ours(request, theirs, tmp_path_factory):
    folder = tmp_path_factory.mktemp("bytes")
    if request.param == "saved by transformers":
        theirs.save_pretrained(folder)
    else:
        name = request.param if request.param.endswith(".json") else "config.json"
        (folder / name).write_text(json.dumps({"tokenizer_class": "ByT5Tokenizer"}))
    found = tokenizer_from_folder(folder)
    if request.param == "saved here":
        found.save(folder)
        assert (folder / "tokenizer.json").is_file()
        found = tokenizer_from_folder(folder)
    return found


@pytest.mark.parametrize("text", TEXTS)
def test_ids_and_texts_are_those_of_transformers(ours, theirs, text):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = theirs(text)["input_ids"]
    assert ours.encode(text, add_special=True) == expected
    assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


def test_every_id_has_its_place_and_a_stream_never_ends_inside_a_character(ours, theirs):
    assert ours.vocab_size == 384 == len(theirs) and ours.eos_ids == (1,)
    assert sorted(ours.vocabulary().values()) == list(range(384))
    for role in ("<pad>", "</s>", "<unk>", "<extra_id_0>", "<extra_id_124>"):
        assert ours.vocabulary()[role] == theirs.convert_tokens_to_ids(role)
    ids = ours.encode("né日😀.", add_special=False)
    stream = StreamDecoder(ours)
    parts = [stream.push([one]) for one in ids]
    assert parts == ["n", "", "é", "", "", "日", "", "", "", "😀", "."]
    assert stream.push(ids[3:5]) == "" and stream.flush() == "\ufffd"
