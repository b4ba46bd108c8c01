"""Logits by transformers on torch, in float32. Run by that environment's Python: nothing of this project is imported.

    logits.py OUT [MODEL ...]

Without models, those of cases.py with random weights: each is written to OUT in the hub's format, in float32 as one
file and in bfloat16 as several, with a tokenizer that numbers words. Beside each stands logits.npz: tokens [B, T], and
logits [B, T, V]; of models with an encoder `source` [B, E] and `source_length` [B] too.
"""

import json
import pathlib
import sys

import numpy as np
import torch
from cases import CASES, ENCODERS, OWN_NAMES, SMALL, TOKENS, padded_sources, random_tensors, slug
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM

SHARD = "12KB"


def write_case(out, name):
    """Both folders of a case."""
    model_type, changes = name.partition(",")[0], CASES[name]
    options = changes if model_type in OWN_NAMES else SMALL | changes
    kind = AutoModelForSeq2SeqLM if model_type in ENCODERS else AutoModelForCausalLM
    model = kind.from_config(AutoConfig.for_model(model_type, **options), dtype=torch.float32)
    for dtype, size in (("float32", "1GB"), ("bfloat16", SHARD)):
        folder = out / slug(f"{name} {dtype}")
        model.save_pretrained(folder)
        # shapes of the weights, by the names that a checkpoint on the hub has
        shapes = {name: list(tensor.shape) for name, tensor in load_file(folder / "model.safetensors").items()}
        if model_type in ENCODERS and not options.get("tie_word_embeddings", True):
            shapes["lm_head.weight"] = shapes["shared.weight"]  # transformers 5 ties missing weights
        save_file(random_tensors(shapes), folder / "model.safetensors", metadata={"format": "pt"})
        filled = kind.from_pretrained(folder, dtype=getattr(torch, dtype))
        filled.save_pretrained(folder, max_shard_size=size)
        if size == SHARD:
            (folder / "model.safetensors").unlink()
        words = {f"w{i}": i for i in range(SMALL["vocab_size"])}
        Tokenizer(WordLevel(words, unk_token="w0")).save(str(folder / "tokenizer.json"))
        (folder / "shapes.json").write_text(json.dumps(shapes))
        write_logits(folder, folder, TOKENS)


def write_logits(model, folder, tokens):
    """logits.npz in the folder, of a model from anywhere."""
    encodes = AutoConfig.from_pretrained(model).is_encoder_decoder
    kind = AutoModelForSeq2SeqLM if encodes else AutoModelForCausalLM
    loaded = kind.from_pretrained(model, dtype=torch.float32, attn_implementation="eager").eval()
    inputs, more = {"input_ids": torch.tensor(tokens)}, {}
    if encodes:
        source, mask = padded_sources()
        more = {"source": source, "source_length": mask.sum(axis=1)}
        inputs = {"input_ids": torch.tensor(source), "attention_mask": torch.tensor(mask)}
        inputs["decoder_input_ids"] = torch.tensor(tokens)
    with torch.no_grad():
        logits = loaded(**inputs).logits.numpy()
    folder.mkdir(parents=True, exist_ok=True)
    np.savez(folder / "logits.npz", tokens=np.asarray(tokens), logits=logits, **more)


def main(out, *models):
    """Writes all."""
    out = pathlib.Path(out)
    for model in models:
        vocab = AutoConfig.from_pretrained(model).vocab_size
        tokens = np.random.default_rng(3).integers(0, vocab, (2, 20)).tolist()
        write_logits(model, out / slug(model), tokens)
    for name in CASES if not models else ():
        write_case(out, name)


if __name__ == "__main__":
    main(*sys.argv[1:])
