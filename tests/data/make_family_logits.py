"""Writes family_logits.json: logits of small random models of every family, by transformers on torch in float32.

Implementations that share no line with ours. A case is the config.json that transformers writes, the names and shapes
of its weights, and logits at some positions; the weights follow from their names (tests/fixtures/random_weights.py).
Needs torch and transformers; takes seconds:

    python tests/data/make_family_logits.py
"""

import json
import pathlib
import sys
import tempfile

import numpy as np
import torch
import transformers
from safetensors.numpy import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

sys.path.append(str(pathlib.Path(__file__).parents[1] / "fixtures"))
from random_weights import random_tensors  # noqa: E402

TOKENS = np.random.default_rng(3).integers(0, 61, (2, 20)).tolist()
POSITIONS = (0, 1, 6, 13, 19)
SMALL = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
    "eos_token_id": 2,
    "bos_token_id": 1,
    "pad_token_id": None,
}
LLAMA3 = {"rope_type": "llama3", "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "rope_theta": 100.0}
WINDOWS = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
PARTIAL = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.67}
CASES = {
    "llama": ("llama", {}),
    "llama, biases, scaled": (
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 16},
        },
    ),
    "llama, tied, no groups": ("llama", {"tie_word_embeddings": True, "num_key_value_heads": 4, "head_dim": 8}),
    "mistral": ("mistral", {"sliding_window": None}),
    "mistral, window": ("mistral", {"sliding_window": 5, "head_dim": 8}),
    "qwen2": ("qwen2", {}),
    "qwen2, windows, tied": ("qwen2", {**WINDOWS, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 8}),
    "qwen3, windows, biases": ("qwen3", {**WINDOWS, "head_dim": 6, "attention_bias": True, "num_key_value_heads": 1}),
    "gpt_neox": ("gpt_neox", {"rope_parameters": PARTIAL}),
    "gpt_neox, one after the other": (
        "gpt_neox",
        {"rope_parameters": PARTIAL, "use_parallel_residual": False, "tie_word_embeddings": True},
    ),
    "gpt_neox, no biases": ("gpt_neox", {"attention_bias": False, "hidden_act": "gelu_new", "num_attention_heads": 3}),
}


def filled(model):
    """The model with random weights, and the shapes of them, by the names that a checkpoint on the hub has."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        (path,) = pathlib.Path(folder).glob("*.safetensors")
        shapes = {name: list(tensor.shape) for name, tensor in load_file(path).items()}
        save_file(random_tensors(shapes), path, metadata={"format": "pt"})
        again = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    return again.eval(), shapes


def main() -> None:
    cases = {}
    for name, (model_type, changes) in CASES.items():
        config = AutoConfig.for_model(model_type, **{**SMALL, **changes})
        model, shapes = filled(AutoModelForCausalLM.from_config(config, dtype=torch.float32))
        with torch.no_grad():
            logits = model(torch.tensor(TOKENS)).logits[:, list(POSITIONS)].double().numpy()
        written = json.loads(model.config.to_json_string())
        cases[name] = {"config": written, "shapes": shapes, "logits": np.round(logits, 5).tolist()}
    made_by = f"transformers {transformers.__version__}, torch {torch.__version__.split('+')[0]}, float32"
    head = f'"made_by": "{made_by}", "tokens": {TOKENS}, "positions": {list(POSITIONS)}'
    body = ",\n".join(f"  {json.dumps(name)}: {json.dumps(case)}" for name, case in cases.items())
    out = pathlib.Path(__file__).with_name("family_logits.json")
    out.write_text(f'{{{head}, "cases": {{\n{body}\n}}}}\n', encoding="utf-8")


if __name__ == "__main__":
    main()
