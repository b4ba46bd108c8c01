"""What lossy verifiers do, once more: paths of accepting and redrawing, walked one by one over numpy distributions.

Nothing here imports jax or the package. A verifier is a function (p, q, x, hyperparameters) of one drafted position
that lists what can happen: (chance, None) for the draft kept, (chance, distribution) for another token drawn from that
distribution instead. p and q are the distributions as sampled; `hyperparameters` may bring `raw`, the target's
distribution at temperature 1, for what greedy rules read.
"""

import math
from collections import defaultdict

import numpy as np
import plain_oracles as oracles


def rejection(p, q, x, hyperparameters):
    accept = min(1.0, p[x] / q[x])
    return [(accept, None), (1 - accept, oracles.residual(p, q))]


def lenience(p, q, x, hyperparameters):
    """q is l q where it is compared (arXiv 2211.17192, A.5); argmax: p(x) > l max p, or the first choice."""
    if "raw" in hyperparameters:
        raw = hyperparameters["raw"]
        keep = x == int(np.argmax(raw)) or raw[x] > hyperparameters["lenience"] * max(raw)
        return [(1.0, None)] if keep else [(1.0, np.eye(len(raw))[int(np.argmax(raw))])]
    accept = min(1.0, p[x] / (hyperparameters["lenience"] * q[x]))
    return [(accept, None), (1 - accept, oracles.residual(p, q))]


def typical(p, q, x, hyperparameters):
    threshold = min(hyperparameters["epsilon"], hyperparameters["delta"] * math.exp(-oracles.entropy(p)))
    return [(1.0, None)] if p[x] > threshold else [(1.0, p)]


def top_set(prob, size):
    order = sorted(range(len(prob)), key=lambda token: (-prob[token], token))
    return {token for token in order[:size] if prob[token] > 0}


def easd(p, q, x, hyperparameters):
    accept = min(1.0, p[x] / q[x])
    tops = top_set(p, hyperparameters["top_n"]), top_set(q, hyperparameters["top_n"])
    share = len(tops[0] & tops[1]) / max(len(tops[0]), len(tops[1]))
    entropies = oracles.entropy(q), oracles.entropy(p)
    bounds = hyperparameters["drafter_entropy"], hyperparameters["target_entropy"]
    high_entropy = entropies[0] > bounds[0] and entropies[1] > bounds[1]
    if not (high_entropy and share >= hyperparameters["overlap"]):
        return [(accept, None), (1 - accept, oracles.residual(p, q))]
    other = np.array([0.0 if token == x else chance for token, chance in enumerate(p)])
    return [(accept, other / other.sum()), (1 - accept, oracles.residual(p, q))]


def joint_distribution(verify, target, drafter, *, hyperparameters, drafts, tokens, limit, phases=None):
    """The distribution [V] * tokens of what comes after the tokens 0, 1 from rounds of `drafts` drafted tokens.

    `target` and `drafter` are tables [V, V, V] of probabilities by the last two tokens. A round drafts no more than the
    budget allows: `limit` - emitted - 1. `phases`, if given, is the function of a text (its emitted part) that says
    which entry of the list `verify` verifies the round that begins there.
    """
    vocab = len(target)
    joint, texts = np.zeros((vocab,) * tokens), {(): 1.0}
    while texts:
        longer = defaultdict(float)
        for text, chance in texts.items():
            rule = verify if phases is None else verify[phases(text)]
            budget = min(drafts, limit - len(text) - 1)
            for new, share in round_distribution(rule, target, drafter, (0, 1, *text), budget, hyperparameters).items():
                whole = (text + new)[:tokens]
                if len(whole) == tokens:
                    joint[whole] += chance * share
                else:
                    longer[whole] += chance * share
        texts = longer
    return joint


def round_distribution(verify, target, drafter, text, budget, hyperparameters):
    """{tokens: probability} of one round; drafts after a rejection don't matter, so they are never drawn here."""
    found = defaultdict(float)
    open_paths = [((), 1.0)]
    for _ in range(budget):
        kept = []
        for drafted, chance in open_paths:
            known = text + drafted
            p, q = target[known[-2], known[-1]], drafter[known[-2], known[-1]]
            raw = hyperparameters.get("raw_target")
            seen = hyperparameters if raw is None else {**hyperparameters, "raw": raw[known[-2], known[-1]]}
            for x in range(len(q)):
                if q[x] == 0:
                    continue
                for share, distribution in verify(p, q, x, seen):
                    if share <= 0:
                        continue
                    if distribution is None:
                        kept.append(((*drafted, x), chance * q[x] * share))
                        continue
                    for token in range(len(distribution)):
                        found[(*drafted, token)] += chance * q[x] * share * distribution[token]
        open_paths = kept
    for drafted, chance in open_paths:  # the bonus token
        known = text + drafted
        for token, share in enumerate(target[known[-2], known[-1]]):
            found[(*drafted, token)] += chance * share
    return found


def emitted_distribution(verify, p, q, hyperparameters):
    """The distribution [V] of the token that stands where one token was drafted."""
    out = np.zeros(len(p))
    for x in range(len(q)):
        for share, distribution in verify(p, q, x, hyperparameters) if q[x] > 0 else []:
            out += q[x] * share * (np.eye(len(p))[x] if distribution is None else distribution)
    return out


def tables(toy, warp):
    """The distributions [V, V, V] of a toy pair, target and drafter."""
    both = toy.target, toy.drafter
    return [np.apply_along_axis(lambda row: oracles.warp(row, **warp), -1, table.astype(np.float64)) for table in both]


VERIFIERS = {"rejection": rejection, "lenience": lenience, "typical": typical, "easd": easd}
