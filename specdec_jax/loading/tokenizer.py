"""Tokenizers: one class around `tokenizers.Tokenizer`, for all sources.

transformers, for chat templates, is imported on first use: its import takes longer than reading a tokenizer (0.95
instead of 0.35 s), and replays, proofs and plain prompts do not need it.
"""

import copy
import json
import os
import re
import secrets
from collections.abc import Callable, Mapping, Sequence
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend
from tokenizers.decoders import DecodeStream

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

PROBE = "No other text says this."
NO_SYSTEM = "It has no place for a system prompt: put that text before the first message of the user"
ROLES = ("bos_token", "eos_token", "unk_token", "pad_token")
MODEL_CONFIG = "config.json"
TOKENIZER, CONFIG, SPECIAL = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
TEMPLATE, TOOL_TEMPLATE = "chat_template.jinja", "additional_chat_templates/tool_use.jinja"
TOKENIZER_FILES = (TOKENIZER, CONFIG, SPECIAL, TEMPLATE, TOOL_TEMPLATE)
MARK = secrets.token_hex(8)  # unpredictable, so that no message contains it
BYTE_CLASS = "ByT5Tokenizer"  # its name in tokenizer_config.json or config.json
BYTE_SPECIAL = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>"}  # in order of id, from 0
BYTE_SENTINELS = 125
NO_ADVICE = "TRANSFORMERS_NO_ADVISORY_WARNINGS"  # environment variable of transformers


class Tokenizer:
    """A tokenizer with its chat template and the special ids for decoding.

    `special` maps `bos_token`, `eos_token`, ... to their text; `tool_template` is the template for conversations with
    tools, if it differs. `for_model` adapts it to a model's end ids and embedding.
    """

    def __init__(
        self,
        backend: Backend,
        special: Mapping[str, str],
        *,
        chat_template: str | None = None,
        tool_template: str | None = None,
    ):
        backend.no_truncation()
        backend.no_padding()
        self.backend = backend
        self.special = dict(special)
        self.chat_template = chat_template
        self.tool_template = tool_template
        bos, eos = (backend.token_to_id(special[role]) if role in special else None for role in ROLES[:2])
        self.bos_id: int | None = bos
        self.eos_ids: tuple[int, ...] = () if eos is None else (eos,)
        self._rows: int | None = None

    def for_model(self, eos_ids: Sequence[int], rows: int) -> "Tokenizer":
        """A copy with the model's end ids (if it has any) that refuses ids beyond its `rows`."""
        tied = copy.copy(self)
        tied.eos_ids = tuple(eos_ids) or self.eos_ids
        tied._rows = rows
        return tied

    @property
    def vocab_size(self) -> int:
        """Number of tokens, including added ones; a model's embedding may be padded beyond it."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def vocabulary(self) -> dict[str, int]:
        """Token -> id, including added tokens."""
        return self.backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, *, add_special: bool = False) -> list[int]:
        """Token ids. Special tokens in `text` become their ids, in a text of `chat(parse_special=False)` only those of
        the template; `add_special` adds the tokens of the model's post-processor (such as a beginning of sequence).

        Raises ValueError if the text needs a token the model has no embedding for.
        """
        ids = (self._marking if MARK in text else self.backend).encode(text, add_special_tokens=add_special).ids
        if self._rows is not None and ids and max(ids) >= self._rows:
            worst = self.backend.id_to_token(max(ids))
            raise ValueError(f"token {max(ids)} ({worst!r}) has no embedding: the model has {self._rows}")
        return ids

    def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of the ids; invalid UTF-8 becomes U+FFFD, ids of embedding padding are dropped."""
        return self.backend.decode([int(i) for i in ids], skip_special_tokens=skip_special)

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        parse_special: bool = True,
    ) -> str:
        """The conversation in the model's chat format; encode it with `add_special=False`.

        With `parse_special=False`, `encode` reads special tokens in the messages as plain text: if there are any, those
        of the template have a MARK before them.

        `tools` are JSON schemas of functions the model may call, for templates that support them. A system message is
        never moved or omitted: templates without one raise an error, because their behaviour differs by model. Raises
        ValueError if there is no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("this tokenizer has no chat template: give the prompt as plain text")
        fast, special = self.fast, {} if parse_special else self._special
        pattern = re.compile("|".join(map(re.escape, sorted([MARK, *special], key=len, reverse=True))))
        as_written, places = list(messages), {MARK: "\ufffd"} | {word: f"{MARK}{id_}." for word, id_ in special.items()}
        messages = json.loads(pattern.sub(lambda match: places[match[0]], json.dumps(as_written, ensure_ascii=False)))

        def rendered(some: Sequence[Mapping[str, Any]]) -> str:
            options: dict[str, Any] = {"tools": tools, "add_generation_prompt": add_generation_prompt}
            return str(fast.apply_chat_template([dict(message) for message in some], tokenize=False, **options))

        first = messages[0] if messages else {}
        system = first.get("role") == "system"
        try:
            text = rendered(messages)
        except Exception as error:  # templates are third-party programs and may raise any error
            hint = f". {NO_SYSTEM}" if system and _works(rendered, messages[1:]) else ""
            raise ValueError(f"the chat template refuses these messages: {error}{hint}") from None
        other = {**first, "content": f"{first.get('content')} {PROBE}"}
        if system and _works(rendered, [other, *messages[1:]]) == text:
            raise ValueError(f"the chat template leaves out the system prompt. {NO_SYSTEM}")
        if messages == as_written:
            return text
        words = {place: word for word, place in places.items()} | {word: MARK + word for word in special}
        return re.sub(rf"{MARK}\d+\.|{pattern.pattern}", lambda match: words.get(match[0], ""), text)

    @cached_property
    def _special(self) -> dict[str, int]:
        """The ids of special tokens by their text."""
        added = self.backend.get_added_tokens_decoder()
        return {token.content: id_ for id_, token in added.items() if token.special and token.content}

    @cached_property
    def _marking(self) -> Backend:
        """A copy in which the names of special tokens begin with MARK: without it they are plain text."""
        stored, marked = json.loads(self.backend.to_str()), {word: MARK + word for word in self._special}
        for token in stored["added_tokens"]:
            if token["content"] in marked:
                token |= {"content": MARK + token["content"], "normalized": False, "single_word": False}
        model = stored["model"]
        if isinstance(vocabulary := model["vocab"], dict):
            model["vocab"] = {marked.get(word, word): id_ for word, id_ in vocabulary.items()}
            model["unk_token"] = marked.get(model.get("unk_token"), model.get("unk_token"))
        else:
            model["vocab"] = [[marked.get(word, word), score] for word, score in vocabulary]
        if "merges" in model:
            model["merges"] = [pair for pair in model["merges"] if not {*pair, "".join(pair)} & marked.keys()]
        return Backend.from_str(json.dumps(stored))

    @cached_property
    def fast(self) -> "PreTrainedTokenizerFast":
        """transformers' tokenizer around a copy of `backend`, so that both are equal; created on first use."""
        templates: Any = self.chat_template
        if self.chat_template and self.tool_template:
            templates = {"default": self.chat_template, "tool_use": self.tool_template}  # used with tools
        os.environ.setdefault(NO_ADVICE, "1")  # transformers would advise to install PyTorch, which is not needed here
        import transformers

        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=self.backend, chat_template=templates, **self.special
        )

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json, tokenizer_config.json and the chat templates in transformers' format."""
        folder = Path(folder)
        (folder / TOKENIZER).write_text(self.backend.to_str(pretty=False), encoding="utf-8")
        config = {**self.special, "tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
        (folder / CONFIG).write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", "utf-8")
        for name, template in ((TEMPLATE, self.chat_template), (TOOL_TEMPLATE, self.tool_template)):
            if template is not None:
                (folder / name).parent.mkdir(exist_ok=True)
                (folder / name).write_text(template, encoding="utf-8")


class StreamDecoder:
    """Incremental decoding to whole characters: `DecodeStream` of tokenizers with a `flush`.

    `push` returns completed text, `flush` the rest; together they equal `tokenizer.decode` of all tokens, except with a
    byte-fallback tokenizer and bytes that change the decoding of earlier ones. DecodeStream fails in that case; this
    class restarts, and text already returned is kept.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = True):
        self._tokenizer, self._skip = tokenizer, skip_special
        self._begin()

    def push(self, ids: Sequence[int]) -> str:
        """Adds tokens and returns the text that they complete, which may be empty."""
        return "".join([self._step(int(i)) for i in ids])

    def flush(self) -> str:
        """Returns the remaining text, with an incomplete character as U+FFFD, and resets the decoder."""
        rest = self._tokenizer.decode(self._ids, skip_special=self._skip)[self._returned :]
        self._begin()
        return rest

    def _begin(self) -> None:
        self._stream = DecodeStream(skip_special_tokens=self._skip)
        self._ids: list[int] = []
        self._returned = 0  # number of returned characters

    def _step(self, id_: int) -> str:
        try:
            text = self._stream.step(self._tokenizer.backend, id_) or ""
        except Exception:  # the Rust side raises bare Exception, also in later calls
            return self.flush() + self._step(id_)
        self._ids.append(id_)
        self._returned += len(text)
        return text


def tokenizer_from_folder(folder: str | Path) -> Tokenizer:
    """The tokenizer of a Hugging Face folder: tokenizer.json, tokenizer_config.json, chat templates (files before it).

    Raises FileNotFoundError without tokenizer.json, unless it is a byte tokenizer (`needs_file`), and ValueError naming
    a file that cannot be read.
    """
    folder = Path(folder)
    path = folder / TOKENIZER
    if not path.is_file() and needs_file(folder):
        other = [name for name in ("tokenizer.model", "vocab.json", "spiece.model") if (folder / name).exists()]
        hint = f" ({other[0]} is not enough: save it with transformers as a fast tokenizer)" if other else ""
        raise FileNotFoundError(f"{folder} has no tokenizer.json{hint}")
    try:
        backend = Backend.from_file(str(path)) if path.is_file() else None
    except Exception as error:  # the Rust side raises bare Exception
        raise ValueError(f"{path} is damaged: {error}") from None
    config = read_json(folder / SPECIAL) | read_json(folder / CONFIG)
    tokens = {role: config[role] for role in ROLES if config.get(role)}
    special: dict[str, Any] = {
        role: token.get("content") if isinstance(token, Mapping) else token for role, token in tokens.items()
    }
    if wrong := [role for role, text in special.items() if not isinstance(text, str)]:
        raise ValueError(f"{folder / CONFIG} or {SPECIAL}: {wrong[0]} must be a text, got {tokens[wrong[0]]!r}")
    if backend is None:
        special, count = BYTE_SPECIAL | special, config.get("extra_ids")
        sentinels = [f"<extra_id_{index}>" for index in range(BYTE_SENTINELS if count is None else count)]
        if listed := config.get("additional_special_tokens") or config.get("extra_special_tokens"):
            sentinels = [token if isinstance(token, str) else token["content"] for token in listed]
        backend = byte_tokenizer(special, sentinels)
    files, inside = {"default": TEMPLATE, "tool_use": TOOL_TEMPLATE}, config.get("chat_template")
    templates = {name: (folder / file).read_text("utf-8") for name, file in files.items() if (folder / file).is_file()}
    if not templates and inside is not None:
        listed = inside if isinstance(inside, list) else [{"name": "default", "template": inside}]  # several, by name
        pairs = [(entry.get("name"), entry.get("template")) for entry in listed if isinstance(entry, Mapping)]
        if len(pairs) < len(listed) or not all(isinstance(text, str) for pair in pairs for text in pair):
            raise ValueError(f"{folder / CONFIG}: chat_template must be a text, or a list of them with names")
        templates = dict(pairs)
    return Tokenizer(backend, special, chat_template=templates.get("default"), tool_template=templates.get("tool_use"))


def byte_tokenizer(special: Mapping[str, str], sentinels: Sequence[str]) -> Backend:
    """ByT5's tokenizer, which has no file: ids 0 to 2 are special tokens, 3 to 258 bytes, the rest sentinels (arXiv
    2105.13626, section 3.1; transformers' ByT5Tokenizer). Byte-level, so that streams respect characters.
    """
    first = [special.get(role, text) for role, text in BYTE_SPECIAL.items()]
    vocabulary = {text: index for index, text in enumerate(first)}
    vocabulary |= {letter: len(first) + byte for letter, byte in bytes_by_letter().items()}
    tokenizer = Backend(models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, lstrip=True, rstrip=True, normalized=False) for text in first])
    tokenizer.add_special_tokens([AddedToken(text, normalized=False) for text in sentinels])
    end = first[1]
    tokenizer.post_processor = processors.TemplateProcessing(f"$A {end}", special_tokens=[(end, vocabulary[end])])
    return tokenizer


@cache
def bytes_by_letter() -> dict[str, int]:
    """GPT-2's letter for every byte: printable ones are themselves, the others start at U+0100."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


def needs_file(folder: Path) -> bool:
    """Whether a folder's tokenizer is in tokenizer.json: all except ByT5's, which its configs name."""
    configs = read_json(folder / MODEL_CONFIG), read_json(folder / CONFIG)
    return all(config.get("tokenizer_class") != BYTE_CLASS for config in configs)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object, {} if there is no such file. Raises ValueError naming a file with other contents."""
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is damaged: {error}") from None
    if not isinstance(value, dict):
        raise ValueError(f"{path} is damaged: it holds no JSON object")
    return value


def _works(rendered: Callable[[Any], str], messages: Sequence[Mapping[str, Any]]) -> str:
    try:
        return rendered(messages)
    except Exception:  # as above
        return ""
