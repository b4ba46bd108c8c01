"""A tokenizer from GGUF metadata: byte-level BPE with the pre-tokenizer by its name, or SentencePiece's pieces.

transformers is not usable: without torch it does not read GGUF, and with torch it builds every `gpt2` tokenizer with
GPT-2's pre-tokenizer, so that two spaces before a digit get tokens that differ from training. The table of names
follows llama.cpp's `llama-vocab.cpp`.

SentencePiece's BPE (Llama 2's, Gemma's) merges the two neighbours whose union has the highest score, and so does
llama.cpp (`llm_tokenizer_spm`). For `tokenizers` the merges are all splits of every piece in two, by its score.
"""

from typing import Any

import numpy as np
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from specdec_jax.loading.gguf.reader import GGUF
from specdec_jax.loading.tokenizer import Tokenizer

SPACE = "▁"
NORMAL = 1  # value of tokenizer.ggml.token_type
SCORES, KINDS, ADD_PREFIX = (f"tokenizer.ggml.{name}" for name in ("scores", "token_type", "add_space_prefix"))


def sentencepiece_backend(file: GGUF, tokens: list[str], vocabulary: dict[str, int]) -> Backend:
    """Pieces merged by score, characters without a piece as bytes, spaces as `▁`.

    Raises ValueError naming the file: missing scores or types, lists of another length.
    """
    for name in (SCORES, KINDS):
        if (values := file.metadata.get(name)) is None:
            raise ValueError(f"{file.path} lacks {name}, without which its tokenizer cannot be rebuilt")
        if len(values) != len(tokens):
            raise ValueError(f"{file.path} has {len(values)} of {name} for {len(tokens)} tokens")
    scores, kinds = np.asarray(file.metadata[SCORES]), np.asarray(file.metadata[KINDS])
    pieces = {tokens[i]: float(scores[i]) for i in np.flatnonzero(kinds == NORMAL)}
    unknown = file.metadata.get("tokenizer.ggml.unknown_token_id")
    unk = tokens[int(unknown)] if unknown is not None and int(unknown) < len(tokens) else None
    model: Any = models.BPE(vocabulary, merges(pieces), unk_token=unk, fuse_unk=True, byte_fallback=True)
    backend: Any = Backend(model)
    prefix = bool(file.metadata.get(ADD_PREFIX, True))
    backend.normalizer = normalizer(prefix)
    backend.decoder = decoder(prefix)
    return backend


def merges(pieces: dict[str, float]) -> list[tuple[str, str]]:
    """All pairs of pieces whose union is a piece, highest score first."""
    ranked = [
        (score, piece[:i], piece[i:])
        for piece, score in pieces.items()
        for i in range(1, len(piece))
        if piece[:i] in pieces and piece[i:] in pieces
    ]
    ranked.sort(key=lambda merge: merge[0], reverse=True)
    return [(left, right) for _, left, right in ranked]


def normalizer(prefix: bool) -> Any:
    """Replaces spaces by `▁`, with a prefix for models trained with one."""
    replace = normalizers.Replace(" ", SPACE)
    return normalizers.Sequence([normalizers.Prepend(SPACE), replace]) if prefix else replace


def decoder(prefix: bool) -> Any:
    """The inverse: bytes become characters, and the prefix is removed."""
    steps = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if prefix else steps)


BYTE_LEVEL, SENTENCEPIECE = "gpt2", "llama"  # values of tokenizer.ggml.model
ADDED = UNKNOWN, CONTROL, USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type
CHAT_TEMPLATE, TOOL_TEMPLATE = "tokenizer.chat_template", "tokenizer.chat_template.tool_use"
ROLES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}  # names in the metadata
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"


def _words(digits: str) -> str:
    """GPT-4's pattern, which Llama 3 and Qwen 2 share except for the number of grouped digits."""
    return (
        CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )


GPT2, DIGIT_BY_DIGIT = "gpt-2", "digit by digit"
PATTERNS = {GPT2: None, DIGIT_BY_DIGIT: r"\p{N}", "llama 3": _words(r"\p{N}{1,3}"), "qwen 2": _words(r"\p{N}")}
NAMES = {
    GPT2: ("gpt-2", "phi-2", "mpt", "olmo", "jais", "trillion", "granite-docling", "gigachat", "roberta-bpe"),
    DIGIT_BY_DIGIT: ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"),
    "llama 3": ("llama-bpe", "llama3", "llama-v3", "falcon3", "dbrx", "smaug-bpe", "glm4", "chatglm-bpe"),
    "qwen 2": ("qwen2", "deepseek-r1-qwen", "stablelm2", "megrez", "hunyuan"),
}
PRE_TOKENIZERS = {name: kind for kind, names in NAMES.items() for name in names}
WHOLE_WORDS_FIRST = ("llama-bpe", "llama3", "llama-v3", "falcon3")  # words in the vocabulary are not split
NORMALISED = ("qwen2",)  # Qwen's tokenizer.json has NFC, which has no GGUF entry and is omitted by llama.cpp
ADD_BOS = ("llama-bpe", "llama3", "llama-v3", "falcon3")  # default if the file has no entry


def tokenizer_from_gguf(file: GGUF) -> Tokenizer:
    """The file's tokenizer with its chat template.

    Raises ValueError naming the file: a tokenizer other than byte-level BPE and SentencePiece's, an unknown
    pre-tokenizer, missing or contradictory lists.
    """
    metadata = file.metadata
    kind, name = (metadata.get(f"tokenizer.ggml.{entry}") for entry in ("model", "pre"))
    if kind not in (BYTE_LEVEL, SENTENCEPIECE):
        problem = "has no tokenizer" if kind is None else f"has a tokenizer of kind {kind!r}"
        raise ValueError(
            f"{file.path} {problem}; byte-level BPE ({BYTE_LEVEL!r}) and SentencePiece ({SENTENCEPIECE!r}) are what "
            "can be rebuilt from a GGUF file. Load the Hugging Face folder of the model, which has a tokenizer.json"
        )
    if kind == BYTE_LEVEL and name not in PRE_TOKENIZERS:
        raise ValueError(f"{file.path} has pre-tokenizer {name!r}; known are {', '.join(sorted(PRE_TOKENIZERS))}")
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise ValueError(f"{file.path} lacks the vocabulary, tokenizer.ggml.tokens")
    vocabulary = {token: i for i, token in enumerate(tokens)}
    if len(vocabulary) != len(tokens):
        raise ValueError(f"{file.path}: {len(tokens) - len(vocabulary)} tokens of its vocabulary come twice")
    backend = _byte_level(file, vocabulary) if kind == BYTE_LEVEL else sentencepiece_backend(file, tokens, vocabulary)
    if (kinds := metadata.get(KINDS)) is not None:
        if len(kinds) != len(tokens):
            raise ValueError(f"{file.path} has {len(kinds)} token types for {len(tokens)} tokens")
        added = [(token, kind) for token, kind in zip(tokens, kinds.tolist(), strict=True) if kind in ADDED]
        backend.add_tokens([AddedToken(token, special=kind != USER_DEFINED, normalized=False) for token, kind in added])
    ids = {role: metadata.get(f"tokenizer.ggml.{name}_token_id") for role, name in ROLES.items()}
    special = {f"{role}_token": tokens[int(i)] for role, i in ids.items() if i is not None and int(i) < len(tokens)}
    adds = metadata.get("tokenizer.ggml.add_bos_token", kind == SENTENCEPIECE or name in ADD_BOS)
    if adds and "bos_token" in special:
        bos = special["bos_token"]
        template = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=[(bos, backend.token_to_id(bos))])
        backend.post_processor = template  # pyright: ignore[reportAttributeAccessIssue]
    chat, tools = metadata.get(CHAT_TEMPLATE), metadata.get(TOOL_TEMPLATE)
    return Tokenizer(backend, special, chat_template=chat, tool_template=tools)


def pre_tokenizer(kind: str) -> Any:
    """Splits text into words, then writes them in GPT-2's byte alphabet."""
    pattern = PATTERNS[kind]
    if pattern is None:
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    split = pre_tokenizers.Split(Regex(pattern), "isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == DIGIT_BY_DIGIT)
    return pre_tokenizers.Sequence([split, bytes_])


def _byte_level(file: GGUF, vocabulary: dict[str, int]) -> Backend:
    name = file.metadata["tokenizer.ggml.pre"]
    merges: Any = [tuple(merge.split(" ")) for merge in file.metadata.get("tokenizer.ggml.merges", ()) if merge]
    try:
        backend: Any = Backend(models.BPE(vocabulary, merges, ignore_merges=name in WHOLE_WORDS_FIRST))
    except Exception as error:  # the Rust side raises bare Exception
        raise ValueError(f"{file.path}: its merges do not fit its vocabulary ({error})") from None
    backend.normalizer = normalizers.NFC() if name in NORMALISED else None
    backend.pre_tokenizer = pre_tokenizer(PRE_TOKENIZERS[name])
    backend.decoder = decoders.ByteLevel()
    return backend
