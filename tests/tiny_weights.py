"""Tiny llama checkpoints on disk, written without the loaders under test: GGUF by `gguf`, folders by `safetensors`."""

import json
from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from safetensors.numpy import save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONFIG = {
    "model_type": "llama",
    "hidden_act": "silu",
    "vocab_size": 272,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-05,
    "rope_theta": 10000.0,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
SPECIAL = ["<unk>", "<s>", "</s>"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
TEMPLATE = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}{{ eos_token }}{% endfor %}"
GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def vocabulary() -> list[str]:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    return [*SPECIAL, *letters, *("".join(pair) for pair in MERGES)]


def weights(config=CONFIG, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors under Hugging Face's names."""
    rng, width, hidden = np.random.default_rng(seed), config["hidden_size"], config["intermediate_size"]
    queries, keys = (config[f"num_{who}_heads"] * config["head_dim"] for who in ("attention", "key_value"))
    attention = {"q": (queries, width), "k": (keys, width), "v": (keys, width), "o": (width, queries)}
    shapes = {"model.embed_tokens.weight": (config["vocab_size"], width), "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}."
        linear = {f"self_attn.{name}_proj": shape for name, shape in attention.items()}
        linear |= {"mlp.gate_proj": (hidden, width), "mlp.up_proj": (hidden, width), "mlp.down_proj": (width, hidden)}
        for name, shape in linear.items():
            shapes[f"{layer}{name}.weight"] = shape
            if config.get("mlp_bias" if name.startswith("mlp") else "attention_bias"):
                shapes[f"{layer}{name}.bias"] = shape[:1]
        shapes |= {f"{layer}{norm}.weight": (width,) for norm in ("input_layernorm", "post_attention_layernorm")}
    return {name: rng.normal(0, 0.3, shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(name: str) -> str:
    stem, kind = name.rsplit(".", 1)
    if stem.startswith("model.layers."):
        _, _, layer, rest = stem.split(".", 3)
        return f"blk.{layer}.{GGUF_NAMES[rest]}.{kind}"
    return f"{GGUF_NAMES[stem]}.{kind}"


def interleave(array: np.ndarray, heads: int) -> np.ndarray:
    """The row order llama.cpp's converter gives q and k."""
    return array.reshape(heads, 2, array.shape[0] // heads // 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)


def stored(array: np.ndarray, kind: Kind) -> np.ndarray:
    """The values a tensor has after a trip through `kind`; vectors stay float32, as converters leave them."""
    return array if array.ndim == 1 else gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind)


def write_gguf(path: Path, named, config=CONFIG, kind=Kind.F32, *, arch="llama", metadata=None, extra=None) -> Path:
    """A GGUF of `named`. `metadata` overrides entries (None leaves one out), `extra` adds tensors as they are named."""
    writer = gguf.GGUFWriter(path, arch)
    for key, value in ({**_metadata(config, arch)} | (metadata or {})).items():
        if value is None:
            continue
        if isinstance(value, list):
            writer.add_array(key, value)
        else:
            add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
            add[type(value)](key, value)
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    for name, array in named.items():
        part = name.split(".")[-2]
        array = interleave(array, heads[part]) if part in heads else array
        if array.ndim == 1:
            writer.add_tensor(gguf_name(name), array)
        else:
            writer.add_tensor(gguf_name(name), gguf.quants.quantize(array, kind), raw_dtype=kind)
    for name, array in (extra or {}).items():
        writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _metadata(config, arch: str) -> dict:
    tokens = vocabulary()
    return {
        f"{arch}.embedding_length": config["hidden_size"],
        f"{arch}.feed_forward_length": config["intermediate_size"],
        f"{arch}.block_count": config["num_hidden_layers"],
        f"{arch}.attention.head_count": config["num_attention_heads"],
        f"{arch}.attention.head_count_kv": config["num_key_value_heads"],
        f"{arch}.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        f"{arch}.rope.freq_base": config["rope_theta"],
        f"{arch}.context_length": config["max_position_embeddings"],
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3 if token in SPECIAL else 1 for token in tokens],
        "tokenizer.ggml.merges": [" ".join(pair) for pair in MERGES],
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": config["bos_token_id"],
        "tokenizer.ggml.eos_token_id": config["eos_token_id"],
        "tokenizer.chat_template": TEMPLATE,
    }


def write_tokenizer(folder: Path) -> None:
    """The same tokenizer as `write_gguf` describes, in Hugging Face's files."""
    backend = Tokenizer(models.BPE({token: i for i, token in enumerate(vocabulary())}, MERGES))
    digits, words = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([digits, words])
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    backend.save(str(folder / "tokenizer.json"))
    config = {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def write_folder(folder: Path, named, config=CONFIG, *, shards: int = 1) -> Path:
    """A Hugging Face folder; with `shards` above one, tensors are dealt out in turn and indexed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    write_tokenizer(folder)
    if shards == 1:
        save_file(named, folder / "model.safetensors")
        return folder
    files = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    where = {name: files[i % shards] for i, name in enumerate(named)}
    for file in files:
        save_file({name: array for name, array in named.items() if where[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    return folder


def write_hub_cache(cache: Path, repo_id: str, named, config=CONFIG) -> Path:
    """What huggingface_hub leaves behind after a download."""
    repository, revision = cache / f"models--{repo_id.replace('/', '--')}", "0123456789abcdef0123456789abcdef01234567"
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(revision)
    return write_folder(repository / "snapshots" / revision, named, config)
