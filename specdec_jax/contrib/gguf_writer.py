"""A model and its tokenizer as one GGUF file, as llama.cpp's `convert_hf_to_gguf.py` writes it.

Quantisation is the `gguf` package's, which has the simple types and none of the K-quants. GGUF states a tokenizer by
lists and the name of a pre-tokenizer. Whatever it cannot state (normalisers, tokens that swallow adjacent space, a
pre-tokenizer without a name) is refused: the file would load and encode otherwise.
"""

import itertools
import json
import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Kind
from tokenizers import Regex, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from specdec_jax.drafters.draft_models.reduced_head import check_whole
from specdec_jax.loading.families import family_of
from specdec_jax.loading.gguf import architectures
from specdec_jax.loading.gguf.architectures import ARCHITECTURES, READING, WINDOW, Architecture
from specdec_jax.loading.gguf.file import LLAMA3_SCALINGS, ROPE_FREQUENCIES
from specdec_jax.loading.gguf.tokenizer import (
    ADD_PREFIX,
    BYTE_LEVEL,
    CHAT_TEMPLATE,
    CONTROL,
    DIGIT_BY_DIGIT,
    KINDS,
    NAMES,
    NORMAL,
    NORMALISED,
    PATTERNS,
    SCORES,
    SENTENCEPIECE,
    TOOL_TEMPLATE,
    USER_DEFINED,
    WHOLE_WORDS_FIRST,
    decoder,
    merges,
    normalizer,
    pre_tokenizer,
)
from specdec_jax.loading.new_folder import replacing
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.models.config import FULL, SLIDING
from specdec_jax.models.rope import inverse_frequencies, rope_type
from specdec_jax.strategy import nearest

FILE_TYPES = {"F32": gguf.LlamaFileType.ALL_F32} | {
    kind: gguf.LlamaFileType[f"MOSTLY_{kind}"] for kind in ("F16", "BF16", "Q8_0", "Q5_1", "Q5_0", "Q4_1", "Q4_0")
}
POSITIONS = "position_embd.weight"
ROLES = {"bos_token": "bos", "unk_token": "unknown", "pad_token": "padding"}  # the end depends on the model too
ENDS = ("eos", "eot", "eom")  # of sequence, turn and message
SWALLOWING = ("single_word", "lstrip", "rstrip")
UNSTATED = ("dropout", "continuing_subword_prefix", "end_of_word_suffix")
UNUSED, BYTE = 5, 6  # values of tokenizer.ggml.token_type
BYTES = frozenset(f"<0x{byte:02X}>" for byte in range(256))
NO_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
"""Gemma's pre-tokenizer, which finds no space where the normalizer has left none."""


def _all_global(c: Any) -> dict[str, Any]:
    return {"layer_kinds": (FULL,) * c.num_hidden_layers}


def _gemma(name: str, c: Any) -> dict[str, Any]:
    return {
        "hidden_act": "gelu_pytorch_tanh",
        "attention_bias": False,
        "query_pre_attn_scalar": architectures.query_scale(name, vars(c)),
    }


IMPLIED: Mapping[str, Callable[[Any], dict[str, Any]]] = {
    "llama": lambda c: {"hidden_act": "silu"},
    READING: lambda c: {"hidden_act": "silu"},
    "qwen2": lambda c: {"hidden_act": "silu", "head_dim": c.hidden_size // c.num_attention_heads} | _all_global(c),
    "qwen3": lambda c: {"hidden_act": "silu", "attention_bias": False} | _all_global(c),
    "gemma2": lambda c: {"tie_word_embeddings": True} | _gemma("gemma2", c),
    "gemma3": lambda c: _gemma("gemma3", c),
    "gpt2": lambda c: {"hidden_act": "gelu_new", "scale_attn_weights": True},
}
"""By architecture that is written: what its files mean without an entry (llama.cpp derives it or takes it for granted;
of Qwen 3's biases it does not read the output's)."""


def save_gguf(
    path: str | Path, config: Any, params: Any, tokenizer: Tokenizer, *, kind: str = "Q8_0", overwrite: bool = False
) -> None:
    """Writes a GGUF that `load_model`, transformers and llama.cpp read, complete or not at all.

    The architectures are those of `IMPLIED`. Matrices are stored as `kind` (a name of `FILE_TYPES`), vectors and
    learned positions as float32. A matrix whose rows do not divide into the kind's blocks (of 32) is stored as F16.
    Gemma's norms are stored with one added, so that what is below that sum's precision in float32 is lost. Tokens are
    written with the file: see `tokenizer_metadata`. transformers ignores the biases and the rope scaling of a llama
    file; llama.cpp and `load_model` obey both.

    Raises FileExistsError unless `overwrite` (and always for a folder), ValueError for an unknown kind, a config of
    another family, parameters that do not fit it, and settings or a tokenizer that GGUF cannot state.
    """
    check_whole(params)
    if kind not in FILE_TYPES:
        raise ValueError(f"unknown GGUF kind {kind!r}{nearest(str(kind), FILE_TYPES)}")
    written = {ARCHITECTURES[name].model_type: name for name in IMPLIED}
    name = written.get(type(config).__module__.rpartition(".")[2])
    if name is None:
        families = ", ".join(sorted(written))
        raise ValueError(f"only models of family {families} are written as GGUF, got a {type(config).__name__}")
    path, architecture = Path(path), ARCHITECTURES[name]
    if path.is_dir() or (path.exists() and not overwrite):
        raise FileExistsError(f"{path} exists already{' and is a folder' if path.is_dir() else ''}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary, closing(gguf.GGUFWriter(temporary, name)) as writer:
        metadata = _hyperparameters(name, architecture, config, kind)
        metadata |= tokenizer_metadata(tokenizer, config.vocab_size, config.eos_token_ids, config.bos_token_id)
        tensors = _tensors(architecture, config, params, kind)
        add = {list: writer.add_array, bool: writer.add_bool, str: writer.add_string}
        add |= {int: writer.add_uint32, float: writer.add_float32}
        for entry, value in metadata.items():
            add[type(value)](entry, value)
        for stored, (array, _, as_kind) in tensors.items():
            shape = gguf.quants.quant_shape_to_byte_shape(array.shape, as_kind)
            writer.add_tensor_info(stored, shape, np.dtype(np.uint8), math.prod(shape), raw_dtype=as_kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_ti_data_to_file()
        heads = {"attn_q": config.num_attention_heads, "attn_k": config.num_key_value_heads}
        for array, part, as_kind in tensors.values():  # one at a time: `add_tensor` would keep the whole file in memory
            array = array.astype(np.float32)  # in the file's order: the inverse of `Architecture.from_file`
            if architecture.interleaved and part in heads:
                array = array.reshape(heads[part], 2, -1, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)
            elif part.endswith("norm") and architecture.norm_offset:
                array = array + np.float32(architecture.norm_offset)
            writer.write_tensor_data(gguf.quants.quantize(np.ascontiguousarray(array), as_kind))


def _tensors(
    architecture: Architecture, config: Any, params: Any, kind: str
) -> dict[str, tuple[np.ndarray, str, Kind]]:
    """GGUF's name -> (the tensor in Hugging Face's order of rows, its name in every layer, what it is stored as)."""
    blocks = (f"blk.{i}.{part}" for i in range(config.num_hidden_layers) for part in architecture.in_a_layer)
    names = [f"{stem}.{end}" for stem in (*architecture.outside, *blocks) for end in ("weight", "bias")]
    stored_names: dict[str, str] = {architecture.hugging_face_name(stored)[0]: stored for stored in names}
    tensors = {}
    for name, array in family_of(config).named_from_params(config, params).items():
        stored = stored_names.get(str(name), str(name))
        _, part = architecture.hugging_face_name(stored)
        array = architecture.turn(array, part)
        in_blocks = Kind.F16 if array.shape[-1] % gguf.GGML_QUANT_SIZES[Kind[kind]][0] else Kind[kind]
        tensors[stored] = array, part, Kind.F32 if array.ndim == 1 or stored == POSITIONS else in_blocks
    if rope_type(getattr(config, "rope_scaling", None)) == "llama3":
        plain = inverse_frequencies(config.head_dim, config.rope_theta, None)
        scaled = inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling)
        tensors[ROPE_FREQUENCIES] = plain / scaled, "", Kind.F32
    return tensors


def _hyperparameters(name: str, architecture: Architecture, c: Any, kind: str) -> dict[str, Any]:
    """Raises ValueError for a config that no file of the architecture can state."""
    for field, value in IMPLIED[name](c).items():
        if (actual := getattr(c, field)) != value:
            raise ValueError(f"a GGUF file cannot state {c.key(field)} {actual!r}: it means {value!r}")
    local = [layer == SLIDING for layer in c.layer_kinds]
    if name == "gemma2" and not any(local):
        raise ValueError("a GGUF file of architecture gemma2 cannot state that no layer has a window")
    numbers: dict[str, Any] = {"vocab_size": c.vocab_size}
    for stored, field, type_, default in (*architectures.EVERY, *architecture.numbers):
        value = getattr(c, field)
        if value is None and default != 0:
            raise ValueError(f"a GGUF file of architecture {name} cannot state that {field} is none")
        if value is not None and (stored != WINDOW or any(local)):
            numbers[stored] = type_(value)
    if "rope.freq_base" in numbers:
        numbers["rope.dimension_count"] = c.head_dim
        scaling, scaled_as = c.rope_scaling, rope_type(c.rope_scaling)
        if scaled_as == "linear":
            numbers |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling["factor"])}
        elif scaled_as != "default" and not any(each.items() <= scaling.items() for each in LLAMA3_SCALINGS):
            # Llama 3's published ones need no metadata; any other would be lost to every reader but llama.cpp.
            raise ValueError(f"a GGUF file cannot state the rope scaling {scaling}")
        if name not in ("llama", READING) or c.head_dim * c.num_attention_heads != c.hidden_size:
            numbers |= {"attention.key_length": c.head_dim, "attention.value_length": c.head_dim}
    if WINDOW in numbers and local != architectures.has_window(len(local), architectures.GLOBAL_EVERY[name]):
        numbers[architectures.PATTERN] = local
    quantised = {"general.quantization_version": gguf.GGML_QUANT_VERSION} if kind.startswith("Q") else {}
    general = {"general.type": "model", "general.file_type": int(FILE_TYPES[kind]), **quantised}
    return general | {f"{name}.{entry}": value for entry, value in numbers.items()}


def tokenizer_metadata(tokenizer: Tokenizer, rows: int, eos_ids: tuple[int, ...], bos: int | None) -> dict[str, Any]:
    """Every `tokenizer.*` entry of the file, for a model with `rows` embeddings.

    llama.cpp takes the number of tokens for the number of embeddings, so rows without a token are listed as unused
    tokens `[PAD<id>]`, as its converter does. `eos_ids` and `bos` are the model's; empty and None leave it to the
    tokenizer. Raises ValueError for what GGUF cannot state.
    """
    state = json.loads(tokenizer.backend.to_str())
    swallowing = [(token["content"], name) for token in state["added_tokens"] for name in SWALLOWING if token[name]]
    _check_stated({f"{name} of {content!r}": True for content, name in swallowing})
    by_id = {id_: token for token, id_ in tokenizer.vocabulary().items()}
    if max(by_id, default=-1) >= rows:
        raise ValueError(f"token {max(by_id)} ({by_id[max(by_id)]!r}) has no embedding: the model has {rows}")
    tokens = [by_id.get(i, f"[PAD{i}]") for i in range(rows)]
    if len(set(tokens)) != rows:
        raise ValueError("the vocabulary has tokens named [PAD<id>], which rows without a token are called in GGUF")
    added = {token["id"]: CONTROL if token["special"] else USER_DEFINED for token in state["added_tokens"]}
    kinds = [added.get(i, NORMAL) if i in by_id else UNUSED for i in range(rows)]
    by_score = state["model"]["type"] == "BPE" and state["model"]["byte_fallback"]
    words = _sentencepiece(state, tokens, kinds) if by_score else _byte_level(state) | {KINDS: kinds}
    ids = {name: _id(tokenizer, role) for role, name in ROLES.items() if role in tokenizer.special}
    # The tokenizer's own end of sequence comes first, as templates read it back as eos_token.
    eos = (_id(tokenizer, "eos_token"),) if "eos_token" in tokenizer.special else ()
    if eos and eos_ids and eos[0] not in eos_ids:
        raise ValueError(
            f"the tokenizer's eos_token has id {eos[0]} and the model ends with {eos_ids}: GGUF has one for both"
        )
    ends = tuple(dict.fromkeys(eos + eos_ids))
    if len(ends) > len(ENDS):
        raise ValueError(f"the model ends with any of {ends}; GGUF has place for {len(ENDS)}")
    ids = ({} if bos is None else {"bos": bos}) | ids | dict(zip(ENDS, ends, strict=False))
    # Probed: post-processors that say the same come in several forms.
    plain, special = tokenizer.encode("a"), tokenizer.encode("a", add_special=True)
    if special not in (plain, [tokenizer.bos_id, *plain]):
        made = [tokenizer.backend.id_to_token(i) for i in special]
        raise ValueError(f"the tokenizer makes {made} of 'a'; GGUF can state a beginning of sequence and no more")
    tools = tokenizer.tool_template
    return words | {
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.add_bos_token": special != plain,
        **{f"tokenizer.ggml.{name}_token_id": id_ for name, id_ in ids.items()},
        **({CHAT_TEMPLATE: tokenizer.chat_template} if tokenizer.chat_template else {}),
        **({"tokenizer.chat_templates": ["tool_use"], TOOL_TEMPLATE: tools} if tools else {}),
    }


def pre_tokenizer_name(state: Any, ignore_merges: bool, normalizer: Any = None) -> str:
    """llama.cpp's name for a pre-tokenizer and a normalizer given as in tokenizer.json.

    `ignore_merges` is the BPE model's, which GGUF states by the same name. Raises ValueError when none fits.
    """
    states = {kind: _state_of(pre_tokenizer=pre_tokenizer(kind))["pre_tokenizer"] for kind in NAMES}
    kinds = [kind for kind in NAMES if _comparable(state) == _comparable(states[kind])]
    fitting = [name for kind in kinds for name in NAMES[kind] if (name in WHOLE_WORDS_FIRST) == ignore_merges]
    if not fitting:
        raise ValueError(
            f"GGUF has no name for this pre-tokenizer (with ignore_merges {ignore_merges}): {json.dumps(state)}; "
            f"there are those of {', '.join(sorted(names[0] for names in NAMES.values()))}"
        )
    for name in fitting:
        if normalizer == ({"type": "NFC"} if name in NORMALISED else None):
            return name
    raise ValueError(f"a GGUF file cannot state the tokenizer's normalizer {json.dumps(normalizer)}")


def _state_of(**parts: Any) -> dict[str, Any]:
    """A tokenizer of these parts, as tokenizer.json states it."""
    backend = Backend(models.BPE())
    for name, part in parts.items():
        setattr(backend, name, part)
    return json.loads(backend.to_str())


def _comparable(state: Any) -> Any:
    """Without what concerns offsets alone, and with one spelling for `every digit apart`, which has two."""
    if not isinstance(state, dict):
        return state
    if state == {"type": "Digits", "individual_digits": True}:
        digits = pre_tokenizers.Split(Regex(str(PATTERNS[DIGIT_BY_DIGIT])), "isolated")
        state = _state_of(pre_tokenizer=digits)["pre_tokenizer"]
    inner = [_comparable(part) for part in state.get("pretokenizers", ())]
    comparable = {name: value for name, value in state.items() if name not in ("trim_offsets", "pretokenizers")}
    return comparable | ({"pretokenizers": inner} if inner else {})


def _byte_level(state: dict[str, Any]) -> dict[str, Any]:
    """The entries of byte-level BPE. Raises ValueError for what changes ids or text and has no place in GGUF."""
    model, decoder = state["model"], state["decoder"] or {}
    if model["type"] != "BPE":
        kinds = "byte-level BPE and SentencePiece's BPE"
        raise ValueError(f"the tokenizer is {model['type']}; {kinds} are what can be written to a GGUF file")
    lost = {f"model.{name}": model[name] for name in UNSTATED if model.get(name)}
    if decoder.get("type") != "ByteLevel":
        lost["decoder"] = state["decoder"]
    if model.get("unk_token") and not model["vocab"].keys() >= set(pre_tokenizers.ByteLevel.alphabet()):
        lost["model.unk_token"] = model["unk_token"]  # with every byte in the vocabulary it never comes up
    _check_stated(lost)
    return {
        "tokenizer.ggml.model": BYTE_LEVEL,
        "tokenizer.ggml.pre": pre_tokenizer_name(state["pre_tokenizer"], model["ignore_merges"], state["normalizer"]),
        "tokenizer.ggml.merges": [_merge(pair) for pair in model["merges"]] or [""],  # llama.cpp refuses none
    }


def _sentencepiece(state: dict[str, Any], tokens: list[str], kinds: list[int]) -> dict[str, Any]:
    """The entries of a SentencePiece tokenizer. Scores are the order of merges; pieces that nothing makes are unused.

    Raises ValueError for what would be lost, merges by another rule among it.
    """
    model = state["model"]
    prefix = state["normalizer"] == _state_of(normalizer=normalizer(True))["normalizer"]
    stated = _state_of(normalizer=normalizer(prefix), decoder=decoder(prefix))
    lost = {name: state[name] for name in ("normalizer", "decoder") if state[name] != stated[name]}
    lost |= {f"model.{name}": model[name] for name in ("dropout", "ignore_merges") if model[name]}
    if state["pre_tokenizer"] not in (None, NO_SPACES):
        lost["pre_tokenizer"] = state["pre_tokenizer"]
    if missing := BYTES - model["vocab"].keys():
        lost["model.vocab without"] = min(missing)
    _check_stated(lost)
    pairs: list[Any] = [tuple(pair.split(" ")) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    order = {union: -float(rank) for rank, union in enumerate(dict.fromkeys(map("".join, pairs)))}
    pieces = [
        BYTE if token in BYTES else NORMAL if token in order or len(token) == 1 else UNUSED for token in tokens
    ]  # kinds of tokens that are not added ones
    kinds = [piece if kind == NORMAL else kind for piece, kind in zip(pieces, kinds, strict=True)]
    scores = [order.get(token, -float(len(tokens))) for token in tokens]
    scored = {token: score for token, score, kind in zip(tokens, scores, kinds, strict=True) if kind == NORMAL}
    if _by_union(pairs) != _by_union(merges(scored)):
        raise ValueError("a GGUF file cannot state the tokenizer's merges: they are not those of scored pieces")
    return {
        "tokenizer.ggml.model": SENTENCEPIECE,
        "tokenizer.ggml.pre": "default",
        SCORES: scores,
        KINDS: kinds,
        ADD_PREFIX: prefix,
    }


def _by_union(pairs: Iterable[tuple[str, str]]) -> list[tuple[str, set[tuple[str, str]]]]:
    """What merges make, in their order, and the pairs that make it, in any order."""
    return [(union, set(group)) for union, group in itertools.groupby(pairs, "".join)]


def _check_stated(lost: Mapping[str, Any]) -> None:
    """Raises ValueError that names the parts of a tokenizer that have no place in GGUF, if there are any."""
    if lost:
        parts = ", ".join(f"{name} {json.dumps(value)}" for name, value in lost.items())
        raise ValueError(f"a GGUF file cannot state the tokenizer's {parts}")


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
