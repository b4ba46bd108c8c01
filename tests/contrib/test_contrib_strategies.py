"""What stands in contrib/stopping and contrib/drafters: each is cited, replayable and its plain-Python twin.

That each is documented, a value, lossless and independent of its neighbours, test_contracts.py shows of all names.
"""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stopping_oracles as twins
from drafting import draft_once
from stopping_cases import ROWS, context, play_rows, play_twin, story

from experiments.lib.smoke import made_up_trace
from specdec_jax.contrib.drafters.suffix import suffix
from specdec_jax.contrib.stopping.dspark import dspark
from specdec_jax.contrib.stopping.hazard_cost import hazard_cost
from specdec_jax.replay.replay import replay
from specdec_jax.stopping import static
from specdec_jax.text.citations import references
from specdec_jax.text.strategies import find_factory, names

CONTRIB = [
    (kind, name)
    for kind in ("policy", "drafter")
    for name in names(kind)
    if find_factory(kind, name).__module__.split(".")[1:3] in (["contrib", "stopping"], ["contrib", "drafters"])
]


@pytest.mark.parametrize(("kind", "name"), CONTRIB)
def test_contrib_strategies_are_cited_and_replayable(kind, name):
    factory = find_factory(kind, name)
    about = str(sys.modules[factory.__module__].__doc__)
    assert any(source in about for source in references()), "the docstring of its file names no source with an entry"
    if kind == "policy":
        trace = made_up_trace(1.0)
        found = replay(trace, factory())
        assert found.emitted.sum() == trace.num_positions and found.drafted.sum() > 0


class HazardCost(twins.Rule):
    """By dictionaries of counts."""

    def __init__(self, cost=0.1, prior=(2, 2), weight=0.2, least=1, bins=10, positions=16):
        self.cost, self.prior, self.weight, self.least = cost, prior, weight, least
        self.bins, self.positions, self.time, self.counts, self.cells = bins, positions, 1.0, {}, []

    def begins(self, row, emitted):
        self.cells = []
        return True

    def goes_on(self, seen, drafted):
        cell = min(drafted - 1, self.positions - 1), min(int(np.float32(seen.max_prob) * self.bins), self.bins - 1)
        self.cells.append(cell)
        accepted, rejected = self.counts.get(cell, (0, 0))
        accepted, rejected = accepted + self.prior[0], rejected + self.prior[1]
        return drafted <= self.least or accepted / (accepted + rejected) * self.time > self.cost

    def learns(self, drafted, accepted, most):
        evaluated = min(accepted + 1, drafted, self.positions)
        for place, cell in enumerate(self.cells[:evaluated]):
            hits, misses = self.counts.get(cell, (0, 0))
            self.counts[cell] = (hits + (place < accepted), misses + (place >= accepted))
        if drafted:
            self.time = (1 - self.weight) * self.time + self.weight / (accepted + 1)

    def shown(self):
        return self.time


class DSpark(twins.Rule):
    """By loops over draft lengths."""

    def __init__(self, cost, times, exponent=1.0, horizon=8):
        self.cost, self.times, self.exponent, self.horizon = cost, times, exponent, horizon

    def begins(self, row, emitted):
        self.budget, self.passes, self.confidences = int(story().budgets[emitted, row]), 0, []
        return True

    def pays(self, drafted, confidence):
        def ratio(further):
            chances, passes = [*self.confidences, *[confidence] * further], max(self.passes, drafted + further)
            tokens = 1 + sum(np.prod(chances[: size + 1]) for size in range(len(chances)))
            return tokens / (self.cost * passes + self.times[min(drafted + further, len(self.times) - 1)])

        longest = min(self.horizon, self.budget - drafted)
        return max((ratio(further) for further in range(1, longest + 1)), default=0.0) > ratio(0)

    def draws(self, seen, drafted):
        self.passes, self.last = self.passes + 1, seen.max_prob**self.exponent
        return self.pays(drafted, self.last)

    def goes_on(self, seen, drafted):
        self.confidences.append(self.last)
        return self.pays(drafted, self.last)

    def shown(self):
        return 1 + sum(np.prod(self.confidences[: size + 1]) for size in range(len(self.confidences)))


STEPS = [1.0, 1.05, 1.05, 1.4]
CASES = {
    "hazard_cost, published, dear drafter": (hazard_cost(), {"drafter_cost": 0.35}, lambda: HazardCost(0.35)),
    "hazard_cost, other": (
        hazard_cost(bins=3, positions=2),
        {"drafter_cost": 0.287, "prior_accepted": 1.0, "prior_rejected": 0.5, "weight": 0.5, "least": 0},
        lambda: HazardCost(0.287, (1, 0.5), 0.5, 0, bins=3, positions=2),
    ),
    "dspark": (dspark(), {"drafter_cost": 0.2, "verification_times": STEPS}, lambda: DSpark(0.2, STEPS)),
    "dspark, other": (
        dspark(),
        {"drafter_cost": 0.03, "verification_times": STEPS, "exponent": 0.5},
        lambda: DSpark(0.03, STEPS, 0.5),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_rule_is_its_twin_in_every_round(name):
    policy, hyperparameters, make_twin = CASES[name]
    (drafted, *others), _ = play_rows(policy, hyperparameters)
    for row in range(ROWS):
        for ours, his in zip((drafted, *others), play_twin(make_twin(), row), strict=True):
            np.testing.assert_allclose(ours[:, row], his, rtol=1e-4, atol=1e-5, err_msg=f"row {row}")
    assert len(np.unique(drafted)) > 2


def looked_up(text: list[int], longest: int, most: int) -> tuple[list[int], list[float]]:
    """(draft, chances) by loops over all earlier places."""
    now, chances, limit = list(text), [], None
    for _ in range(most):
        agree = []  # tokens in which the text up to each place, which something follows, ends as the whole text does
        for end in range(1, len(text)):
            size = 0
            while size < end and text[end - 1 - size] == now[-1 - size]:
                size += 1
            agree.append(size)
        limit = max(agree, default=0) if limit is None else limit
        level = min(max(agree, default=0), longest)
        if level == 0 or len(chances) >= limit:
            break
        followers = [text[end] for end, size in enumerate(agree, 1) if size >= level]
        counts = [followers.count(token) for token in followers]
        best = max(place for place, count in enumerate(counts) if count == max(counts))
        chances.append((counts[best] + level - 0.5) / (len(followers) + level))
        now.append(followers[best])
    return now[len(text) :], chances


@pytest.mark.parametrize(("longest", "vocab"), [(8, 2), (2, 3), (1, 4)])
def test_suffix_drafts_what_loops_find_however_the_text_came(longest, vocab):
    """Texts of all lengths side by side, committed in two pieces, of which the second may be another text's."""
    rng, slots, most = np.random.default_rng(vocab), 24, 6
    lengths = np.tile(np.arange(1, slots), 3).astype(np.int32)
    tokens = rng.integers(0, vocab, (len(lengths), slots)).astype(np.int32)
    before = rng.integers(0, slots, len(lengths)).astype(np.int32)
    earlier = np.where(before[:, None] > lengths[:, None], (tokens + 1) % vocab, tokens)  # a text that is cut back
    drafter = suffix(most, longest)
    state = drafter.init(None, len(lengths), slots)
    for text, length in ((earlier, before), (tokens, lengths)):
        state = jax.jit(drafter.commit)(None, state, jnp.asarray(text), jnp.asarray(length))
    now = context(len(lengths), budget=most)._replace(length=jnp.asarray(lengths))
    policy = static()
    begun = policy.init(len(lengths), draft_length=most)
    draft, drafted, _ = draft_once(drafter, None, state, jnp.asarray(tokens), now, policy, begun)
    sizes = set()
    for row, length in enumerate(lengths):
        expected, chances = looked_up(tokens[row, :length].tolist(), longest, most)
        size = int(draft.length[row])
        assert draft.tokens[row, :size].tolist() == expected, row
        np.testing.assert_allclose(drafted.max_prob[row, :size], chances, rtol=1e-6)
        sizes.add(size)
    assert {0, 1, 2, 3} <= sizes
    assert draft.log_q is None and draft.one_hot.all()  # verified as chosen, as those of all lookups are
