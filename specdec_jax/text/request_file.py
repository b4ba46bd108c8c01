"""A file of requests: one JSON object per line, each checked separately, so that an invalid one stops no other."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from specdec_jax.decoding.state import fresh_state
from specdec_jax.ranges import ranges_of, shortened
from specdec_jax.strategy import nearest
from specdec_jax.text.generation import Generation, Request, prepare
from specdec_jax.text.json_lines import json_text, json_value
from specdec_jax.text.pair import Pair
from specdec_jax.text.prompt_file import ID_KEYS, TEXT_KEYS, prompt_of
from specdec_jax.text.sampling_params import SamplingParams

SAMPLING = (*ranges_of(SamplingParams), "stop")
HYPERPARAMETERS = ("policy", "verifier")
FIELDS = (*TEXT_KEYS, "system", *ID_KEYS, "category", "split", *SAMPLING, *HYPERPARAMETERS)
COUNTS = ("num_rounds", "num_draft_tokens", "num_accepted_tokens")
LOG_PROBS = ("log_probs", "warped_log_probs", "tempered_log_probs")


def read_line(line: bytes) -> dict[str, Any]:
    """The JSON object of a line, its fields not yet checked. Raises ValueError for anything else."""
    fields = json_value(line)
    if not isinstance(fields, dict):
        raise ValueError(f"expected an object, got {type(fields).__name__}")
    return fields


def check_fields(fields: Mapping[str, Any]) -> None:
    """Raises ValueError for unknown fields, values of a wrong type, and a missing prompt."""
    for name in fields:
        if name not in FIELDS:
            raise ValueError(f"no field {shortened(name)}{nearest(name, FIELDS)}")
    stop, several = fields.get("stop", []), isinstance(fields.get("prompt"), list)
    for index, message in enumerate((fields["prompt"] or [None]) if several else ()):
        if not isinstance(message, dict) or set(message) != {"role", "content"}:
            raise ValueError(f"message {index} of the prompt must have role and content, got {shortened(message)}")
    turns = prompt_of({**fields, **({"prompt": "messages"} if several else {})}).turns
    if len(turns) > 1 or len(fields.keys() & set(TEXT_KEYS)) > 1:
        raise ValueError(f"a request has one text, in one of {', '.join(TEXT_KEYS)}")
    texts = [text for message in fields["prompt"] for text in message.values()] if several else [*turns]
    texts += [fields["system"]] if "system" in fields else []
    for text in [*texts, *(stop if isinstance(stop, list) else [stop])]:
        if not isinstance(text, str):
            raise ValueError(f"messages, system and stop must be text, got {shortened(text)}")
        if any("\ud800" <= character <= "\udfff" for character in text):
            raise ValueError(f"{shortened(text)} is not valid Unicode: it has half a surrogate pair")
    for kind in HYPERPARAMETERS:
        if not isinstance(fields.get(kind, {}), dict):
            raise ValueError(f"{kind} must be an object of hyperparameters, got {shortened(fields[kind])}")
    SamplingParams(**{name: fields[name] for name in SAMPLING if name in fields})


def request_of(pair: Pair, fields: Mapping[str, Any], sampling: SamplingParams, number: int, **options: Any) -> Request:
    """The checked request of a line's fields; `number` counts the requests of the file from 0.

    Missing fields have the values of `sampling`, with seed + `number`, and of `options`, those of `prepare`. The prompt
    is read as in files of prompts (`prompt_file`), of a single turn, or `prompt` has messages with role and content;
    `policy` and `verifier` are objects of hyperparameters. Raises ValueError: invalid fields.
    """
    check_fields(fields)
    changes = {name: fields[name] for name in SAMPLING if name in fields}
    changes.setdefault("seed", (sampling.seed + number) % 2**32)
    sampling = dataclasses.replace(sampling, **changes)
    prompts = [fields["prompt"]] if isinstance(fields.get("prompt"), list) else prompt_of(fields).turns
    options |= {"system": fields["system"]} if "system" in fields else {}
    request = prepare(pair, prompts, sampling, **options)
    for kind in HYPERPARAMETERS:
        name = f"{kind}_hyperparameters"
        if kind in fields:
            request.options[name] = {**request.options.get(name, {}), **fields[kind]}
    fresh_state(pair.decoder.parts, request.prompts, **request.options)
    return request


def result_line(number: int, fields: Mapping[str, Any], result: Generation, with_tokens: bool) -> bytes:
    """A line of the output: line number, id, text, finish reason, requested fields, and counts; no times."""
    counts = {name: result.statistics[name] for name in COUNTS}
    text = {"text": result.text, "finish_reason": result.finish_reason}
    tokens = {"tokens": result.tokens} if with_tokens else {}
    log_probs = {name: values for name in LOG_PROBS if (values := getattr(result, name)) is not None}
    sizes = {"num_prompt_tokens": len(result.prompt_tokens), "num_tokens": len(result.tokens)}
    return _line(number, fields, {**text, **tokens, **log_probs, **sizes, **counts})


def error_line(number: int, fields: Mapping[str, Any], error: Exception) -> bytes:
    """A line of the output for an invalid request."""
    return _line(number, fields, {"error": " ".join(str(error).split())})


def _line(number: int, fields: Mapping[str, Any], content: Mapping[str, Any]) -> bytes:
    ids = [fields[key] for key in ID_KEYS if isinstance(fields.get(key), (str, int, float))]
    named = {"line": number, **({"id": ids[0]} if ids else {}), **content}
    # a lone surrogate has no UTF-8 encoding and is written as a JSON escape
    return json_text(named).encode("utf-8", "backslashreplace") + b"\n"
