"""What is known of a model before its weights are read is what it turns out to be."""

from pathlib import Path

import jax
import pytest
import tiny_t5
import tiny_weights as tiny

from specdec_jax.loading import load_model, outline, refuse_encoders, save_orbax
from specdec_jax.loading.load import weight_bytes
from specdec_jax.models import llama, t5
from specdec_jax.models.weights import num_weights
from specdec_jax.types import DraftModel


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
    monkeypatch.setattr("specdec_jax.loading.orbax_checkpoint._restore", lambda *_: pytest.fail("weights were read"))
    told = outline(source)
    assert told.params is None and (told.config, told.name) == (loaded.config, loaded.name)
    assert told.model.spec == loaded.model.spec
    assert told.tokenizer.vocabulary() == loaded.tokenizer.vocabulary()
    assert told.tokenizer.encode("hello") == loaded.tokenizer.encode("hello")
    leaves = jax.tree.leaves(loaded.params)
    assert weight_bytes(told.config, "bfloat16") == sum(leaf.nbytes for leaf in leaves)
    assert weight_bytes(told.config, "float32") == 4 * num_weights(llama.parameter_table(told.config))


def test_bytes_of_int8_weights_are_told_and_a_draft_vocabulary_is_left_out(tmp_path):
    loaded = load_model(tiny.write_folder(tmp_path / "tiny", tiny.weights()), dtype="int8")
    told = weight_bytes(loaded.config, "int8")
    assert told == sum(leaf.nbytes for leaf in jax.tree.leaves(loaded.params)) < weight_bytes(loaded.config, "bfloat16")
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


def test_an_encoder_is_refused_without_weights_and_without_a_tokenizer(tmp_path, monkeypatch):
    folder, _ = tiny_t5.write_pair(tmp_path)
    loaded = load_model(folder, dtype="float32")
    save_orbax(tmp_path / "orbax", loaded.config, loaded.params, loaded.tokenizer)
    monkeypatch.setattr(t5, "params_from_named", lambda *_: pytest.fail("weights were read"))
    monkeypatch.setattr("specdec_jax.loading.load.restore_orbax", lambda *_: pytest.fail("weights were read"))
    for found in (folder, tmp_path / "orbax"):
        for name in ("tokenizer.json", "tokenizer/tokenizer.json", "model.safetensors"):
            (Path(found) / name).unlink(missing_ok=True)
        with pytest.raises(ValueError, match=f"a walk does not serve models with an encoder, .*{found}"):
            refuse_encoders("a walk", "smollm2-drafter@8192", found)


def test_who_has_no_encoder_is_not_refused(source, tmp_path):
    """What cannot be read is left to who loads it, but for a model that is nowhere."""
    (tmp_path / "config.json").write_text("{")
    refuse_encoders("a walk", source, tmp_path)
    with pytest.raises(FileNotFoundError, match="no model 'nowhere'"):
        refuse_encoders("a walk", "nowhere")
