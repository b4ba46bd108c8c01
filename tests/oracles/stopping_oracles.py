"""Stopping rules once more, one row each: plain Python, line by line from the papers and the projects' code.

A twin has begins(row, emitted), draws(seen, drafted), goes_on(seen, drafted), learns(drafted, accepted, most) and
shown(). Nothing here imports jax or the package.
"""

import math
from statistics import NormalDist
from typing import NamedTuple


class Seen(NamedTuple):
    """What a rule may read of one position, from the logits alone."""

    entropy: float
    raw_entropy: float
    max_prob: float
    raw_max_prob: float
    token_prob: float


class Rule:
    def begins(self, row, emitted):
        return True

    def draws(self, seen, drafted):
        return True

    def goes_on(self, seen, drafted):
        return True

    def learns(self, drafted, accepted, most):
        pass

    def shown(self):
        return self.threshold


class AtLeast(Rule):
    def __init__(self, minimum, inner):
        self.minimum, self.inner, self.learns, self.shown = minimum, inner, inner.learns, inner.shown

    def begins(self, row, emitted):
        return self.inner.begins(row, emitted) or self.minimum > 0

    def draws(self, seen, drafted):
        return self.inner.draws(seen, drafted) or drafted < self.minimum

    def goes_on(self, seen, drafted):
        return self.inner.goes_on(seen, drafted) or drafted < self.minimum


class Led(Rule):
    """AdaEDL's Algorithm 1 (arXiv 2410.18351) around a check."""

    def __init__(
        self, threshold=0.7, alpha=0.9, beta1=0.5, beta2=0.9, epsilon=0.01, keep=False, adaptive=True, raw=False
    ):
        self.threshold, self.alpha, self.beta1, self.beta2, self.epsilon = threshold, alpha, beta1, beta2, epsilon
        self.rate, self.keep, self.adaptive, self.raw, self.failed = alpha, keep, adaptive, raw, False

    def draws(self, seen, drafted):
        self.failed = self.confidence(seen, drafted) < self.threshold
        return self.keep or not self.failed

    def goes_on(self, seen, drafted):
        return not (self.keep and self.failed)

    def learns(self, drafted, accepted, most):
        if drafted == 0 or not self.adaptive:
            return
        self.rate = self.beta1 * self.rate + (1 - self.beta1) * accepted / drafted
        if self.rate < self.alpha:
            new = self.threshold + self.epsilon
        elif accepted != most:
            new = self.threshold - self.epsilon
        else:
            new = self.threshold
        self.threshold = min(max(self.beta2 * self.threshold + (1 - self.beta2) * new, 0.0), 0.99)


class AdaEDL(Led):
    def __init__(self, gamma=0.2, **hyperparameters):
        super().__init__(**hyperparameters)
        self.gamma = gamma

    def confidence(self, seen, drafted):
        return 1 - math.sqrt(self.gamma * (seen.raw_entropy if self.raw else seen.entropy))


class MaxConfidence(Led):
    def confidence(self, seen, drafted):
        return seen.raw_max_prob if self.raw else seen.max_prob


class AdaptiveGamma(Led):
    """The factor's root is rejected / sum of roots, over what was evaluated, with a prior of positions at 1 nat."""

    def __init__(self, gamma=0.2, weight=10.0, decay=0.98, **hyperparameters):
        super().__init__(**hyperparameters)
        self.prior, self.decay = (weight * math.sqrt(gamma), weight), decay
        self.rejected = self.roots = 0.0
        self.round = {}

    def gamma(self):
        return min(max(((self.prior[0] + self.rejected) / (self.prior[1] + self.roots)) ** 2, 1e-3), 10.0)

    def confidence(self, seen, drafted):
        self.round[drafted] = math.sqrt(seen.entropy)
        return 1 - math.sqrt(self.gamma() * seen.entropy)

    def learns(self, drafted, accepted, most):
        super().learns(drafted, accepted, most)
        self.rejected *= self.decay
        self.roots *= self.decay
        for position in range(drafted):
            self.roots += self.round[position]
            if position == accepted:
                self.rejected += 1
                break


class DraftAndVerify(Rule):
    """arXiv 2309.08168, `decoding.py`: auto parameters 1, .5, .9, 1e-2, .9."""

    def __init__(self, threshold=0.6, target=0.9, rate_decay=0.5, decay=0.9, step=0.01, match=0.0, adaptive=True):
        self.threshold, self.target, self.rate_decay, self.decay, self.step = threshold, target, rate_decay, decay, step
        self.match, self.adaptive = match, adaptive

    def goes_on(self, seen, drafted):
        return not seen.token_prob < self.threshold

    def learns(self, drafted, accepted, most):
        if drafted == 0 or not self.adaptive:
            return
        self.match = self.rate_decay * self.match + (1 - self.rate_decay) * (accepted / drafted)
        if self.match < self.target:
            new = self.threshold + self.step
        elif drafted == most:
            new = self.threshold
        else:
            new = self.threshold - self.step
        self.threshold = min(max(self.decay * self.threshold + (1 - self.decay) * new, 0.0), 0.99)


class SVIP(Rule):
    def __init__(self, factor=0.15, threshold=0.3, raw=True):
        self.factor, self.threshold, self.raw = factor, threshold, raw

    def goes_on(self, seen, drafted):
        return not math.sqrt(self.factor * (seen.raw_entropy if self.raw else seen.entropy)) > self.threshold


class CumulativeConfidence(Rule):
    def __init__(self, threshold=0.2):
        self.threshold = threshold

    def begins(self, row, emitted):
        self.product = 1.0
        return True

    def goes_on(self, seen, drafted):
        self.product *= seen.token_prob
        return self.product >= self.threshold


class HFConfidence(Rule):
    """transformers' `update_candidate_strategy`: its two lists, and its costs at the thresholds 0, 1/bins, ..."""

    def __init__(self, threshold=0.4, more_than=5, weights=(1, 3), bins=50, refit=True, positions=32):
        self.threshold, self.more_than, self.weights, self.bins = threshold, more_than, weights, bins
        self.refit, self.positions = refit, positions
        self.probs, self.matches, self.round = [], [], []

    def begins(self, row, emitted):
        self.round = []
        return True

    def goes_on(self, seen, drafted):
        self.round.append(seen.token_prob)
        return not seen.token_prob < self.threshold

    def learns(self, drafted, accepted, most):
        if not self.refit:
            return
        new = [1] * accepted + [0] * (drafted > accepted)
        self.matches += new[: self.positions]
        self.probs += self.round[: len(new)][: self.positions]
        if len(self.probs) <= self.more_than or set(self.matches) != {0, 1}:
            return
        samples, costs = list(zip(self.probs, self.matches, strict=True)), []
        for index in range(self.bins):
            edge = index / self.bins
            false_positives = sum(p >= edge and not hit for p, hit in samples) / self.matches.count(0)
            false_negatives = sum(p < edge and hit for p, hit in samples) / self.matches.count(1)
            costs.append((self.weights[0] * false_positives + self.weights[1] * false_negatives, -edge))
        self.threshold = -min((round(cost, 6), edge) for cost, edge in costs)[1]


class Length(Rule):
    """A draft length, fixed where nothing is learnt."""

    def __init__(self, length):
        self.length = length

    def begins(self, row, emitted):
        return self.length > 0

    def goes_on(self, seen, drafted):
        return drafted < self.length

    def shown(self):
        return float(self.length)


class HFHeuristic(Length):
    def __init__(self, length=5, increase=2, decrease=1):
        self.length, self.increase, self.decrease = length, increase, decrease

    def learns(self, drafted, accepted, most):
        if drafted == 0:
            return
        length = min(self.length, most)
        self.length = min(length + self.increase, most) if accepted == length else max(1, length - self.decrease)


class GammaTuning(Length):
    def __init__(self, length=4, high=0.8, low=0.5, decay=0.5, rate=0.65):
        self.length, self.high, self.low, self.decay, self.rate = length, high, low, decay, rate

    def learns(self, drafted, accepted, most):
        if drafted == 0:
            return
        self.rate = self.decay * self.rate + (1 - self.decay) * accepted / drafted
        length = min(self.length, most)
        if self.rate > self.high:
            length += 2 if accepted == length else 1
        elif self.rate < self.low:
            length -= 1
        self.length = min(max(length, 1), most)


class AcceptedLengthEMA(Length):
    """SGLang's `AdaptiveSpeculativeParams.update`, without its hysteresis."""

    def __init__(self, length=3, alpha=0.2, interval=5, warmup=10, tiers=()):
        self.length, self.alpha, self.interval, self.warmup, self.tiers = length, alpha, interval, warmup, tiers
        self.average, self.count = length - 1.0, 0

    def learns(self, drafted, accepted, most):
        if drafted == 0:
            return
        self.average = (1 - self.alpha) * self.average + self.alpha * accepted
        self.count += 1
        if self.count <= self.warmup or (self.count - self.warmup) % self.interval:
            return
        wanted = min(max(round(self.average) + 1, 1), most)
        self.length = next((tier for tier in self.tiers if tier >= wanted), max(self.tiers, default=wanted))


class Goodput(Length):
    """E(k) = (1 - a^(k+1)) / (1 - a) over T(k) = 1 + (c + v) k."""

    def __init__(self, cost=0.12, least=1, prior=0.7, weight=4.0, decay=0.95, most=16):
        self.cost, self.least, self.prior, self.weight, self.decay, self.most = cost, least, prior, weight, decay, most
        self.accepted = self.evaluated = 0.0

    def begins(self, row, emitted):
        a = (self.prior * self.weight + self.accepted) / (self.weight + self.evaluated)
        values = {k: (1 - a ** (k + 1)) / (1 - a) / (1 + self.cost * k) for k in range(self.least, self.most + 1)}
        self.length = max(values, key=values.__getitem__)
        return self.length > 0

    def learns(self, drafted, accepted, most):
        self.accepted = self.decay * self.accepted + accepted
        self.evaluated = self.decay * self.evaluated + min(accepted + 1, drafted)


class Arms:
    """Counts and sums of a bandit; the reward is tokens over the cost model's time."""

    def __init__(self, count, exploration, drafter_cost=0.1, verification_cost=0.02):
        self.pulls, self.sums, self.exploration = [0] * count, [0.0] * count, exploration
        self.drafter_cost, self.verification_cost = drafter_cost, verification_cost

    def bounds(self, width):
        t, pairs = sum(self.pulls), list(zip(self.pulls, self.sums, strict=True))
        return [s / n + self.exploration * math.sqrt(width * math.log(t) / n) if n else math.inf for n, s in pairs]

    def samples(self, uniforms):
        normals = [NormalDist().inv_cdf(min(max(u, 1e-7), 1 - 1e-7)) for u in uniforms]
        rows = zip(self.pulls, self.sums, normals, strict=True)
        return [s / n + self.exploration * z / math.sqrt(n) if n else math.inf for n, s, z in rows]

    def learns(self, arm, emitted, passes, drafted):
        if passes > 0:
            self.pulls[arm] += 1
            self.sums[arm] += emitted / (1 + self.drafter_cost * passes + self.verification_cost * drafted)


class Bandit(Length):
    """BanditSpec's UCB (arXiv 2505.15141): the first rounds in turn, then mean + sqrt(6 ln t / n), scaled."""

    def __init__(self, lengths=(1, 2, 3, 4), exploration=0.1, warmup=8, **costs):
        self.lengths, self.warmup, self.arms = lengths, warmup, Arms(len(lengths), exploration, **costs)

    def begins(self, row, emitted):
        played, bounds = sum(self.arms.pulls), self.arms.bounds(6)
        self.arm = played % len(self.lengths) if played < self.warmup else bounds.index(max(bounds))
        self.length = self.lengths[self.arm]
        return True

    def learns(self, drafted, accepted, most):
        self.arms.learns(self.arm, accepted + 1, drafted, drafted)


class PolicyBandit(Rule):
    """TapOut (arXiv 2511.02017), one rule a round. `uniforms[row][emitted]` are Thompson's numbers."""

    def __init__(self, rules, exploration, uniforms=None, **costs):
        self.rules, self.uniforms, self.arms = rules, uniforms, Arms(len(rules), exploration, **costs)

    def begins(self, row, emitted):
        values = self.arms.samples(self.uniforms[row][emitted]) if self.uniforms else self.arms.bounds(2)
        self.arm, self.passes = values.index(max(values)), 0
        return self.rules[self.arm].begins(row, emitted)

    def draws(self, seen, drafted):
        self.passes += 1
        return self.rules[self.arm].draws(seen, drafted)

    def goes_on(self, seen, drafted):
        return self.rules[self.arm].goes_on(seen, drafted)

    def learns(self, drafted, accepted, most):
        self.rules[self.arm].learns(drafted, accepted, most)
        self.arms.learns(self.arm, accepted + 1, self.passes, drafted)

    def shown(self):
        return float(self.arm)
