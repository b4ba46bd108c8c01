"""GGUF files: every architecture, tokenizer and kind of tensor, read, written, or refused."""

import dataclasses
import importlib
import json

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_llama
import tiny_weights as tiny
from gguf import GGMLQuantizationType as Kind
from refusals import assert_says, refusal
from tiny_weights import assert_same_params
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from specdec_jax.contrib import gguf_writer
from specdec_jax.contrib.gguf_writer import pre_tokenizer_name, save_gguf, tokenizer_metadata
from specdec_jax.drafters.draft_models import llama_reading
from specdec_jax.loading import Tokenizer, load_model
from specdec_jax.loading.families import family_of
from specdec_jax.loading.gguf.architectures import ARCHITECTURES, MIXTURES
from specdec_jax.loading.gguf.file import config_from_gguf
from specdec_jax.loading.gguf.reader import dequantise, read_gguf
from specdec_jax.loading.gguf.tokenizer import NAMES, pre_tokenizer, tokenizer_from_gguf
from specdec_jax.models import llama
from specdec_jax.models.config import FULL, SLIDING

PLAIN = {"sliding_window": None, "layer_types": None}
LINEAR = {"rope_type": "linear", "factor": 8.0}
CHANGES = {  # of a family's example, to what files of its architecture say
    "qwen2": PLAIN | {"head_dim": 6, "rope_theta": 1e6},
    "qwen3": PLAIN | {"attention_bias": False, "tie_word_embeddings": True},
    "gemma2": {"query_pre_attn_scalar": 8, "attn_logit_softcapping": 2.5},
    "gemma3_text": {
        "query_pre_attn_scalar": 8,
        "num_hidden_layers": 7,
        "layer_types": (SLIDING,) * 5 + (FULL, SLIDING),
        "rope_scaling": LINEAR,
        "rope_local_base_freq": 500.0,
        "final_logit_softcapping": 4.0,
    },
    "gpt2": {},
    "llama": {"head_dim": 8, "rope_scaling": None, "attention_bias": False, "mlp_bias": False},
    "mixtral": {"sliding_window": None},
    "qwen3_moe": PLAIN | {"attention_bias": False, "mlp_only_layers": (), "norm_topk_prob": True},
}
WRITTEN = [name for name in CHANGES if name not in ("mixtral", "qwen3_moe")]


def example(family: str, **more):
    """A config of the family with the tiny tokenizer's ids."""
    config = importlib.import_module(f"specdec_jax.models.{family}").example_config()
    ids = {"vocab_size": len(tiny.vocabulary()), "bos_token_id": 1, "eos_token_ids": (2,)}
    return dataclasses.replace(config, **ids | CHANGES[family] | more)


def random_named(config) -> dict[str, np.ndarray]:
    """Checkpoint tensors; all are multiples of 2^-10, so that one more of a norm's is exact."""
    module, rng = importlib.import_module(type(config).__module__), np.random.default_rng(0)
    shapes = {name: parameter.shape for name, parameter in module.parameter_table(config).items()}
    return {name: (rng.integers(-600, 600, shape) / 1024).astype(np.float32) for name, shape in shapes.items()}


def folder(tmp_path, config):
    return tiny.write_folder(tmp_path / "folder", random_named(config), config.to_hf())


def converted(tmp_path, config, **changes):
    """A file of it; `changes` override entries, named without the architecture."""
    arch = gguf.MODEL_ARCH_NAMES[tiny.ARCHITECTURES[config.model_type]]
    changes = {f"{arch}.{key}": value for key, value in changes.items()}
    return tiny.write_gguf(tmp_path / "converted.gguf", random_named(config), config.to_hf(), metadata=changes)


def test_every_architecture_is_here():
    served = {one.model_type for one in (*ARCHITECTURES.values(), *MIXTURES.values())}
    assert served == {*CHANGES, "llama_reading"}


@pytest.mark.parametrize("family", CHANGES)
def test_a_converted_file_is_the_folders_model(tmp_path, family):
    config = example(family)
    paths = folder(tmp_path, config), converted(tmp_path, config)
    theirs, ours = (load_model(path, dtype="float32") for path in paths)
    assert ours.config == theirs.config == config
    assert_same_params(ours.params, theirs.params)
    assert ours.model == theirs.model


@pytest.mark.parametrize("family", WRITTEN)
def test_what_is_written_is_the_converters_file_and_comes_back(tmp_path, family):
    config = example(family)
    loaded = load_model(folder(tmp_path, config), dtype="float32")
    save_gguf(tmp_path / "ours.gguf", config, loaded.params, loaded.tokenizer, kind="F32")
    ours, theirs = read_gguf(tmp_path / "ours.gguf"), read_gguf(converted(tmp_path, config))
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name in theirs.tensors:
        np.testing.assert_array_equal(dequantise(ours, name), dequantise(theirs, name), err_msg=name)
    for name, value in theirs.metadata.items():
        np.testing.assert_array_equal(ours.metadata[name], value, err_msg=name)
    again = load_model(tmp_path / "ours.gguf", dtype="float32")
    assert again.config == config
    assert_same_params(again.params, loaded.params)
    before, after = loaded.tokenizer, again.tokenizer
    assert (after.vocabulary(), after.special) == (before.vocabulary(), before.special)
    assert (after.bos_id, after.eos_ids) == (1, (2,)) and after.chat(MESSAGES) == before.chat(MESSAGES)
    for text in TEXTS:
        ids = before.encode(text)
        assert after.encode(text) == after.encode(text, add_special=True) == ids
        assert after.decode(ids, skip_special=False) == before.decode(ids, skip_special=False)


def test_an_untied_head_and_quantised_matrices(tmp_path, loaded):
    """GPT-2's matrices are turned before they are quantised, and its positions stay in float32."""
    config = example("gpt2", tie_word_embeddings=False, hidden_size=96, intermediate_size=64)
    params = write(tmp_path / "m.gguf", config, loaded.tokenizer, kind="Q8_0")
    kinds = {name: info.kind.name for name, info in read_gguf(tmp_path / "m.gguf").tensors.items()}
    assert kinds["position_embd.weight"] == "F32" and kinds["output.weight"] == kinds["blk.1.ffn_down.weight"] == "Q8_0"
    again = load_model(tmp_path / "m.gguf", dtype="float32")
    assert again.config == config
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.006), again.params, params)


def settings(path, **options):
    config = example(options.pop("family"))
    return config_from_gguf(read_gguf(converted(path, config, **options)))


def test_gemmas_largest_models_scale_queries_otherwise(tmp_path):
    for family, layers in (("gemma2", 46), ("gemma3_text", 62)):
        assert settings(tmp_path, family=family, block_count=layers)["query_pre_attn_scalar"] == 24 // 4
        assert settings(tmp_path, family=family, block_count=layers - 1)["query_pre_attn_scalar"] == 8


def test_gemmas_layers_with_windows(tmp_path):
    def kinds(family, **options):
        found = settings(tmp_path, family=family, **options)["layer_types"]
        return "".join("s" if kind == SLIDING else "F" for kind in found)

    window, pattern = "attention.sliding_window", "attention.sliding_window_pattern"
    assert kinds("gemma2", block_count=5) == "sFsFs"
    assert kinds("gemma3_text", block_count=13) == "sssssFsssssFs"
    assert kinds("gemma3_text", block_count=5, **{pattern: 2}) == "sFsFs"
    assert kinds("gemma3_text", block_count=3, **{pattern: [True, False, False]}) == "sFF"
    assert kinds("gemma3_text", block_count=7, **{window: None}) == "FFFFFFF"
    assert settings(tmp_path, family="gemma2", **{window: None})["sliding_window"] == 4096
    assert settings(tmp_path, family="gemma3_text", **{"rope.freq_base_swa": None})["rope_local_base_freq"] == 10000.0


@pytest.mark.parametrize("kinds", [(FULL, FULL, *(SLIDING,) * 5), (FULL,) * 7])
def test_layers_in_another_order_are_written_as_they_are(tmp_path, loaded, kinds):
    config = example("gemma3_text", layer_types=kinds, sliding_window=5 if SLIDING in kinds else 4096)
    write(tmp_path / "m.gguf", config, loaded.tokenizer, kind="F32")
    assert load_model(tmp_path / "m.gguf").config == config
    stated = "gemma3.attention.sliding_window" in read_gguf(tmp_path / "m.gguf").metadata
    assert stated == (SLIDING in kinds)  # llama.cpp does not take one for layers that are all global


@pytest.mark.parametrize(
    ("family", "changes", "parts"),
    [
        ("mixtral", {"expert_count": 15}, ["unknown: model.layers.0.block_sparse_moe.experts.15.w1.weight"]),
        ("gemma3_text", {"attention.sliding_window_pattern": [True]}, ["1 entries for 7 layers"]),
    ],
)
def test_files_that_are_not_served(tmp_path, family, changes, parts):
    path = converted(tmp_path, example(family), **changes)
    assert_says(refusal(path), path, *parts)


SPECIAL, WHOLE = ["<unk>", "<s>", "</s>"], ["  ", "<b>"]
BYTES = [f"<0x{i:02X}>" for i in range(256)]
MERGED = ["ab", "▁a", "bab", "▁ab", "aba", "ca", "▁c", "éa", "abab", "▁▁"]  # by falling score
LETTERS = ["a", "b", "c", "é", "▁", "<", ">"]
TOKENS = [*SPECIAL, *WHOLE, *BYTES, "bc", *MERGED, *LETTERS]  # the first of them unused
KINDS = [2, 3, 3, 4, 4, *[6] * 256, 5, *[1] * (len(MERGED) + len(LETTERS))]
SCORES = [*[0.0] * (len(TOKENS) - len(MERGED) - len(LETTERS)), *(-float(i) for i in range(17))]
SPACED = ["ab", " ab ca", "a  b   c", "<s>ab</s> ab", "é🙂 éa", "ababab<b>babab", "a\nb", "▁ a", "   ", ""]


def metadata(**changes):
    entries = {"model": "llama", "pre": "default", "tokens": TOKENS, "token_type": KINDS, "scores": SCORES}
    entries |= {"merges": None, "add_space_prefix": False} | changes
    return {f"tokenizer.ggml.{name}": value for name, value in entries.items()}


def read(tmp_path, **changes) -> Tokenizer:
    path = tiny.write_gguf(tmp_path / "t.gguf", tiny.weights(), metadata=metadata(**changes))
    return tokenizer_from_gguf(read_gguf(path))


def by_the_rule(text: str) -> list[int]:
    """Of text without whole tokens: the two neighbours of the best union first, then bytes."""
    score = {token: SCORES[i] for i, token in enumerate(TOKENS) if KINDS[i] == 1}
    parts = list(text.replace(" ", "▁"))
    while True:
        unions = [(-score[a + b], i) for i, (a, b) in enumerate(zip(parts, parts[1:], strict=False)) if a + b in score]
        if not unions:
            break
        _, i = min(unions)
        parts[i : i + 2] = [parts[i] + parts[i + 1]]
    ids = [[TOKENS.index(p)] if p in score else [TOKENS.index(BYTES[b]) for b in p.encode()] for p in parts]
    return [i for some in ids for i in some]


def test_ids_are_those_of_the_rule(tmp_path):
    tokenizer, rng = read(tmp_path), np.random.default_rng(0)
    for _ in range(300):
        text = "".join(rng.choice(list("aabbc é🙂"), 12))
        while "  " in text:  # a token of its own
            text = text.replace("  ", " ")
        assert tokenizer.encode(text) == by_the_rule(text), text
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_whole_tokens_special_ones_and_the_beginning(tmp_path):
    tokenizer = read(tmp_path)
    ids = tokenizer.encode("<s>a  b<b>  c", add_special=True)
    assert [TOKENS[i] for i in ids] == ["<s>", "<s>", "a", "  ", "b", "<b>", "  ", "c"]
    assert tokenizer.decode(ids) == "a  b<b>  c" and tokenizer.decode(ids, skip_special=False).startswith("<s><s>a")
    assert tokenizer.encode("<unk>") == [0] and tokenizer.decode([0]) == ""
    assert tokenizer.special == {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"}
    assert read(tmp_path, add_bos_token=False).encode("a", add_special=True) == tokenizer.encode("a")


@pytest.mark.parametrize("prefix", [True, False])
def test_special_tokens_in_messages_are_characters(tmp_path, prefix):
    tokenizer = read(tmp_path, add_space_prefix=prefix)
    tokenizer.chat_template = "{% for m in messages %}<s>{{ m.content }}</s>{% endfor %}"
    ids = tokenizer.encode(tokenizer.chat([{"role": "user", "content": "ab</s>"}] * 2, parse_special=False))
    plain = by_the_rule(" " * prefix + "ab</s>")
    assert ids == [1, *plain, 2] * 2 and 2 not in plain


@pytest.mark.parametrize("said", [True, None])
def test_a_space_in_front(tmp_path, said):
    tokenizer = read(tmp_path, add_space_prefix=said)
    assert tokenizer.encode("ab c") == by_the_rule(" ab c") != by_the_rule("ab c")
    assert tokenizer.decode(tokenizer.encode("ab c")) == "ab c"
    assert tokenizer.decode(tokenizer.encode(" ab")) == " ab"


@pytest.mark.parametrize("prefix", [True, False])
def test_a_tokenizer_of_scores_that_is_written_comes_back(tmp_path, prefix):
    before = read(tmp_path, add_space_prefix=prefix)
    rows = len(TOKENS) + 3
    written = tokenizer_metadata(before, rows, (2,), 1)
    writer = gguf.GGUFWriter(tmp_path / "w.gguf", "llama")
    tiny.add_entries(writer, written)
    writer.add_tensor("some", np.ones(3, np.float32))
    after = tokenizer_from_gguf(read_gguf(tiny.finished(writer, tmp_path / "w.gguf")))
    assert after.special == before.special and after.vocabulary().items() >= before.vocabulary().items()
    assert after.vocab_size == rows
    for text in SPACED:
        assert after.encode(text, add_special=True) == before.encode(text, add_special=True), text
        assert after.decode(before.encode(text)) == before.decode(before.encode(text))
    made = [written["tokenizer.ggml.token_type"].count(kind) for kind in (6, 5, 4)]
    assert made == [256, 3 + 1, 2]


def changed(tokenizer, change, **special):
    """The tokenizer with another backend, or with this one changed, and other special tokens."""
    backend = Backend.from_str(tokenizer.backend.to_str())
    found = change(backend)
    backend = found if isinstance(found, Backend) else backend
    return Tokenizer(backend, tokenizer.special | special, chat_template=tokenizer.chat_template)


def set_(name, value):
    return lambda backend: setattr(backend, name, value)


def without(old, new):
    return lambda backend: Backend.from_str(backend.to_str().replace(old, new))


CONFIG = tiny.CONFIG | {"vocab_size": len(tiny.vocabulary())}  # an embedding without padding, unless a test wants it
MESSAGES = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "12 lls"}]
TEXTS = ["hello, 12  worlds 345", "<s>hello</s>", "</s> <unk>hell", "ünïcode 🙂 ٣٤\n\n x", "'s hello's 'S"]
LLAMA3 = {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.fixture
def loaded(tmp_path):
    """A tiny model from a Hugging Face folder, so that nothing of it has been near a GGUF file."""
    return load_model(tiny.write_folder(tmp_path / "folder", tiny.weights(CONFIG), CONFIG), dtype="float32")


def config_of(**changes) -> llama.LlamaConfig:
    return llama.LlamaConfig.from_hf(CONFIG | changes)


def write(path, config, tokenizer, **options):
    params = family_of(config).params_from_named(config, tiny_llama.random_named(config), jnp.float32)
    save_gguf(path, config, params, tokenizer, **options)
    return params


@pytest.mark.parametrize(
    "config",
    [
        config_of(tie_word_embeddings=False, num_key_value_heads=1, rms_norm_eps=1e-07, rope_theta=500000.0),
        config_of(attention_bias=True, mlp_bias=True),
        config_of(rope_scaling=LLAMA3),
        config_of(eos_token_id=[2, 0, 5]),
        llama_reading.reading_config(config_of(), (0, 2), 48),
    ],
)
def test_float32_is_the_same_model(tmp_path, loaded, config):
    params = write(tmp_path / "m.gguf", config, loaded.tokenizer, kind="F32")
    again = load_model(tmp_path / "m.gguf", dtype="float32")
    assert again.config == config
    assert_same_params(again.params, params)


@pytest.mark.parametrize(("kind", "hidden"), [*((kind, 96) for kind in gguf_writer.FILE_TYPES), ("Q8_0", 80)])
def test_every_kind_is_the_gguf_packages(tmp_path, loaded, kind, hidden):
    """Rows that do not divide into blocks, those of ffn_down alone, are in half precision."""
    config = config_of(intermediate_size=hidden)
    params = write(tmp_path / "m.gguf", config, loaded.tokenizer, kind=kind)
    file = read_gguf(tmp_path / "m.gguf")
    assert gguf.LlamaFileType(file.metadata["general.file_type"]).name.endswith("_" + kind)
    assert {info.kind for info in file.tensors.values()} == {Kind[kind], Kind.F32, *[Kind.F16] * (hidden == 80)}
    expected = llama.named_from_params(config, params)
    for name, array in expected.items():
        expected[name] = tiny.stored(array, Kind.F16 if array.shape[-1] == 80 else Kind[kind])
    again = load_model(tmp_path / "m.gguf", dtype="float32")
    assert_same_params(llama.named_from_params(config, again.params), expected)


def test_what_a_tokenizer_may_have(tmp_path, loaded):
    """A beginning that is added, tokens that are whole but not special, a pad token, fewer tokens than rows."""

    def change(backend):
        backend.add_tokens([AddedToken("wholly new", normalized=False)])
        backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])

    before = changed(loaded.tokenizer, change, pad_token="<unk>")
    write(tmp_path / "m.gguf", config_of(vocab_size=300), before)
    again = load_model(tmp_path / "m.gguf").tokenizer
    text = "hello wholly new</s>"
    assert again.encode(text, add_special=True) == before.encode(text, add_special=True) == [1, *before.encode(text)]
    assert again.decode(again.encode(text)) == "hello wholly new"
    assert again.special == before.special
    assert again.vocabulary().items() >= before.vocabulary().items()
    file = read_gguf(tmp_path / "m.gguf")
    kinds, tokens = file.metadata["tokenizer.ggml.token_type"], file.metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == len(kinds) == 300
    assert [int((kinds == kind).sum()) for kind in (3, 4, 5)] == [3, 1, 300 - before.vocab_size]


def test_templates_keep_their_end_token_when_the_model_lists_another_first(tmp_path, loaded):
    write(tmp_path / "m.gguf", config_of(eos_token_id=[5, 2]), loaded.tokenizer)
    again = load_model(tmp_path / "m.gguf")
    assert again.config.eos_token_ids == (2, 5)
    assert again.tokenizer.chat(MESSAGES) == loaded.tokenizer.chat(MESSAGES)


@pytest.mark.parametrize("kind", NAMES)
@pytest.mark.parametrize("ignore_merges", [False, True])
def test_pre_tokenizers_are_known_by_what_they_do(kind, ignore_merges):
    backend = Backend.from_str('{"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}')
    backend.pre_tokenizer = pre_tokenizer(kind)
    state = json.loads(backend.to_str())["pre_tokenizer"]
    if ignore_merges and kind != "llama 3":
        with pytest.raises(ValueError, match="no name for this pre-tokenizer"):
            pre_tokenizer_name(state, ignore_merges)
        return
    name = pre_tokenizer_name(state, ignore_merges)
    assert name in NAMES[kind]
    assert (name == "llama-bpe") == ignore_merges


@pytest.mark.parametrize(("normalizer", "name"), [(normalizers.NFC(), "qwen2"), (None, "deepseek-r1-qwen")])
def test_qwens_normalizer_is_in_the_name(tmp_path, loaded, normalizer, name):
    def change(backend):
        backend.pre_tokenizer, backend.normalizer = pre_tokenizer("qwen 2"), normalizer

    before = changed(loaded.tokenizer, change)
    write(tmp_path / "m.gguf", loaded.config, before)
    assert read_gguf(tmp_path / "m.gguf").metadata["tokenizer.ggml.pre"] == name
    again = load_model(tmp_path / "m.gguf").tokenizer
    two, one = (again.encode(text) for text in ("he\u0301", "h\u00e9"))
    assert two == before.encode("he\u0301") and (two == one) == (name == "qwen2")


SCORED = [
    (set_("normalizer", normalizers.Prepend("▁")), "cannot state the tokenizer's normalizer"),
    (set_("decoder", decoders.ByteLevel()), "cannot state the tokenizer's decoder"),
    (set_("pre_tokenizer", pre_tokenizers.Whitespace()), "pre_tokenizer.*Whitespace"),
    (without('["▁","ab"],', ""), "merges: they are not those of scored pieces"),
    (without('"<0x0A>"', '"<0x0a>"'), "without.*<0x0A>"),
]
BYTE_LEVEL = [
    (set_("pre_tokenizer", pre_tokenizers.Whitespace()), "no name for this pre-tokenizer.*Whitespace"),
    (set_("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)), "no name for this pre-token"),
    (set_("normalizer", normalizers.NFC()), "cannot state the tokenizer's normalizer"),
    (set_("decoder", decoders.Metaspace()), "cannot state the tokenizer's decoder"),
    (lambda backend: backend.add_tokens([AddedToken("<m>", lstrip=True)]), "lstrip of '<m>'"),
    (set_("post_processor", processors.TemplateProcessing(["$A", "</s>"], None, [("</s>", 2)])), "makes .*</s>"),
    (lambda backend: backend.add_tokens([AddedToken(f"<{i}>") for i in range(10)]), "has no embedding"),
    (lambda backend: backend.add_tokens(["[PAD271]"]), r"named \[PAD<id>\]"),
]


@pytest.mark.parametrize(
    ("by_score", "change", "message"), [(True, *case) for case in SCORED] + [(False, *case) for case in BYTE_LEVEL]
)
def test_tokenizers_that_gguf_cannot_state(tmp_path, loaded, by_score, change, message):
    tokenizer, rows = (read(tmp_path), len(TOKENS)) if by_score else (loaded.tokenizer, 272)
    with pytest.raises(ValueError, match=message):
        tokenizer_metadata(changed(tokenizer, change), rows, (2,), 1)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (example("qwen2", sliding_window=5, layer_types=(FULL, SLIDING)), "layer_kinds.*sliding_attention"),
        (example("qwen3", attention_bias=True), "attention_bias True"),
        (example("gemma2", query_pre_attn_scalar=9), "query_pre_attn_scalar 9.*8"),
        (example("gemma2", layer_types=(FULL, FULL)), "no layer has a window"),
        (example("gemma3_text", hidden_act="silu"), "hidden_activation 'silu'.*'gelu_pytorch_tanh'"),
        (example("gpt2", scale_attn_weights=False), "scale_attn_weights False"),
        (example("mixtral"), "gemma2, gemma3_text, gpt2, llama.*MixtralConfig"),
        (config_of(rope_scaling={"rope_type": "dynamic", "factor": 2.0}), "rope scaling.*dynamic"),
        (config_of(rope_scaling=LLAMA3 | {"factor": 4.0}), "rope scaling.*4.0"),
        (config_of(eos_token_id=[1, 3]), r"eos_token has id 2 and the model ends with \(1, 3\)"),
        (config_of(eos_token_id=[2, 3, 4, 5]), "place for 3"),
    ],
)
def test_configs_that_gguf_cannot_state(tmp_path, loaded, config, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "m.gguf", config, loaded.tokenizer)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_bad_arguments(tmp_path, loaded):
    path, given = tmp_path / "m.gguf", (loaded.config, loaded.params, loaded.tokenizer)
    with pytest.raises(ValueError, match="unknown GGUF kind 'Q8_1'; did you mean .*there are: BF16, F16.*Q4_0"):
        save_gguf(path, *given, kind="Q8_1")
    with pytest.raises(ValueError, match="got a dict"):
        save_gguf(path, {"model_type": "mamba"}, *given[1:])  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="has shape"):
        save_gguf(path, config_of(hidden_size=32), *given[1:])
    special = {"eos_token": "<missing>"}
    with pytest.raises(ValueError, match="eos_token '<missing>' is not in its vocabulary"):
        save_gguf(path, *given[:2], Tokenizer(loaded.tokenizer.backend, special))
    with pytest.raises(FileExistsError, match="is a folder"):
        save_gguf(tmp_path / "folder", *given, overwrite=True)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
