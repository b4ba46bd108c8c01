"""Does the target's hidden state foretell acceptance better than the drafter's own distribution does?

Question:  What is the log-loss of the best guess at acceptance from the drafter's entropy and confidence, from what the
           target's layers left at the last verified position, and from both?
Command:   python -m experiments.acceptance_signals --data runs/distill-smollm2-reading/data
Time:      thirty minutes on 2 busy cores; --positions 10000 --steps 200 for a first look
Expected:  0.447 nats greedy and 0.478 at 0.7 from the drafter, and at most 0.006 and 0.001 gained by what the target
           left (docs/survival.md); 0.03 would be worth an input of the survival rule
Output:    runs/acceptance_signals-<time>/ with manifest.json, results.jsonl (a line a guess) and table.md

`--data` is what experiments.distill wrote with `hidden_layers`. Positions are those before the tokens of answers, as
the first drafts of rounds are. What the drafter sees there is computed here; acceptance is sum min(p, q) at the
temperature, or agreement at 0. Guesses are logistic regressions and small networks, fitted on some kinds of
conversation and judged on the others, in turns; intervals are over conversations. What the target left is fitted on top
of the guess from the drafter, from zero: where it tells nothing, nothing is lost.
"""

import functools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console

from experiments.lib.cells import WORDS, interval, markdown
from experiments.lib.commands import command
from experiments.lib.options import Output, Served, check_least
from experiments.lib.run_folder import RunFolder
from experiments.lib.terminal import publish
from specdec_jax.decoding.sampling import distribution, make_warp
from specdec_jax.distillation.shards import Shard, ShardFolder
from specdec_jax.distillation.writing import BY_ASSISTANT
from specdec_jax.loading import LoadedModel
from specdec_jax.metrics.intervals import Interval, mean_interval
from specdec_jax.text.sampling_params import check_sampling

OWN = ("entropy", "max_prob", "margin")  # what rules see of the drafter's distribution
ROW = 512  # positions of a conversation in one pass; longer ones are cut
FLOOR = 1e-4
DECAYS = (1e-2, 1.0, 30.0)  # of weights, tried in turn


class Positions(NamedTuple):
    """M positions before tokens of answers."""

    own: np.ndarray  # [M, 3] float32, of OWN: square root of the entropy, logits of the probability and the margin
    hidden: np.ndarray  # [M, F, D] float32, the target's at the last verified position, each layer normed
    accepted: np.ndarray  # [M] float32, chance of acceptance
    conversation: np.ndarray  # [M] int64
    kind: np.ndarray  # [M] int64, of the conversation


class Guess(NamedTuple):
    """A signal and what guesses from it lose, nats a position, held out."""

    signal: str
    loss: Interval
    gain: Interval | None  # over the drafter's own, the same guesser; None: it is that


@dataclass(frozen=True)
class AcceptanceSignals(Output, Served):
    """Guess acceptance from the drafter, from the target, and from both."""

    data: Path = Path("runs/distill-smollm2-reading/data")
    """Token shards with hidden states."""
    temperatures: tuple[float, ...] = (0.0, 0.7)
    """Of both models."""
    positions: int = 20_000
    """Positions at most."""
    folds: int = 4
    """Parts that kinds of conversation are divided into."""
    hidden_units: int = 32
    """Of the small network."""
    steps: int = 400
    """Of fitting a guesser."""


def acceptance_signals(config: AcceptanceSignals, console: Console) -> None:
    """Measures and writes the run folder. Raises ValueError, FileNotFoundError: bad input."""
    check_least(config, 1, "positions", "hidden_units", "steps")
    check_least(config, 2, "folds")
    check_sampling(config)
    layers, shards = _shards(config.data)
    _, drafter = config.load(console)
    folder = RunFolder.create("acceptance_signals", config, config.out)
    parts = []
    for temperature in config.temperatures:
        with console.status(f"Temperature {temperature:g}: what the drafter sees"):
            seen = gather(drafter, shards, temperature, config.positions)
        floor = mean_interval(_by_conversation(_entropy(seen.accepted), seen))
        rows = [["the acceptance itself", "", interval(floor, ".3f", WORDS), ""]]
        for name, units in (("logistic", 0), ("network", config.hidden_units)):
            with console.status(f"Temperature {temperature:g}: {name}"):
                found = guesses(seen, layers, config.folds, units, config.steps)
            for guess in found:
                gain = "" if guess.gain is None else interval(guess.gain, ".3f", WORDS)
                rows.append([guess.signal, name, interval(guess.loss, ".3f", WORDS), gain])
                line = {"temperature": temperature, "signal": guess.signal, "guesser": name}
                folder.append(line | {"loss": guess.loss._asdict(), "gain": guess.gain and guess.gain._asdict()})
        count = f"{len(seen.accepted):,} positions of {len(np.unique(seen.conversation)):,} conversations"
        mean = f"mean acceptance {seen.accepted.mean():.3f}"
        heads = ["guessed from", "guesser", "log-loss", "gain over the drafter's own"]
        parts.append(f"**Temperature {temperature:g}**: {count}, {mean}\n\n{markdown(heads, rows)}")
    publish(folder, "\n\n".join(parts) + "\n", console)


def _shards(path: Path) -> tuple[list[int], list[Shard]]:
    """The layers stored, and the shards."""
    if not path.is_dir():
        raise FileNotFoundError(f"no folder of token shards at {path}")
    folder = ShardFolder(path)
    stored = {tuple(entry.get("layers", ())) if "hidden" in entry else () for entry in folder.entries}
    if len(stored) != 1 or () in stored:
        raise ValueError(
            f"{path} holds no hidden states of one set of layers: experiments.distill --stage label adds them"
        )
    return list(stored.pop()), [folder.load(index, check=False) for index in range(len(folder.entries))]


def gather(drafter: LoadedModel, shards: list[Shard], temperature: float, most: int) -> Positions:
    """Positions of whole conversations, every shard's in turn, until there are `most`."""
    found: list[Positions] = []
    total = 0
    for number, (shard, index) in enumerate(_conversations(shards)):
        if total >= most:
            break
        start, stop = shard.offsets[index], min(shard.offsets[index + 1], shard.offsets[index] + ROW)
        at = (
            np.flatnonzero(shard.writer[start + 2 : stop] == BY_ASSISTANT) + start + 1
        )  # the token before the one asked
        if not len(at):
            continue
        own, accepted = _beside(drafter, shard, start, stop, temperature)
        hidden = np.asarray(shard.hidden[start:stop][at - 1 - start], np.float32)
        hidden /= np.sqrt(np.mean(hidden**2, axis=-1, keepdims=True) + 1e-6)
        kind = np.full(len(at), _number(shard.kinds[shard.kind[index]]))
        found.append(Positions(own[at - start], hidden, accepted[at - start], np.full(len(at), number), kind))
        total += len(at)
    if not found:
        raise ValueError("there are no answers in the data")
    return Positions(*(np.concatenate(leaves) for leaves in zip(*found, strict=True)))


def _conversations(shards: list[Shard]) -> Iterator[tuple[Shard, int]]:
    """One conversation of every shard in turn, so that few positions hold all kinds."""
    for index in range(max(len(shard.kind) for shard in shards)):
        yield from ((shard, index) for shard in shards if index < len(shard.kind))


@functools.lru_cache(maxsize=1024)
def _number(kind: str) -> int:
    return int.from_bytes(kind.encode()[:7], "big")


def _beside(
    drafter: LoadedModel, shard: Shard, start: int, stop: int, temperature: float
) -> tuple[np.ndarray, np.ndarray]:
    """(what rules see [T, 3], chance of acceptance [T]) after each token of a conversation."""
    size = stop - start
    tokens = np.zeros((1, ROW), np.int32)
    tokens[0, :size] = shard.tokens[start:stop]
    top, log_prob = np.zeros((ROW, shard.top.shape[1]), np.int32), np.zeros((ROW, shard.top.shape[1]), np.float32)
    top[:size], log_prob[:size] = shard.top[start:stop], shard.log_prob[start:stop]
    own, accepted = _program(drafter.model, float(temperature))(drafter.params, tokens, top, log_prob)
    return np.asarray(own)[:size], np.asarray(accepted)[:size]


@functools.lru_cache(maxsize=8)
def _program(model: Any, temperature: float) -> Any:
    def beside(params: Any, tokens: Any, top: Any, log_prob: Any) -> tuple[Any, Any]:
        logits, _ = model.apply(params, tokens, model.init_cache(params, *tokens.shape))
        seen = distribution(logits[0], make_warp(ROW, temperature))
        q = jnp.exp(jnp.take_along_axis(seen.log_prob, top, axis=1))
        rest = jnp.log(jnp.maximum(1.0 - jnp.sum(jnp.exp(log_prob), axis=1, keepdims=True), 1e-6))
        sharp = jnp.concatenate([log_prob, rest], axis=1) / (temperature or 1.0)
        p = jax.nn.softmax(sharp, axis=1)[:, :-1]  # the rest as one token: at 0.7 it is next to nothing
        overlap = jnp.sum(jnp.minimum(p, q), axis=1)
        agrees = (seen.top_token == top[:, 0]).astype(jnp.float32)
        own = jnp.stack([jnp.sqrt(seen.entropy), _logit(seen.max_prob), _logit(seen.margin)], axis=1)
        return own, agrees if temperature == 0 else overlap

    return jax.jit(beside)


def _logit(share: Any) -> Any:
    share = jnp.clip(share, FLOOR, 1 - FLOOR)
    return jnp.log(share) - jnp.log1p(-share)


def guesses(seen: Positions, layers: list[int], folds: int, units: int, steps: int) -> list[Guess]:
    """Guesses from the drafter, from each layer of the target, from all layers, and from both."""
    every = seen.hidden.reshape(len(seen.own), -1)
    left = {f"layer {layer}": seen.hidden[:, i] for i, layer in enumerate(layers)} | {"all layers": every}
    nothing = every[:, :0]
    signals = {"the drafter's distribution": (seen.own, nothing)}
    signals |= {f"the target's {name}": (nothing, hidden) for name, hidden in left.items()}
    signals |= {f"the drafter and {name}": (seen.own, hidden) for name, hidden in left.items()}
    losses = {name: _held_out(*columns, seen, folds, units, steps) for name, columns in signals.items()}
    own, found = losses["the drafter's distribution"], []
    for name, loss in losses.items():
        gain = None if loss is own else mean_interval(own - loss)
        found.append(Guess(name, mean_interval(loss), gain))
    return found


def _held_out(own: np.ndarray, hidden: np.ndarray, seen: Positions, folds: int, units: int, steps: int) -> np.ndarray:
    """Mean log-loss of each conversation, guessed by who was fitted without its kind: from `own`, then both on top."""
    kinds = np.unique(seen.kind)
    if len(kinds) < folds:
        raise ValueError(f"{folds} folds need as many kinds of conversation, the data has {len(kinds)}")
    part = np.random.default_rng(0).permutation(len(kinds)) % folds
    fold = part[np.searchsorted(kinds, seen.kind)]
    loss = np.zeros(len(own))
    for index in range(folds):
        out = fold == index
        logit = np.zeros(len(own), np.float32)
        for columns in (own if own.shape[1] else hidden, np.hstack([own, hidden])):  # all are fitted twice
            mean, spread = columns[~out].mean(axis=0), columns[~out].std(axis=0) + 1e-6
            logit = fitted(((columns - mean) / spread).astype(np.float32), seen.accepted, logit, ~out, units, steps)
        loss[out] = _log_loss(logit[out], seen.accepted[out])
    return _by_conversation(loss, seen)


def fitted(
    columns: np.ndarray, accepted: np.ndarray, base: np.ndarray, chosen: np.ndarray, units: int, steps: int
) -> np.ndarray:
    """Logits [M]: `base` and what a guesser adds from `columns` [M, C], fitted at the positions `chosen` [M] bool.

    A logistic regression, and beside it a network of `units`. A tenth of the chosen, the last ones, chooses among
    strengths of decay and moments to stop, the beginning among them: nothing is then added.
    """
    where = np.flatnonzero(chosen)
    fit, check = np.split(where, [len(where) - max(1, len(where) // 10)])
    least, best = float(np.mean(_log_loss(base[check], accepted[check]))), base
    for decay in DECAYS:
        for params in _moments(columns[fit], accepted[fit], base[fit], units, steps, decay):
            loss = float(np.mean(_log_loss(_logits(params, columns[check], base[check]), accepted[check])))
            if loss < least:
                least, best = loss, np.asarray(_logits(params, columns, base))
    return best


def _moments(
    columns: np.ndarray, accepted: np.ndarray, base: np.ndarray, units: int, steps: int, decay: float
) -> Iterator[Any]:
    """The guesser's parameters at some moments of fitting."""
    rng, width = np.random.default_rng(0), columns.shape[1]
    params: dict[str, Any] = {"weight": np.zeros(width, np.float32), "bias": np.zeros((), np.float32)}
    if units:
        first = rng.normal(0, width**-0.5, (width, units)).astype(np.float32)
        params |= {"first": first, "first_bias": np.zeros(units, np.float32), "last": np.zeros(units, np.float32)}
    update, begin = _fitting(steps, decay)
    state, size = begin(params), min(1024, len(columns))
    for step in range(1, steps + 1):
        batch = rng.integers(0, len(columns), size)
        params, state = update(params, state, columns[batch], accepted[batch], base[batch])
        if step % 50 == 0 or step == steps:
            yield params


def _log_loss(logit: Any, accepted: np.ndarray) -> np.ndarray:
    logit = np.asarray(logit, np.float64)
    return np.logaddexp(0.0, logit) - accepted * logit


@functools.lru_cache(maxsize=8)
def _fitting(steps: int, decay: float) -> tuple[Any, Any]:
    chain = optax.adamw(optax.cosine_decay_schedule(1e-2, steps), weight_decay=decay)

    def loss(params: Any, columns: Any, accepted: Any, base: Any) -> Any:
        logit = _logits(params, columns, base)
        return jnp.mean(jnp.logaddexp(0.0, logit) - accepted * logit)

    def update(params: Any, state: Any, *given: Any) -> tuple[Any, Any]:
        with jax.numpy_dtype_promotion("standard"):
            updates, state = chain.update(jax.grad(loss)(params, *given), state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(update), chain.init


@jax.jit
def _logits(params: Any, columns: Any, base: Any) -> Any:
    logit = base + columns @ params["weight"] + params["bias"]
    if "first" in params:
        logit += jax.nn.relu(columns @ params["first"] + params["first_bias"][None, :]) @ params["last"]
    return logit


def _entropy(share: np.ndarray) -> np.ndarray:
    """What the true chance itself loses, [M] nats."""
    share = np.clip(share.astype(np.float64), 1e-9, 1 - 1e-9)
    return -(share * np.log(share) + (1 - share) * np.log1p(-share))


def _by_conversation(values: np.ndarray, seen: Positions) -> np.ndarray:
    """Means over conversations' positions."""
    _, index = np.unique(seen.conversation, return_inverse=True)
    return np.bincount(index, weights=values) / np.bincount(index)


main = command(AcceptanceSignals, acceptance_signals, __doc__)

if __name__ == "__main__":
    sys.exit(main())
