"""A model and its tokenizer as one GGUF file, as llama.cpp's `convert_hf_to_gguf.py` writes it.

Quantisation is the `gguf` package's, which has the simple types and none of the K-quants. GGUF states a tokenizer by
lists and the name of a pre-tokenizer. Whatever it cannot state (normalisers, tokens that swallow adjacent space, a
pre-tokenizer without a name) is refused: the file would load and encode otherwise.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specdec_jax.loading.families import family_of
from specdec_jax.loading.gguf.architectures import NUMBERS, Architecture, architecture_for
from specdec_jax.loading.gguf.rope_scaling import ROPE_FREQUENCIES, divisors
from specdec_jax.loading.gguf.sentencepiece import KINDS, NORMAL, UNUSED, check_stated, sentencepiece_entries
from specdec_jax.loading.gguf.tokenizer import (
    BYTE_LEVEL,
    CHAT_TEMPLATE,
    CONTROL,
    DIGIT_BY_DIGIT,
    NAMES,
    NORMALISED,
    PATTERNS,
    TOOL_TEMPLATE,
    USER_DEFINED,
    WHOLE_WORDS_FIRST,
    pre_tokenizer,
)
from specdec_jax.loading.suggest import listed, nearest
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.models.reduced_head import check_whole

FILE_TYPES = {
    "F32": gguf.LlamaFileType.ALL_F32,
    "F16": gguf.LlamaFileType.MOSTLY_F16,
    "BF16": gguf.LlamaFileType.MOSTLY_BF16,
    "Q8_0": gguf.LlamaFileType.MOSTLY_Q8_0,
    "Q5_1": gguf.LlamaFileType.MOSTLY_Q5_1,
    "Q5_0": gguf.LlamaFileType.MOSTLY_Q5_0,
    "Q4_1": gguf.LlamaFileType.MOSTLY_Q4_1,
    "Q4_0": gguf.LlamaFileType.MOSTLY_Q4_0,
}
POSITIONS = "position_embd.weight"
ROLES = {"bos_token": "bos", "unk_token": "unknown", "pad_token": "padding"}  # the end depends on the model too
ENDS = ("eos", "eot", "eom")
SWALLOWING = ("single_word", "lstrip", "rstrip")
UNSTATED = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
NFC = {"type": "NFC"}


def save_gguf(
    path: str | Path,
    config: Any,
    params: Any,
    tokenizer: Tokenizer,
    *,
    kind: str = "Q8_0",
    overwrite: bool = False,
) -> None:
    """Writes a GGUF that `load_model`, transformers and llama.cpp read, complete or not at all.

    The families are those of `architectures.NUMBERS`. Matrices are stored as `kind` (a name of `FILE_TYPES`), vectors
    and learned positions as float32. A matrix whose rows do not divide into the kind's blocks (of 32) is stored as F16.
    Gemma's norms are stored with one added, so that what is below that sum's precision in float32 is lost. Tokens are
    written with the file: see `tokenizer_metadata`. transformers ignores the biases and the rope scaling of a llama
    file; llama.cpp and `load_model` obey both.

    Raises FileExistsError unless `overwrite` (and always for a folder), ValueError for an unknown kind, a config of
    another family, parameters that do not fit it, and settings or a tokenizer that GGUF cannot state.
    """
    check_whole(params)
    if kind not in FILE_TYPES:
        raise ValueError(
            f"unknown GGUF kind {kind!r}{nearest(str(kind), FILE_TYPES)}; there are {', '.join(FILE_TYPES)}"
        )
    name, architecture = architecture_for(config)
    with _new_file(Path(path), overwrite) as temporary, closing(gguf.GGUFWriter(temporary, name)) as writer:
        metadata = _hyperparameters(name, config, kind)
        metadata |= tokenizer_metadata(tokenizer, config.vocab_size, config.eos_token_ids, config.bos_token_id)
        tensors = _tensors(architecture, config, params)
        for entry, value in metadata.items():
            _add(writer, entry, value)
        for stored, (array, _) in tensors.items():
            as_kind = _stored_kind(stored, array, kind)
            shape = gguf.quants.quant_shape_to_byte_shape(array.shape, as_kind)
            writer.add_tensor_info(stored, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=as_kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        for stored, (array, part) in tensors.items():  # one at a time: `add_tensor` would keep the whole file in memory
            values = architecture.to_file(array, part, heads_of(config))
            writer.write_tensor_data(gguf.quants.quantize(values, _stored_kind(stored, array, kind)))


def heads_of(config: Any) -> dict[str, int]:
    """Heads of the matrices that have rows of heads."""
    return {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}


def _tensors(architecture: Architecture, config: Any, params: Any) -> dict[str, tuple[np.ndarray, str]]:
    """GGUF's name -> (the tensor in Hugging Face's order of rows, what it is called in every layer)."""
    tensors = {}
    for name, array in family_of(config).named_from_params(config, params).items():
        stored, part = architecture.stored_name(name)
        tensors[stored] = architecture.turn(array, part), part
    if (extra := divisors(config)) is not None:
        tensors[ROPE_FREQUENCIES] = extra, ""
    return tensors


def _stored_kind(stored: str, array: np.ndarray, kind: str) -> Kind:
    if array.ndim == 1 or stored == POSITIONS:
        return Kind.F32
    return Kind.F16 if array.shape[-1] % gguf.GGML_QUANT_SIZES[Kind[kind]][0] else Kind[kind]


def _hyperparameters(name: str, config: Any, kind: str) -> dict[str, Any]:
    c = config
    numbers = {
        "vocab_size": c.vocab_size,
        "context_length": c.max_position_embeddings,
        "embedding_length": c.hidden_size,
        "feed_forward_length": c.intermediate_size,
        "block_count": c.num_hidden_layers,
        "attention.head_count": c.num_attention_heads,
    } | NUMBERS[name](c)
    quantised = {"general.quantization_version": gguf.GGML_QUANT_VERSION} if kind.startswith("Q") else {}
    general = {"general.type": "model", "general.file_type": int(FILE_TYPES[kind]), **quantised}
    return general | {f"{name}.{entry}": value for entry, value in numbers.items()}


def _add(writer: gguf.GGUFWriter, name: str, value: Any) -> None:
    if isinstance(value, list):
        writer.add_array(name, value)
        return
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string}
    add[type(value)](name, value)


@contextmanager
def _new_file(path: Path, overwrite: bool) -> Iterator[Path]:
    """A temporary name beside `path`, renamed to it when the block ends well and removed when it does not."""
    if path.is_dir() or (path.exists() and not overwrite):
        raise FileExistsError(f"{path} exists already{' and is a folder' if path.is_dir() else ''}")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.parent / f".{path.name}.{os.getpid()}.new"
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def tokenizer_metadata(tokenizer: Tokenizer, rows: int, eos_ids: tuple[int, ...], bos: int | None) -> dict[str, Any]:
    """Every `tokenizer.*` entry of the file, for a model with `rows` embeddings.

    llama.cpp takes the number of tokens for the number of embeddings, so rows without a token are listed as unused
    tokens `[PAD<id>]`, as its converter does. `eos_ids` and `bos` are the model's; empty and None leave it to the
    tokenizer. Raises ValueError for what GGUF cannot state.
    """
    state = json.loads(tokenizer.backend.to_str())
    _check_added(state)
    tokens, kinds = _tokens(tokenizer, state["added_tokens"], rows)
    by_score = state["model"]["type"] == "BPE" and state["model"]["byte_fallback"]
    words = sentencepiece_entries(state, tokens, kinds) if by_score else _byte_level(state) | {KINDS: kinds}
    ids = {name: _id(tokenizer, role) for role, name in ROLES.items() if role in tokenizer.special}
    ids = ({} if bos is None else {"bos": bos}) | ids | _ends(tokenizer, eos_ids)
    tools = tokenizer.tool_template
    return words | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.add_bos_token": _adds_bos(tokenizer),
        **{f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in ids.items()},
        **({CHAT_TEMPLATE: tokenizer.chat_template} if tokenizer.chat_template else {}),
        **({"tokenizer.chat_templates": ["tool_use"], TOOL_TEMPLATE: tools} if tools else {}),
    }


def pre_tokenizer_name(state: Any, ignore_merges: bool, normalizer: Any = None) -> str:
    """llama.cpp's name for a pre-tokenizer and a normalizer given as in tokenizer.json.

    `ignore_merges` is the BPE model's, which GGUF states by the same name. Raises ValueError when none fits.
    """
    given = _comparable(state)
    kinds = [kind for kind in NAMES if given == _comparable(_state_of(pre_tokenizer(kind)))]
    fitting = [name for kind in kinds for name in NAMES[kind] if (name in WHOLE_WORDS_FIRST) == ignore_merges]
    if not fitting:
        raise ValueError(
            f"GGUF has no name for this pre-tokenizer (with ignore_merges {ignore_merges}): {json.dumps(state)}; "
            f"there are those of {listed(names[0] for names in NAMES.values())}"
        )
    for name in fitting:
        if normalizer == (NFC if name in NORMALISED else None):
            return name
    raise ValueError(f"a GGUF file cannot state the tokenizer's normalizer {json.dumps(normalizer)}")


def _state_of(made: Any) -> Any:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = made
    return json.loads(backend.to_str())["pre_tokenizer"]


def _comparable(state: Any) -> Any:
    """Without what concerns offsets alone, and with one spelling for `every digit apart`, which has two."""
    if not isinstance(state, dict):
        return state
    if state == {"type": "Digits", "individual_digits": True}:
        state = _state_of(pre_tokenizers.Split(Regex(str(PATTERNS[DIGIT_BY_DIGIT])), "isolated"))
    inner = [_comparable(part) for part in state.get("pretokenizers", ())]
    kept = {name: value for name, value in state.items() if name not in ("trim_offsets", "pretokenizers")}
    return kept | ({"pretokenizers": inner} if inner else {})


def _byte_level(state: dict[str, Any]) -> dict[str, Any]:
    """Of byte-level BPE. Raises ValueError for whatever of it changes ids or text and has no place in GGUF."""
    model, decoder = state["model"], state["decoder"] or {}
    if model["type"] != "BPE":
        known = "byte-level BPE and SentencePiece's BPE"
        raise ValueError(f"the tokenizer is {model['type']}; {known} are what can be written to a GGUF file")
    found = {f"model.{name}": model[name] for name in UNSTATED if model.get(name)}
    if decoder.get("type") != "ByteLevel":
        found["decoder"] = state["decoder"]
    if model.get("unk_token") and not model["vocab"].keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
        found["model.unk_token"] = model["unk_token"]  # with every byte in the vocabulary it never comes up
    check_stated(found)
    return {
        "tokenizer.ggml.model": BYTE_LEVEL,
        "tokenizer.ggml.pre": pre_tokenizer_name(state["pre_tokenizer"], model["ignore_merges"], state["normalizer"]),
        "tokenizer.ggml.merges": [_merge(pair) for pair in model["merges"]],
    }


def _check_added(state: dict[str, Any]) -> None:
    check_stated(
        {
            f"{name} of {token['content']!r}": True
            for token in state["added_tokens"]
            for name in SWALLOWING
            if token[name]
        }
    )


def _tokens(tokenizer: Tokenizer, added: list[dict[str, Any]], rows: int) -> tuple[list[str], list[int]]:
    """Token and type by id, one each for every row."""
    by_id = {id_: token for token, id_ in tokenizer.vocabulary().items()}
    if max(by_id, default=-1) >= rows:
        raise ValueError(f"token {max(by_id)} ({by_id[max(by_id)]!r}) has no embedding: the model has {rows}")
    kinds = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in added}
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(rows)]
    if len(set(tokens)) != rows:
        raise ValueError("the vocabulary has tokens named [PAD<id>], which rows without a token are called in GGUF")
    return tokens, [kinds.get(i, NORMAL) if i in by_id else UNUSED for i in range(rows)]


def _merge(pair: Any) -> str:
    """Both halves with a space between; tokenizer.json had them so itself before it had lists."""
    merge = pair if isinstance(pair, str) else " ".join(pair)
    if merge.count(" ") != 1:
        raise ValueError(f"merge {pair!r} has a token with a space in it, which GGUF cannot state")
    return merge


def _id(tokenizer: Tokenizer, role: str) -> int:
    id_ = tokenizer.backend.token_to_id(tokenizer.special[role])
    if id_ is None:
        raise ValueError(f"the tokenizer's {role} {tokenizer.special[role]!r} is not in its vocabulary")
    return id_


def _ends(tokenizer: Tokenizer, eos_ids: tuple[int, ...]) -> dict[str, int]:
    """End of sequence, turn and message. The tokenizer's own comes first, as templates read it back as eos_token."""
    own = (_id(tokenizer, "eos_token"),) if "eos_token" in tokenizer.special else ()
    if own and eos_ids and own[0] not in eos_ids:
        raise ValueError(
            f"the tokenizer's eos_token has id {own[0]} and the model ends with {eos_ids}: GGUF has one for both"
        )
    ends = tuple(dict.fromkeys(own + eos_ids))
    if len(ends) > len(ENDS):
        raise ValueError(f"the model ends with any of {ends}; GGUF has place for {len(ENDS)}")
    return dict(zip(ENDS, ends, strict=False))


def _adds_bos(tokenizer: Tokenizer) -> bool:
    """Asked of the tokenizer itself: post-processors that say the same come in several forms."""
    plain, special = tokenizer.encode("a"), tokenizer.encode("a", add_special=True)
    if plain == special:
        return False
    if special != [tokenizer.bos_id, *plain]:
        added = [tokenizer.backend.id_to_token(i) for i in special]
        raise ValueError(f"the tokenizer makes {added} of 'a'; GGUF can state a beginning of sequence and no more")
    return True
