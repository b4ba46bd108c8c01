"""Advice on drafting from a log or a trace: static lengths, the oracle, thresholds, and other engines' options.

Times are those of a cost model. Intervals are over texts; if a log has open positions, they extend from the lower bound
with all of them rejected to the upper bound with all accepted, and the estimate draws them (`rounds.StepLog`).
"""

import json
from collections.abc import Mapping, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np

from specdec_jax.contrib.engine_logs.readers import Log
from specdec_jax.contrib.engine_logs.rounds import Steps
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.metrics.intervals import Interval, ratio_of_totals
from specdec_jax.replay.replay import Replay, oracle, replay, rounds_of
from specdec_jax.replay.trace import Trace
from specdec_jax.stopping.hf_confidence import hf_confidence
from specdec_jax.stopping.max_confidence import max_confidence
from specdec_jax.types import StoppingPolicy

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(1, 20))


class Choice(NamedTuple):
    """A setting and its speed-up."""

    setting: float  # a draft length, or a threshold
    speedup: Interval  # over plain decoding, of total times
    seconds: np.ndarray  # [N] float64, time of each text


class Advice(NamedTuple):
    """Advice for one batch size. Length 0 is plain decoding."""

    batch: int
    lengths: list[Choice]  # 0, 1, ... to the longest
    best: Choice  # the best of `lengths`
    as_good: list[int]  # lengths that may be as fast as the best
    oracle: Interval  # speed-up without drafts that will be rejected
    curve: list[float]  # for the best length: share of rounds whose first i + 1 drafts are accepted; [] for length 0

    @property
    def verdict(self) -> str:
        """`speculate`, `perhaps`, or `do not speculate`."""
        if self.best.setting == 0:
            return "do not speculate"
        return "speculate" if self.best.speedup.low > 1 else "perhaps"


def advise(log: Log, costs: CostModel, longest: int) -> Advice:
    """The best static length for a log at these costs, up to the longest that both can follow.

    With open positions the best is the length of the highest lower bound among those estimated above plain decoding.

    Raises:
        ValueError: that length is below 1.
    """
    limit = min(longest, costs.widths[-1] - 1, log.low.max_draft_length)
    if limit < 1:
        raise ValueError(f"the longest draft must be at least 1, got {longest}; costs go to {costs.widths[-1] - 1}")
    # traces for the lower bound, the estimate and the upper bound; a single one if no position is open
    traces = [log.likely] if log.exact else [log.low, log.likely, log.high]
    lengths = [Choice(0, Interval(1.0, 1.0, 1.0), log.likely.length * costs.plain_pass)]  # no rounds, plain decoding
    for length in range(1, limit + 1):
        ends = (trace.length[:, None] - np.arange(trace.accepted.shape[1]) - 1 for trace in traces)
        replayed = [rounds_of(trace, np.clip(end, 0, length), limit) for trace, end in zip(traces, ends, strict=True)]
        speedup = _joined([_speedup(each, costs) for each in replayed])
        lengths.append(Choice(length, speedup, replayed[len(replayed) // 2].seconds(costs)[0]))
    if log.exact:
        best = max(lengths, key=lambda choice: choice.speedup.estimate)
        # those whose time over the best one's is not significantly above 1, paired
        near = [each for each in lengths if each is best or not ratio_of_totals(each.seconds, best.seconds).low > 1]
    else:
        faster = [each for each in lengths if each.speedup.estimate > 1]
        best = max(faster, key=lambda choice: choice.speedup.low, default=lengths[0])
        near = [each for each in lengths if each.speedup.high >= best.speedup.low]
    bounds = [_speedup(oracle(trace, limit), costs) for trace in traces]
    length = int(best.setting)
    rounds = [pair for steps in static_rounds(log.likely, length) for pair in zip(*steps[:2], strict=True)]
    accepted = np.array([taken for drafted, taken in rounds if drafted == length])  # not those that an end cut short
    curve = [float(np.mean(accepted > place)) for place in range(length)] if accepted.size else []
    return Advice(costs.batch, lengths, best, [int(choice.setting) for choice in near], _joined(bounds), curve)


def static_rounds(trace: Trace, length: int) -> list[Steps]:
    """The rounds of every text at a static draft length."""
    run, lengths = trace.accepted_runs(), []
    for text, end in enumerate(trace.length.tolist()):
        at, drafted, accepted = 0, [], []
        while at < end:
            drafted.append(min(length, end - at - 1))
            accepted.append(min(int(run[text, at]), drafted[-1]))
            at += accepted[-1] + 1
        names = {key: str(trace.about[f"{key}s"][text]) for key in ("id", "task") if trace.about.get(f"{key}s")}
        lengths.append(Steps(drafted, accepted, end, **names))
    return lengths


def best_threshold(trace: Trace, costs: CostModel, rule: StoppingPolicy, longest: int) -> Choice:
    """The best threshold of a confidence policy, with the speed-up by two-fold cross-validation over texts.

    Raises:
        ValueError: a trace without distributions, or with a single text.
    """
    if trace.num_texts < 2:
        raise ValueError("a threshold is chosen on one half of the texts and judged on the other: one text is too few")
    limit = min(longest, costs.widths[-1] - 1, trace.max_draft_length)
    replayed = replay(trace, rule, {"threshold": np.array(THRESHOLDS)}, max_draft_length=limit)
    seconds, half = replayed.seconds(costs), np.arange(trace.num_texts) % 2 == 0
    other = np.where(half, np.argmin(seconds[:, ~half].sum(axis=1)), np.argmin(seconds[:, half].sum(axis=1)))
    judged = seconds[other, np.arange(trace.num_texts)]
    plain = replayed.emitted[0] * costs.plain_pass
    return Choice(THRESHOLDS[int(np.argmin(seconds.sum(axis=1)))], ratio_of_totals(plain, judged), judged)


def thresholds(trace: Trace, costs: CostModel, longest: int) -> dict[str, Choice]:
    """The best threshold per engine: transformers keeps the low-confidence token, llama.cpp stops before it."""
    rules = {"transformers": hf_confidence(refit=False), "llama.cpp": max_confidence(adaptive=False)}
    return {engine: best_threshold(trace, costs, rule, longest) for engine, rule in rules.items()}


def schedule(advices: Sequence[Advice]) -> list[list[int]]:
    """vLLM's [[first batch, last batch, drafts], ...], for advices by ascending batch, each from its batch on."""
    table: list[list[int]] = []
    for advice, after in zip_longest(advices, advices[1:]):
        last, length = after.batch - 1 if after else advice.batch, int(advice.best.setting)
        if table and table[-1][2] == length:
            table[-1][1] = last
        else:
            table.append([advice.batch if table else 1, last, length])
    return table


def engine_options(
    length: int, table: Sequence[Sequence[int]] = (), chosen: Mapping[str, Choice] | None = None, longest: int = 16
) -> dict[str, str]:
    """The options of each engine for a static length and a table by batch size; length 0: none.

    Args:
        chosen: thresholds by engine (`thresholds`) instead of a length, for drafts of up to `longest` tokens.
    """
    if length < 1:
        return {}
    config: dict[str, Any] = {"num_speculative_tokens": length}
    if len(table) > 1:
        config["num_speculative_tokens"] = max(length, *(entry[2] for entry in table))
        config["num_speculative_tokens_per_batch_size"] = [list(entry) for entry in table]
    constant = 'num_assistant_tokens={}, num_assistant_tokens_schedule="constant", assistant_confidence_threshold={:g}'
    options = {
        "vLLM": f"--speculative-config '{json.dumps(config)}'",
        "SGLang": f"--speculative-num-steps {length} --speculative-eagle-topk 1 "
        f"--speculative-num-draft-tokens {length + 1}",
        "TensorRT-LLM": f"max_draft_len: {length}",
        "transformers": constant.format(length, 0),
        "llama.cpp": f"--spec-draft-n-max {length} --spec-draft-p-min 0",
    }
    for engine, choice in (chosen or {}).items():
        threshold = f"--spec-draft-n-max {longest} --spec-draft-p-min {choice.setting:g}"
        options[engine] = threshold if engine == "llama.cpp" else constant.format(longest, choice.setting)
    return options


def _speedup(replayed: Replay, costs: CostModel) -> Interval:
    return ratio_of_totals(replayed.emitted[0] * costs.plain_pass, replayed.seconds(costs)[0])


def _joined(bounds: Sequence[Interval]) -> Interval:
    """The estimate of the middle one, from the lowest bound to the highest."""
    if len(bounds) == 1:
        return bounds[0]
    numbers = [number for bound in bounds for number in bound if np.isfinite(number)]  # NaN bounds for one text
    return Interval(bounds[len(bounds) // 2].estimate, min(numbers), max(numbers))
