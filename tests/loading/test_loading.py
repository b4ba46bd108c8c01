"""Weights come out of every format as they went in."""

import shutil

import gguf
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_t5
import tiny_weights as tiny
from gguf import GGMLQuantizationType as Kind
from refusals import assert_says, refusal
from tiny_pair import ONE_LAYER
from tiny_weights import assert_same_params

from specdec_jax.contrib.gguf_writer import save_gguf
from specdec_jax.distillation.exporting import export
from specdec_jax.distillation.initial import Shape, initial_params
from specdec_jax.loading import builtin, load_model, outline, refuse_encoders, save_hf_folder, save_orbax
from specdec_jax.loading.gguf.reader import dequantise, read_gguf
from specdec_jax.loading.load import weight_bytes
from specdec_jax.models import llama
from specdec_jax.models.int8 import as_float32, is_matrix
from specdec_jax.models.weights import num_weights
from specdec_jax.stopping import static
from specdec_jax.text.calibration import fingerprint
from specdec_jax.text.generation import build_pair, generate
from specdec_jax.text.sampling_params import SamplingParams
from specdec_jax.types import DraftModel

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 8192}  # fmt: skip


@pytest.mark.parametrize(("kind", "shards"), [(Kind.F32, 3), (Kind.Q8_0, 1)])
def test_gguf_equals_its_dequantised_folder(tmp_path, kind, shards):
    named = tiny.weights()
    quantised = load_model(tiny.write_gguf(tmp_path / "tiny.gguf", named, kind=kind), dtype="float32")
    twin = {name: tiny.stored(array, kind) for name, array in named.items()}
    folder = load_model(tiny.write_folder(tmp_path / "twin", twin, shards=shards), dtype="float32")
    assert quantised.config == folder.config
    assert_same_params(quantised.params, folder.params)


@pytest.mark.parametrize("kind", sorted(gguf.GGML_QUANT_SIZES))
def test_every_tensor_type_is_dequantised_or_refused(tmp_path, kind):
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = np.random.default_rng(kind).integers(0, 256, (3, 2 * size), np.uint8)
    writer = gguf.GGUFWriter(tmp_path / "one.gguf", "llama")
    writer.add_tensor("first", np.ones(5, np.float32))  # so that the second begins at a padded offset
    writer.add_tensor("second", raw, raw_dtype=kind)
    file = read_gguf(tiny.finished(writer, tmp_path / "one.gguf"))
    assert file.tensors["second"].shape == (3, 2 * block)
    try:
        with np.errstate(all="ignore"):
            expected = gguf.quants.dequantize(raw, kind)
    except NotImplementedError:
        with pytest.raises(ValueError, match=f"tensor second has type {kind.name}"):
            dequantise(file, "second")
    else:
        with np.errstate(all="ignore"):
            np.testing.assert_array_equal(dequantise(file, "second"), expected)


def test_gguf_rope_scaling(tmp_path):
    frequency = 1 / 10000 ** (np.arange(0, 16, 2) / 16)
    turns = 8192 * frequency / (2 * np.pi)
    kept = np.clip((turns - 1) / 3, 0, 1)
    divisors = (1 / (kept + (1 - kept) / 8)).astype(np.float32)
    path = tiny.write_gguf(tmp_path / "t.gguf", tiny.weights(), extra={"rope_freqs.weight": divisors})
    assert load_model(path).config.rope_scaling == LLAMA3


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("save", [save_hf_folder, save_orbax])
def test_saved_models_come_back(tmp_path, save, dtype):
    loaded = load_model(tiny.write_folder(tmp_path / "m", tiny.weights()), dtype=dtype)
    save(tmp_path / "copy", loaded.config, loaded.params, loaded.tokenizer)
    again = load_model(tmp_path / "copy", dtype=dtype)
    assert again.config == loaded.config
    assert_same_params(again.params, loaded.params)
    lower = load_model(tmp_path / "copy", dtype="bfloat16").params
    assert_same_params(lower, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), loaded.params))
    assert again.tokenizer.encode("hello 12</s>") == loaded.tokenizer.encode("hello 12</s>")
    messages = [{"role": "user", "content": "hello"}]
    assert again.tokenizer.chat(messages) == loaded.tokenizer.chat(messages) == "user: hello</s>"
    assert again.tokenizer.eos_ids == (2,) and again.tokenizer.bos_id == 1
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_transformers_reads_what_is_saved(tmp_path):
    transformers = pytest.importorskip("transformers")
    loaded = load_model(tiny.write_gguf(tmp_path / "t.gguf", tiny.weights(tiny.CONFIG)))
    save_hf_folder(tmp_path / "saved", loaded.config, loaded.params, loaded.tokenizer)
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved")
    config = transformers.AutoConfig.from_pretrained(tmp_path / "saved")
    text = "hello  12 Worlds</s>"
    assert tokenizer(text, add_special_tokens=False).input_ids == loaded.tokenizer.encode(text)
    messages = [{"role": "user", "content": "hello"}]
    assert tokenizer.apply_chat_template(messages, tokenize=False) == loaded.tokenizer.chat(messages)
    assert (config.model_type, config.hidden_size, config.eos_token_id) == ("llama", 64, 2)
    assert config.rope_parameters["rope_theta"] == 10000.0


@pytest.mark.parametrize("save", [save_hf_folder, save_orbax, save_gguf])
def test_saving_never_replaces_by_accident_and_never_half(tmp_path, save, monkeypatch):
    loaded = load_model(tiny.write_folder(tmp_path / "m", tiny.weights()), dtype="float32")
    content, copy = (loaded.config, loaded.params, loaded.tokenizer), tmp_path / "copy.gguf"
    copy.touch() if save is save_gguf else (copy / "stale").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="copy"):
        save(copy, *content)
    assert copy.is_file() or (copy / "stale").exists()
    save(copy, *content, overwrite=True)
    assert not (copy / "stale").exists()

    def full(*_):
        raise OSError("no space left on device")

    monkeypatch.setattr(loaded.tokenizer, "save", full)
    monkeypatch.setattr(gguf.GGUFWriter, "write_tensor_data", full)
    for path in (tmp_path / "new.gguf", copy):
        with pytest.raises(OSError, match="no space"):
            save(path, *content, overwrite=True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["copy.gguf", "m"]
    again = load_model(copy, dtype="float32")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=0.01), again.params, loaded.params)


def test_folder_in_the_working_directory_wins_over_a_hub_id(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tiny.write_folder(tmp_path / "org" / "name", tiny.weights())
    assert load_model("org/name").config.hidden_size == 64


@pytest.mark.parametrize(
    ("name", "most", "parameters"),
    [
        ("smollm2-drafter", 13e6, 13.8e6),
        ("smollm2-drafter-nano", 10e6, 3.9e6),
        ("smollm2-drafter-reading", 13e6, 14.8e6),
    ],
)
def test_a_builtin_drafter_is_one_small_file(name, most, parameters):
    assert builtin.drafter_file(name).stat().st_size < most
    drafter = load_model(name)
    assert drafter.name == name
    assert drafter.config.vocab_size == drafter.tokenizer.vocab_size == 49152
    assert sum(leaf.size for leaf in jax.tree.leaves(drafter.params)) == pytest.approx(parameters, rel=0.02)


@pytest.fixture(params=["folder", "gguf", "orbax"])
def source(request, tmp_path):
    named = tiny.weights()
    if request.param == "gguf":
        return tiny.write_gguf(tmp_path / "tiny.gguf", named)
    folder = tiny.write_folder(tmp_path / "tiny", named)
    if request.param == "folder":
        return folder
    loaded = load_model(folder, dtype="float32")
    save_orbax(tmp_path / "orbax", loaded.config, loaded.params, loaded.tokenizer)
    return tmp_path / "orbax"


def test_an_outline_has_everything_but_weights(source, monkeypatch):
    loaded = load_model(source, dtype="bfloat16")
    monkeypatch.setattr(llama, "params_from_named", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr("specdec_jax.loading.load.restore_orbax", lambda *_: pytest.fail("weights were read"))
    outlined = outline(source)
    assert outlined.params is None and (outlined.config, outlined.name) == (loaded.config, loaded.name)
    assert outlined.model.spec == loaded.model.spec
    assert outlined.tokenizer.vocabulary() == loaded.tokenizer.vocabulary()
    assert outlined.tokenizer.encode("hello") == loaded.tokenizer.encode("hello")
    leaves = jax.tree.leaves(loaded.params)
    assert weight_bytes(outlined.config, "bfloat16") == sum(leaf.nbytes for leaf in leaves)
    assert weight_bytes(outlined.config, "float32") == 4 * num_weights(llama.parameter_table(outlined.config))


def test_an_outline_leaves_out_a_draft_vocabulary():
    whole, few = outline("smollm2-drafter"), outline("smollm2-drafter@8192")
    assert few.name == "smollm2-drafter@8192" and few.config == whole.config and not isinstance(few.model, DraftModel)


def test_what_is_no_model_is_refused_as_when_it_is_loaded(tmp_path):
    tiny.write_folder(tmp_path / "strange", tiny.weights(), {**tiny.CONFIG, "model_type": "lama"})
    for wrong in ("nowhere", tmp_path, tmp_path / "strange"):
        messages = []
        for read in (outline, load_model):
            with pytest.raises((ValueError, FileNotFoundError)) as caught:
                read(str(wrong))
            messages.append(str(caught.value))
        assert messages[0] == messages[1]


def test_an_encoder_in_an_orbax_folder_is_refused_without_weights_and_without_a_tokenizer(tmp_path):
    loaded, orbax = load_model(tiny_t5.write_pair(tmp_path)[0], dtype="float32"), tmp_path / "orbax"
    save_orbax(orbax, loaded.config, loaded.params, loaded.tokenizer)
    for name in ("params", "tokenizer"):
        shutil.rmtree(orbax / name)
    with pytest.raises(ValueError, match=f"a walk does not serve models with an encoder, .*{orbax}"):
        refuse_encoders("a walk", "smollm2-drafter@8192", orbax)


def test_who_has_no_encoder_is_not_refused(source, tmp_path):
    """What cannot be read is left to who loads it, but for a model that is nowhere."""
    (tmp_path / "config.json").write_text("{")
    refuse_encoders("a walk", source, tmp_path)
    with pytest.raises(FileNotFoundError, match="no model 'nowhere'"):
        refuse_encoders("a walk", "nowhere")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("int8")
    return tiny.write_folder(place / "tiny", tiny.weights(ONE_LAYER), ONE_LAYER)


@pytest.fixture(scope="module")
def loaded(folder):
    return load_model(folder, dtype="int8")


def test_what_is_loaded_says_what_it_is_from_a_folder_or_a_gguf_file(loaded, tmp_path, folder):
    file = tiny.write_gguf(tmp_path / "tiny.gguf", tiny.weights(ONE_LAYER), ONE_LAYER)
    jax.tree.map(np.testing.assert_array_equal, loaded.params, load_model(file, dtype="int8").params)
    whole = load_model(folder, dtype="float32")
    assert [one.dtype for one in (loaded, whole)] == ["int8", "float32"]
    cache = loaded.model.init_cache(loaded.params, 1, 4)
    assert cache.keys[0].dtype == loaded.params["norm"]["scale"].dtype == jnp.bfloat16
    here, there = fingerprint(loaded.params), fingerprint(whole.params)
    assert here["parameters"] == there["parameters"]  # so that a calibration of the pair is still its own
    assert here["scale"] == pytest.approx(there["scale"], rel=2e-3)


def test_int8_weights_are_never_saved_nor_made_of_an_orbax_checkpoint(loaded, tmp_path, folder):
    given = loaded.config, loaded.params, loaded.tokenizer
    for save in (save_hf_folder, save_orbax, save_gguf, lambda *args: export(*args, card="x")):
        with pytest.raises(ValueError, match="int8 weights are made at loading and never saved"):
            save(tmp_path / "out", *given)
        assert not (tmp_path / "out").exists()
    whole = load_model(folder, dtype="float32")
    save_orbax(tmp_path / "orbax", whole.config, whole.params, whole.tokenizer)
    message = refusal(str(tmp_path / "orbax"), dtype="int8")
    assert_says(message, tmp_path / "orbax", "Orbax", "int8 is made of safetensors and GGUF")


@pytest.mark.parametrize("init", ["first_layers", "projection"])
def test_a_drafter_can_begin_from_an_int8_target(loaded, init):
    shape, counts = Shape(layers=1, width=32, heads=2, kv_heads=1, head_dim=16, hidden=48, init=init), np.ones(272)
    exact = jax.tree.map(as_float32, loaded.params, is_leaf=is_matrix)
    found, expected = (initial_params(shape, loaded.config, own, counts, 0) for own in (loaded.params, exact))
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype(jnp.float32)}


def test_a_pair_drafts_with_int8_weights(tiny_folders):
    """Its target, and its drafter, too, unless that is given loaded otherwise; drafts are accepted."""
    target, small = tiny_folders
    more = {"policy": static(draft_length=3), "costs": "estimated", "max_draft_length": 3}
    mixed, pair = (
        build_pair(target, drafter, dtype="int8", **more) for drafter in (load_model(small, dtype="bfloat16"), small)
    )
    for params, is_int8 in zip((*mixed.params[:2], *pair.params[:2]), (True, False, True, True), strict=True):
        assert any(leaf.dtype == jnp.int8 for leaf in jax.tree.leaves(params)) == is_int8
    result = generate("hello", SamplingParams(max_new_tokens=24), pair=pair, chat=False)
    assert result.statistics["num_accepted_tokens"] > 0
