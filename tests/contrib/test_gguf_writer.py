"""What is written as GGUF comes back as it was, or quantised as the gguf package quantises, or is refused."""

import json
from pathlib import Path

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_llama
import tiny_weights as tiny
from gguf import GGMLQuantizationType as Kind
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from specdec_jax.contrib import gguf_writer
from specdec_jax.contrib.gguf_writer import pre_tokenizer_name, save_gguf
from specdec_jax.drafters.draft_models import llama_reading
from specdec_jax.loading import Tokenizer, load_model
from specdec_jax.loading.gguf.reader import read_gguf
from specdec_jax.loading.gguf.tokenizer import NAMES, pre_tokenizer
from specdec_jax.models import llama

REFERENCE = json.loads((Path(__file__).parents[1] / "data" / "tokenizer_reference.json").read_text())
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


def write(path, loaded, config=None, **options):
    """Random parameters of `config` (the loaded model's unless given), written; gives them."""
    config = config or loaded.config
    params = llama.params_from_named(config, tiny_llama.random_named(config), jnp.float32)
    save_gguf(path, config, params, loaded.tokenizer, **options)
    return params


def with_backend(loaded, change, special=None):
    """The loaded tokenizer with something of its backend changed."""
    backend = Backend.from_str(loaded.tokenizer.backend.to_str())
    change(backend)
    tokenizer = Tokenizer(backend, special or loaded.tokenizer.special, chat_template=tiny.TEMPLATE)
    return loaded._replace(tokenizer=tokenizer)


def assert_equal_trees(one, other):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(one), jax.device_get(other))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": False, "num_key_value_heads": 1, "rms_norm_eps": 1e-07, "rope_theta": 500000.0},
        {"attention_bias": True, "mlp_bias": True},
        {"attention_bias": True, "head_dim": 8},  # heads x head_dim is not the width
        {"rope_scaling": {"rope_type": "linear", "factor": 2.5}},
        {"rope_scaling": LLAMA3},
        {"eos_token_id": [2, 0, 5]},
    ],
    ids=str,
)
def test_float32_is_the_same_model(tmp_path, loaded, changes):
    config = config_of(**changes)
    params = write(tmp_path / "m.gguf", loaded, config, kind="F32")
    again = load_model(tmp_path / "m.gguf", dtype="float32")
    assert again.config == config
    assert_equal_trees(again.params, params)


@pytest.mark.parametrize("kind", gguf_writer.FILE_TYPES)
def test_every_kind_is_the_gguf_packages(tmp_path, loaded, kind):
    params = write(tmp_path / "m.gguf", loaded, kind=kind)
    file = read_gguf(tmp_path / "m.gguf")
    assert gguf.LlamaFileType(file.metadata["general.file_type"]).name.endswith("_" + kind)
    assert {info.kind for info in file.tensors.values()} == {Kind[kind], Kind.F32}
    named = llama.named_from_params(loaded.config, params)
    expected = {name: tiny.stored(array, Kind[kind]) for name, array in named.items()}
    again = load_model(tmp_path / "m.gguf", dtype="float32")
    assert_equal_trees(llama.named_from_params(loaded.config, again.params), expected)


def test_rows_that_do_not_divide_are_half_precision(tmp_path, loaded):
    config = config_of(intermediate_size=80)  # the rows of ffn_down alone
    params = write(tmp_path / "m.gguf", loaded, config)
    file = read_gguf(tmp_path / "m.gguf")
    assert {name for name, info in file.tensors.items() if info.kind == Kind.F16} == {
        f"blk.{i}.ffn_down.weight" for i in range(2)
    }
    name = "model.layers.1.mlp.down_proj.weight"
    again = load_model(tmp_path / "m.gguf", dtype="float32")
    np.testing.assert_array_equal(
        llama.named_from_params(config, again.params)[name],
        llama.named_from_params(config, params)[name].astype(np.float16).astype(np.float32),
    )


def test_the_tokenizer_comes_back(tmp_path, loaded):
    write(tmp_path / "m.gguf", loaded)
    again = load_model(tmp_path / "m.gguf").tokenizer
    assert again.vocabulary() == loaded.tokenizer.vocabulary()
    assert (again.special, again.bos_id, again.eos_ids) == (loaded.tokenizer.special, 1, (2,))
    for text in TEXTS:
        ids = loaded.tokenizer.encode(text)
        assert again.encode(text) == again.encode(text, add_special=True) == ids
        for skip in (True, False):
            assert again.decode(ids, skip_special=skip) == loaded.tokenizer.decode(ids, skip_special=skip)
    assert again.chat(MESSAGES) == loaded.tokenizer.chat(MESSAGES) == "user: hello</s>assistant: 12 lls</s>"


def test_what_a_tokenizer_may_have(tmp_path, loaded):
    """A beginning that is added, tokens that are whole but not special, a pad token, fewer tokens than rows."""

    def change(backend):
        backend.add_tokens([AddedToken("wholly new", normalized=False)])
        backend.post_processor = processors.TemplateProcessing(single=["<s>", "$A"], special_tokens=[("<s>", 1)])

    special = loaded.tokenizer.special | {"pad_token": "<unk>"}
    changed = with_backend(loaded, change, special)
    before = changed.tokenizer
    write(tmp_path / "m.gguf", changed, config_of(vocab_size=300))
    again = load_model(tmp_path / "m.gguf").tokenizer
    text = "hello wholly new</s>"
    assert again.encode(text, add_special=True) == before.encode(text, add_special=True) == [1, *before.encode(text)]
    assert again.decode(again.encode(text)) == "hello wholly new"
    assert again.special == special
    assert again.vocabulary().items() >= before.vocabulary().items()
    file = read_gguf(tmp_path / "m.gguf")
    kinds, tokens = file.metadata["tokenizer.ggml.token_type"], file.metadata["tokenizer.ggml.tokens"]
    assert len(tokens) == len(kinds) == 300
    assert [int((kinds == kind).sum()) for kind in (3, 4, 5)] == [3, 1, 300 - before.vocab_size]


def test_templates_keep_their_end_token_when_the_model_lists_another_first(tmp_path, loaded):
    write(tmp_path / "m.gguf", loaded, config_of(eos_token_id=[5, 2]))
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

    changed = with_backend(loaded, change)
    write(tmp_path / "m.gguf", changed)
    assert read_gguf(tmp_path / "m.gguf").metadata["tokenizer.ggml.pre"] == name
    again = load_model(tmp_path / "m.gguf").tokenizer
    two, one = (again.encode(text) for text in ("he\u0301", "h\u00e9"))
    assert two == changed.tokenizer.encode("he\u0301") and (two == one) == (name == "qwen2")


def set_(name, value):
    return lambda backend: setattr(backend, name, value)


PADDED = {"vocab_size": 272}


@pytest.mark.parametrize(
    ("change", "config", "message"),
    [
        (set_("pre_tokenizer", pre_tokenizers.Whitespace()), PADDED, "no name for this pre-tokenizer.*Whitespace"),
        (set_("pre_tokenizer", pre_tokenizers.ByteLevel(add_prefix_space=True)), PADDED, "no name for this pre-token"),
        (set_("normalizer", normalizers.NFC()), PADDED, "cannot state the tokenizer's normalizer"),
        (set_("decoder", decoders.Metaspace()), PADDED, "cannot state the tokenizer's decoder"),
        (lambda backend: backend.add_tokens([AddedToken("<m>", lstrip=True)]), PADDED, "lstrip of '<m>'"),
        (
            set_("post_processor", processors.TemplateProcessing(["$A", "</s>"], None, [("</s>", 2)])),
            *(PADDED, "makes .*</s>"),
        ),
        (lambda backend: backend.add_tokens([AddedToken(f"<{i}>") for i in range(10)]), PADDED, "has no embedding"),
        (lambda backend: backend.add_tokens(["[PAD271]"]), PADDED, r"named \[PAD<id>\]"),
        (None, {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope scaling.*dynamic"),
        (None, {"rope_scaling": LLAMA3 | {"factor": 4.0}}, "rope scaling.*4.0"),
        (None, {"eos_token_id": [1, 3]}, r"eos_token has id 2 and the model ends with \(1, 3\)"),
        (None, {"eos_token_id": [2, 3, 4, 5]}, "place for 3"),
    ],
)
def test_tokenizers_and_configs_that_gguf_cannot_state(tmp_path, loaded, change, config, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path / "m.gguf", with_backend(loaded, change) if change else loaded, config_of(**config))
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


def test_overwriting_is_asked_for_and_a_file_cut_short_leaves_what_was_there(tmp_path, loaded, monkeypatch):
    path, calls, quantize = tmp_path / "m.gguf", [], gguf.quants.quantize

    def fail_later(*args):
        calls.append(args)
        if len(calls) % 5 == 0:
            raise OSError("no space left on device")
        return quantize(*args)

    with monkeypatch.context() as patched:
        patched.setattr(gguf.quants, "quantize", fail_later)
        with pytest.raises(OSError, match="no space"):
            write(path, loaded)
        assert [found.name for found in tmp_path.iterdir()] == ["folder"]
        path.write_text("precious")
        with pytest.raises(OSError, match="no space"):
            write(path, loaded, overwrite=True)
    with pytest.raises(FileExistsError, match=r"m\.gguf exists already"):
        write(path, loaded)
    assert path.read_text() == "precious"
    assert sorted(found.name for found in tmp_path.iterdir()) == ["folder", "m.gguf"]
    write(path, loaded, overwrite=True)
    assert load_model(path).config == loaded.config
    assert sorted(found.name for found in tmp_path.iterdir()) == ["folder", "m.gguf"]


def test_the_built_in_drafter(tmp_path, smollm2_drafter_float32):
    drafter = smollm2_drafter_float32
    save_gguf(tmp_path / "m.gguf", drafter.config, drafter.params, drafter.tokenizer)
    again = load_model(tmp_path / "m.gguf", dtype="float32")
    assert again.config == drafter.config
    assert again.tokenizer.vocabulary() == drafter.tokenizer.vocabulary()
    for row in REFERENCE["encodings"]:
        assert again.tokenizer.encode(row["text"]) == row["ids"]
    for chat in REFERENCE["chats"]:
        assert again.tokenizer.chat(chat["messages"], add_generation_prompt=chat["open"]) == chat["text"]
    tokens = jnp.asarray([drafter.tokenizer.encode(REFERENCE["chats"][0]["text"])], jnp.int32)
    apply = jax.jit(drafter.model.apply)
    one, other = (np.asarray(apply(params, tokens, None)[0]) for params in (drafter.params, again.params))
    assert 0 < np.abs(one - other).max() < 0.5  # of logits up to 20
    assert (one.argmax(-1) == other.argmax(-1)).mean() > 0.9


def test_a_drafter_that_reads_its_target_comes_back(tmp_path, loaded):
    """Whom it reads, and its projections; other readers refuse the file's architecture."""
    config = llama_reading.reading_config(loaded.config, (0, 2), 48)
    params = llama_reading.with_reading(config, loaded.params, jnp.float32)
    params["read"]["kernel"] = jax.random.normal(jax.random.key(0), params["read"]["kernel"].shape)
    save_gguf(tmp_path / "reading.gguf", config, params, loaded.tokenizer, kind="F32")
    again = load_model(tmp_path / "reading.gguf", dtype="float32")
    assert again.config == config and again.model.reading.layers == (0, 2)
    assert jax.tree.all(jax.tree.map(lambda a, b: bool(jnp.all(a == b)), params, again.params))
    assert read_gguf(tmp_path / "reading.gguf").metadata["general.architecture"] == "llama_reading"
