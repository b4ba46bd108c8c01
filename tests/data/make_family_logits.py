"""Writes family_logits.json: logits of small random models of every family, by transformers on torch in float32.

Implementations that share no line with ours. A case is the config.json that transformers writes, the names and shapes
of its weights, and logits at some positions; the weights follow from their names (tests/fixtures/random_weights.py).
Needs torch and transformers (`make .venv/... requirements-peers.txt`); takes seconds:

    python tests/data/make_family_logits.py
"""

import json
import pathlib
import sys

import numpy as np
import torch
import transformers
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
}


def main() -> None:
    cases = {}
    for name, (model_type, changes) in CASES.items():
        config = AutoConfig.for_model(model_type, **{**SMALL, **changes})
        model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
        shapes = {weight: list(tensor.shape) for weight, tensor in model.named_parameters()}  # tied ones once
        tensors = {weight: torch.tensor(tensor) for weight, tensor in random_tensors(shapes).items()}
        wrong = model.load_state_dict(tensors, strict=False)
        assert not wrong.unexpected_keys and set(wrong.missing_keys) <= {"lm_head.weight"}, wrong
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
