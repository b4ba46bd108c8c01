"""What is tested, once more: numpy and plain loops over single rows, written from the papers and from documentation.

Nothing here imports jax or the package. Distributions are float64 arrays of probabilities unless a name says log.
"""

import math

import numpy as np
from scipy.special import softmax
from stopping_oracles import Seen

DRAFT, ACCEPT, NEXT = 0, 1, 2


# Distributions


def entropy(prob):
    """Nats, over the nonzero probabilities."""
    return -sum(p * math.log(p) for p in prob if p > 0)


def warp(logits, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Hugging Face's warpers in their order (transformers, generation/logits_process.py), by sorting.

    TopKLogitsWarper keeps what is not below the k-th largest score: ties stay. TopPLogitsWarper sorts upwards and drops
    the tokens whose cumulative probability is at most 1 - top_p; which of two equal ones it drops is an accident of the
    sort, so here ties with a kept token stay. MinPLogitsWarper drops what is below min_p times the largest probability.
    Each renormalises what the one before left.
    """
    if temperature == 0:
        return np.eye(len(logits))[int(np.argmax(logits))]
    scores = np.asarray(logits, np.float64) / temperature
    if top_k > 0:
        kth = np.sort(scores)[-min(top_k, len(scores))]
        scores = np.where(scores < kth, -np.inf, scores)
    if top_p < 1:
        prob = softmax(scores)
        order = np.argsort(scores, kind="stable")
        dropped = order[np.cumsum(prob[order]) <= 1 - top_p]
        dropped = [token for token in dropped if token != order[-1]]
        kept = np.setdiff1d(np.arange(len(scores)), dropped)
        scores = np.where(scores < scores[kept].min(), -np.inf, scores)
    if min_p > 0:
        prob = softmax(scores)
        scores = np.where(prob < min_p * prob.max(), -np.inf, scores)
    return softmax(scores)


def draw(weights, uniform):
    """Inverse of the cumulative sum: the first token whose sum exceeds the uniform's share of the total."""
    goal, reached = uniform * weights.sum(), 0.0
    for token, weight in enumerate(weights):
        reached += weight
        if weight > 0 and reached > goal:
            return token
    return int(np.flatnonzero(weights > 0)[-1])


# Verifiers: the distribution of the number of accepted drafts, and the distribution of the token after them


def rejection_distribution(drafts, q, p):
    """Leviathan et al. (arXiv 2211.17192), algorithm 1. q [n, V], p [n + 1, V]."""
    chance, distribution = 1.0, []
    for i, token in enumerate(drafts):
        accept = min(1.0, p[i][token] / q[i][token])
        distribution.append(chance * (1 - accept))
        chance *= accept
    return np.array([*distribution, chance])


def residual(p, q, weight=1.0):
    rest = np.maximum(weight * p - q, 0)
    return rest / rest.sum() if rest.sum() > 0 else p


def rejection_next(drafts, q, p, accepted):
    return p[accepted] if accepted == len(drafts) else residual(p[accepted], q[accepted])


def block_weights(drafts, q, p):
    """p_0 .. p_n of Sun et al. (arXiv 2403.10444), algorithm 2."""
    weights = [1.0]
    for i, token in enumerate(drafts):
        weights.append(min(1.0, weights[-1] * p[i][token] / q[i][token]))
    return weights


def block_distribution(drafts, q, p):
    weights, n = block_weights(drafts, q, p), len(drafts)
    coins = []
    for i in range(n):
        z = np.maximum(weights[i] * p[i] - q[i], 0).sum()
        coins.append(1.0 if z + 1 - weights[i] == 0 else z / (z + 1 - weights[i]))
    coins.append(weights[n])
    coins[0] = 1.0  # tau = 0 if no coin says yes
    return np.array([coins[i] * math.prod(1 - coin for coin in coins[i + 1 :]) for i in range(n + 1)])


def block_next(drafts, q, p, accepted):
    weights = block_weights(drafts, q, p)
    return p[accepted] if accepted == len(drafts) else residual(p[accepted], q[accepted], weights[accepted])


def traversal_outcomes(drafts, siblings, q, p):
    """{(drafts accepted, sibling or None): (chance, distribution of the next token)} of a chain with sibling leaves.

    arXiv 2505.12398 on an explicit tree: leaves are tried deepest first, those of one parent in the order drawn; a leaf
    that is rejected leaves its parent the residual. `siblings[i]` are beside draft i.
    """
    weights, ended, outcomes = block_weights(drafts, q, p), 1.0, {}

    def rejected(weight, target, drafter):
        total = np.maximum(weight * target - drafter, 0).sum()
        lighter = 1.0 if total + 1 - weight == 0 else total / (total + 1 - weight)
        return lighter, residual(target, drafter, weight)

    for depth in range(len(drafts), -1, -1):
        weight, target = weights[depth], p[depth]
        if depth < len(drafts):
            left = np.array(q[depth], float)
            weight, target = rejected(weight, target, left)
            left[drafts[depth]] = 0
            for token in siblings[depth]:
                if left.sum() <= 0:
                    break
                drafter = left / left.sum()
                accept = min(1.0, weight * target[token] / drafter[token])
                outcomes[depth, token] = (ended * accept, None)
                ended *= 1 - accept
                weight, target = rejected(weight, target, drafter)
                left[token] = 0
        weight = weight if depth else 1.0
        outcomes[depth, None] = (ended * weight, target)
        ended *= 1 - weight
    return outcomes


def greedy_distribution(drafts, q, p):
    right = 0
    while right < len(drafts) and drafts[right] == int(np.argmax(p[right])):
        right += 1
    return np.eye(len(drafts) + 1)[right]


VERIFIERS = {
    "rejection": (rejection_distribution, rejection_next),
    "block": (block_distribution, block_next),
    "greedy": (greedy_distribution, lambda drafts, q, p, accepted: p[accepted]),
}


# The whole decoder, one row


def decode(target, drafter, prompt, *, rule, verifier, most, new_tokens, uniform, numbers, stop_ids=()):
    """Draft, verify, append, round after round, for one row.

    Args:
        target, drafter: functions of a list of tokens giving the next logits [V].
        rule: a twin of `stopping_oracles`.
        uniform: function of (emitted, position, role).
        numbers: of `warp`.

    Returns:
        The tokens with the prompt, and per round a dict of proposed, drafted, accepted, emitted, passes, the number
        that a plot shows, and of the distributions that rules read: their entropies and largest probabilities.
    """
    text, rounds = list(prompt), []
    length_distribution, next_distribution = VERIFIERS[verifier]
    while len(text) - len(prompt) < new_tokens:
        emitted = len(text) - len(prompt)
        budget = min(most, new_tokens - emitted - 1) if rule.begins(0, emitted) else 0
        drafts, q, read = draft(drafter, text, rule, budget, lambda at, e=emitted: uniform(e, at, DRAFT), numbers)
        p = [warp(target(text + drafts[:k]), **numbers) for k in range(len(drafts) + 1)]
        accepted = draw(length_distribution(drafts, q, p), uniform(emitted, 0, ACCEPT))
        token = draw(next_distribution(drafts, q, p, accepted), uniform(emitted, accepted, NEXT))
        before = rule.shown()
        rule.learns(len(drafts), accepted, most)
        new = (drafts[:accepted] + [token])[: new_tokens - emitted]
        stops = [i for i, token in enumerate(new) if token in stop_ids]
        new = new[: stops[0] + 1] if stops else new
        text += new
        rounds.append(
            {
                "proposed": drafts,
                "drafted": len(drafts),
                "accepted": min(accepted, len(new)),
                "emitted": len(new),
                "passes": len(read),
                "shown": before,
                "entropy": [seen.entropy for seen in read],
                "max_prob": [seen.max_prob for seen in read],
            }
        )
        if stops:
            break
    return text, rounds


def seen_of(logits, read, token):
    """What a rule may read of one position with the distribution `read`, where `token` is drawn."""
    raw = softmax(logits)
    return Seen(entropy(read), entropy(raw), float(read.max()), float(raw.max()), float(read[token]))


def draft(drafter, text, rule, budget, uniform, numbers):
    """A round's drafts, the distribution each was drawn from, and what the rule may read of every drafter pass."""
    drafts, distributions, read = [], [], []
    going = budget > 0
    while going:
        logits = drafter(text + drafts)
        distribution = warp(logits, **numbers)
        token = int(np.argmax(logits)) if numbers["temperature"] == 0 else draw(distribution, uniform(len(drafts)))
        read.append(seen_of(logits, distribution if numbers["temperature"] > 0 else softmax(logits), token))
        if not rule.draws(read[-1], len(drafts)):
            break
        drafts.append(token)
        distributions.append(distribution)
        going = rule.goes_on(read[-1], len(drafts)) and len(drafts) < budget
    return drafts, distributions, read
