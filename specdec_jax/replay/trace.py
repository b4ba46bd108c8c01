"""A trace: all data that stopping policies read in a lossless run, also for longer drafts than were made.

For every position t along the emitted text y: the statistics of the drafter's distribution, the bit A_t (whether the
drafter's token, if drafted here, would have been accepted as y_t), and, if A_t is 0, the token that would have been
rejected with the drafter's own continuation after it, the tail. A round replayed from t accepts until the first A = 0
or until it stops, and reads its drafts beyond from that tail; every position is used by one round. With A_t ~
Bernoulli(min(1, q / p)) of y_t and the rejected token drawn from max(q - p, 0) this is exact in distribution for
rejection sampling and every stopping policy; in greedy decoding it is exact round by round.

The drafts of a drafter that reads its target also depend on where the round began. Its trace has a chain for every
position: the drafts of a round that begins there, along y while accepted and the drafter's own continuation after it.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.loading.new_folder import replacing
from specdec_jax.text.json_lines import json_text

FORMAT = 1
FEATURES = ("entropy", "max_prob", "margin", "raw_entropy", "raw_max_prob", "log_q")
"""The last axis of `path` and `tails`: fields of a Distribution (nats, probabilities), and log q of the token."""


class Trace(NamedTuple):
    """N texts of up to T tokens, tails of K. Position t of a text is before token t of its answer; T + 1 positions."""

    path: np.ndarray
    # [N, T+1, F] float32, the drafter's distributions along the text; log_q is that of the text's own token
    accepted: np.ndarray  # [N, T+1] bool, A_t; False at and beyond the text's end
    tail_of: np.ndarray  # [N, T+1] int32, row of `tails` where not accepted; 0 elsewhere
    tails: np.ndarray  # [R, K, F] float32; entry 0 repeats the distribution at t, with log_q of the rejected token
    length: np.ndarray  # [N] int32, number of emitted tokens, including the stop token
    limit: np.ndarray  # [N] int32, maximum number of tokens
    prompt_length: np.ndarray  # [N] int32
    seed: np.ndarray  # [N] uint32, each request's seed
    temperature: np.ndarray  # [N] float32
    tokens: np.ndarray  # [N, T] int32, the answers
    overlap: np.ndarray  # [N, T+1] float32, sum of min(p, q): the acceptance rate; NaN beyond the end
    cross_entropy: np.ndarray
    # [N, T+1] float32, nats, of the drafter's distribution against the target's raw one; NaN beyond
    target_entropy: np.ndarray  # [N, T+1] float32, nats, of the target's sampled distribution; NaN beyond the end
    raw_target_entropy: np.ndarray
    # [N, T+1] float32, nats, of the target's distribution at temperature 1 without truncation; NaN beyond the end
    about: dict[str, Any]  # models, warp, seed, versions; `ids` and `tasks` name the texts
    chains: np.ndarray | None = None
    # [N, T+1, K, F] float32, for a drafter that reads its target: the drafts of a round that begins at t
    run: np.ndarray | None = None  # [N, T+1] int32, number of accepted drafts of that chain
    candidate: np.ndarray | None = None
    # [N, T+1] int8, which of the drafter's candidates is the text's token if its first is rejected (with chains: at the
    # chain's first rejected draft): 1 the second, 2 the third ..., 0 none (chains.py)
    truncation: np.ndarray | None = None  # [N, 3] float32, top-k, top-p and min-p; None: not recorded
    prompt_hash: np.ndarray | None = None
    # [N] uint32, the other half of each request's key (`sampling.prompt_hashes`); None: not recorded, replayed as 0

    @property
    def num_texts(self) -> int:
        return len(self.length)

    @property
    def max_draft_length(self) -> int:
        """K, the longest draft that can be replayed."""
        return self.tails.shape[1]

    @property
    def lengths_only(self) -> bool:
        """Whether the trace has accepted lengths but no distributions (a log of another engine)."""
        return self.run is not None and self.chains is None

    def accepted_runs(self) -> np.ndarray:
        """[N, T+1], number of accepted drafts of a round that begins at each position and drafts to the end."""
        if self.run is not None:
            return self.run
        run = np.zeros(self.accepted.shape, np.int64)
        for at in range(run.shape[1] - 2, -1, -1):  # nothing is accepted at the last position
            run[:, at] = np.where(self.accepted[:, at], run[:, at + 1] + 1, 0)
        return run

    @property
    def num_positions(self) -> int:
        """Number of emitted tokens of all texts."""
        return int(self.length.sum())


OPTIONAL = ("chains", "run", "candidate", "truncation", "prompt_hash")
TRUNCATIONS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}  # values that disable them, in the order of `truncation`
WHOLE = ("tail_of", "length", "limit", "prompt_length", "seed", "tokens", "run", "candidate", "prompt_hash")
KINDS = {"accepted": "b", **dict.fromkeys(WHOLE, "iu")}
KINDS |= {name: "f" for name in Trace._fields if name not in (*KINDS, "about")}
"""The allowed kinds (numpy's dtype.kind) of each array."""
NAMES = ("ids", "tasks")  # entries of `about` with one name per text
PER_TEXT = tuple(name for name in Trace._fields if name not in ("tails", "about"))


def _per_text(trace: Trace) -> list[str]:
    """The names of the trace's fields with one entry per text."""
    return [name for name in PER_TEXT if getattr(trace, name) is not None]


def select(trace: Trace, texts: Sequence[int] | np.ndarray) -> Trace:
    """The given texts of a trace, in that order; tails are shared with it. Raises ValueError: no text is left."""
    chosen = np.asarray(texts, np.int64)
    if chosen.size == 0:
        raise ValueError("a trace needs at least one text, and none is selected")
    fields: dict[str, Any] = {name: getattr(trace, name)[chosen] for name in _per_text(trace)}
    named = {key: [trace.about[key][index] for index in chosen] for key in NAMES if key in trace.about}
    return trace._replace(**fields, about=trace.about | named)


def join(traces: Sequence[Trace]) -> Trace:
    """Concatenates the texts of traces of the same run. `about` is the first one's, with all ids and tasks.

    Raises ValueError: no traces, or different numbers of positions, tail lengths or fields.
    """
    shapes = {(trace.path.shape[1:], trace.tails.shape[1:], *_per_text(trace)) for trace in traces}
    if len(shapes) != 1:
        raise ValueError("only traces of one number of tokens, one tail length and the same fields can be joined")
    before = np.cumsum([0, *(len(trace.tails) for trace in traces[:-1])])
    names = _per_text(traces[0])
    fields: dict[str, Any] = {name: np.concatenate([getattr(trace, name) for trace in traces]) for name in names}
    shifted = [trace.tail_of + np.int32(offset) for trace, offset in zip(traces, before, strict=True)]
    fields["tail_of"] = np.concatenate(shifted)
    about = traces[0].about
    named = {key: [entry for trace in traces for entry in trace.about[key]] for key in NAMES if key in about}
    return Trace(**fields, tails=np.concatenate([trace.tails for trace in traces]), about=about | named)


def save_trace(path: str | Path, trace: Trace) -> None:
    """Writes a compressed .npz atomically. Raises OSError: it cannot be written; the message names the file."""
    arrays = {name: value for name, value in trace._asdict().items() if name != "about" and value is not None}
    manifest = {"format": FORMAT, "features": FEATURES, "about": trace.about}
    with replacing(path) as temporary, open(temporary, "wb") as file:
        np.savez_compressed(file, manifest=np.array(json_text(manifest)), **arrays)


def load_trace(path: str | Path) -> Trace:
    """Reads and checks a trace in the format of docs/traces.md, as written by `save_trace`.

    Raises:
        FileNotFoundError: no such file.
        ValueError: not a trace, another format, a damaged or inconsistent file; the message names the file.
    """
    path = Path(path)
    if not path.is_file():
        raise FileNotFoundError(f"no trace {str(path)!r}; python -m experiments.record writes one")
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        manifest = json.loads(str(arrays.pop("manifest")))
        form, features, about = manifest.get("format"), list(manifest.get("features", ())), manifest.get("about")
    except Exception as error:  # numpy, zipfile and zlib raise various errors for a damaged file
        raise ValueError(f"{path} is not a trace: {type(error).__name__}: {error}") from None
    if form != FORMAT:
        raise ValueError(f"{path} is a trace of format {form}, this version reads {FORMAT} (docs/traces.md)")
    if features != list(FEATURES):
        raise ValueError(f"{path} has the features {features}, a trace has {list(FEATURES)}")
    missing = set(Trace._fields) - {"about", *OPTIONAL} - set(arrays)
    if missing:
        raise ValueError(f"{path} lacks {', '.join(sorted(missing))}")
    fields: dict[str, Any] = {name: arrays.get(name) for name in Trace._fields if name != "about"}
    trace, texts = Trace(**fields, about=about), len(np.atleast_1d(fields["length"]))  # type: ignore[arg-type]
    # Older versions have the truncation in `about`, and no hashes.
    warp = about.get("warp") if isinstance(about, dict) else None
    numbers = [warp.get(name, off) for name, off in TRUNCATIONS.items()] if isinstance(warp, dict) else [None]
    if trace.truncation is None and all(isinstance(number, (int, float)) for number in numbers):
        trace = trace._replace(truncation=np.tile(np.array(numbers, np.float32), (texts, 1)))
    if trace.prompt_hash is None:
        trace = trace._replace(prompt_hash=np.zeros(texts, np.uint32))
    if problem := check(trace):
        raise ValueError(f"{path} is no consistent trace: {problem}")
    return trace


def check(trace: Trace) -> str:
    """A description of what is wrong with a trace, or an empty string."""
    if trace.accepted.ndim != 2 or trace.tails.ndim != 3:
        return f"accepted has shape {trace.accepted.shape}, tails has shape {trace.tails.shape}"
    texts, positions = trace.accepted.shape
    shapes: dict[str, tuple[int, ...]] = {
        "path": (texts, positions, len(FEATURES)),
        "tails": (*trace.tails.shape[:2], len(FEATURES)),
        "tokens": (texts, positions - 1),
        "chains": (texts, positions, trace.max_draft_length, len(FEATURES)),
        "truncation": (texts, len(TRUNCATIONS)),
        **dict.fromkeys(("length", "limit", "prompt_length", "seed", "temperature", "prompt_hash"), (texts,)),
    }
    for name, kinds in KINDS.items():
        array, shape = getattr(trace, name), shapes.get(name, (texts, positions))
        if array is not None and array.shape != shape:
            return f"{name} has shape {array.shape}, expected {shape}"
        if array is not None and array.dtype.kind not in kinds:
            return f"{name} holds {array.dtype}"
    if not isinstance(trace.about, dict):
        return f"about must be an object, got {trace.about!r}"
    for name in NAMES:
        names = trace.about.get(name)
        if name in trace.about and not (isinstance(names, list) and len(names) == trace.num_texts):
            return f"about has {name} {names!r} for {trace.num_texts} texts"
    if not isinstance(warp := trace.about.get("warp") or {}, dict):
        return f"about has a warp that is no object: {warp!r}"
    for name, off in TRUNCATIONS.items():
        if not isinstance(number := warp.get(name, off), (int, float)):
            return f"about has a warp whose {name} is no number: {number!r}"
    if (trace.chains is None) != (trace.run is None):
        return "it has one of chains and run without the other"
    at, length = np.arange(positions)[None, :], trace.length[:, None]
    within, tail_of = at <= length, trace.tail_of[(at <= length) & ~trace.accepted]
    run: Any = trace.accepted if trace.run is None else trace.run
    chains = 0.0 if trace.chains is None else trace.chains[..., :5][within]
    candidate = 0 if trace.candidate is None else trace.candidate
    truncation = np.array([[0, 1, 0]]) if trace.truncation is None else trace.truncation
    top_k, top_p, min_p = truncation.T
    statistics = trace.path[..., :5][within], trace.tails[..., :5]
    problems = {
        "a text is empty or longer than its limit": (length < 1)
        | (length > np.minimum(trace.limit[:, None], positions - 1)),
        "something is accepted beyond the end of a text": trace.accepted & (at >= length),
        "a rejected position has no tail": (tail_of < 0) | (tail_of >= max(len(trace.tails), 1)),
        "a statistic of the distributions is not a number": [not np.all(np.isfinite(each)) for each in statistics],
        "a raw entropy of the target is not a number": ~np.isfinite(trace.raw_target_entropy[within]),
        "a token is negative, or a prompt is empty": [np.any(trace.tokens < 0), np.any(trace.prompt_length < 1)],
        "a temperature is negative or not a number": ~(np.isfinite(trace.temperature) & (trace.temperature >= 0)),
        "a truncation is out of range": ~((top_k >= 0) & (top_p > 0) & (top_p <= 1) & (min_p >= 0) & (min_p <= 1)),
        "candidate holds what is no candidate": candidate < 0,
        "a chain and its first draft disagree on whether that is accepted": (run > 0) != trace.accepted,
        "a statistic of a chain is not a number": ~np.isfinite(chains),
    }
    return next((problem for problem, wrong in problems.items() if np.any(wrong)), "")
