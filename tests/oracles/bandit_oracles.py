"""Bandits once more, one row each, in plain Python; the seam of a twin is that of `stopping_oracles`."""

import math
from statistics import NormalDist

from stopping_oracles import Length, Rule


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
