"""Speculative decoding along a recorded trace in plain Python, step by step, and settings chosen on other texts."""

import numpy as np
from stopping_oracles import Seen

from experiments.lib.trace_runs import costs_or_default
from specdec_jax.replay.trace import FEATURES

COSTS = costs_or_default(None)


def walk(trace, text, twin, most, costs=COSTS):
    """(seconds, rounds, passes, accepted) of one text under a plain-Python rule, read off the trace step by step."""
    times, at, end, limit = costs.pass_times(most), 0, int(trace.length[text]), int(trace.limit[text])
    seconds, rounds, all_passes, all_accepted = 0.0, 0, 0, 0
    while at < end:
        budget = min(most, limit - at - 1)
        going = twin.begins(text, at) and budget > 0
        drafted = passes = accepted = 0
        tail = None
        while going:
            passes += 1
            if tail is None and trace.accepted[text, at + drafted]:
                distribution, hit = trace.path[text, at + drafted], True
            else:
                tail = trace.tails[trace.tail_of[text, at + accepted]] if tail is None else tail
                distribution, hit = tail[drafted - accepted], False
            fields = dict(zip(FEATURES, map(float, distribution), strict=True))
            seen = Seen(*(fields[name] for name in ("entropy", "raw_entropy", "max_prob", "raw_max_prob")), 0.0)
            if not twin.draws(seen, drafted):
                break
            drafted += 1
            accepted += hit
            going = twin.goes_on(seen, drafted) and drafted < budget
        twin.learns(drafted, accepted, most)
        emitted = min(accepted + 1, end - at)
        seconds += times[drafted] + passes * costs.drafter_step
        rounds, all_passes, all_accepted = rounds + 1, all_passes + passes, all_accepted + min(accepted, emitted)
        at += emitted
    return seconds, rounds, all_passes, all_accepted


def totals(trace, make_twin, most=16, texts=None, costs=COSTS):
    chosen = range(trace.num_texts) if texts is None else texts
    return np.sum([walk(trace, text, make_twin(), most, costs) for text in chosen], axis=0)


def on_the_other_half(trace, texts, settings, make_twin, most=16, costs=COSTS):
    """(settings chosen on either half, seconds of every text), by walks."""
    texts = np.asarray(texts)
    seconds = np.array([[walk(trace, text, make_twin(value), most, costs)[0] for text in texts] for value in settings])
    first = np.random.default_rng(0).permutation(len(texts)) < len(texts) // 2
    best = [int(np.argmin(seconds[:, half].sum(axis=1))) for half in (first, ~first)]
    return [settings[index] for index in best], np.where(first, seconds[best[1]], seconds[best[0]])
