"""The survival rule against a plain-Python twin, and against what its derivation promises (docs/method.md)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stopping_cases
from stopping_cases import outcome

from specdec_jax.contrib.trees import survival_tree
from specdec_jax.stopping import survival
from specdec_jax.stopping.survival import PRIOR, Prior
from specdec_jax.types import Distribution

K = 6


def context(rows, temperature=0.0, budget=K, cost=None):
    cost = None if cost is None else jnp.asarray(cost, jnp.float32)
    return stopping_cases.context(rows, temperature, budget)._replace(relative_drafter_cost=cost)


def distributions(rows, seed=0, temperature=0.0):
    return stopping_cases.distribution_of_entropies(rows, seed, temperature)[0]


def compiled(policy):
    functions = {name: jax.jit(getattr(policy, name)) for name in ("begin", "check", "proceed", "update")}
    return policy.replace(**functions)


class Twin:
    """One row, in loops and float64."""

    def __init__(self, c, times, temperature=0.0, rate=None, weight=5.0):
        self.c, self.times, self.temperature = c, times, temperature
        if rate is None:
            fixed = [sum(0.6**n for n in range(k + 1)) / (self.verify(k) + k * c) for k in range(33)]
            rate = max(fixed)
        self.rate0, self.weight = rate, weight
        self.tokens, self.time = rate * weight, weight
        self.accepted, self.verified = [3.2, 3.2], [4.0, 4.0]  # first and later drafts
        self.lapses, self.trials = 0.5, 5.0

    def verify(self, drafts):
        return self.times[min(drafts, len(self.times) - 1)]

    def rate(self):
        return max(self.tokens / self.time, 1 / self.times[0])

    def gain(self, drafted, room):
        best, brought = -math.inf, 0.0
        for count in range(1, min(room, 8) + 1):
            brought += self.chance**count
            time = count * self.cost * self.c + self.verify(drafted + count) - self.verify(drafted)
            best = max(best, self.survival * brought - self.rate() * time)
        return best

    def begin(self, room, cost):
        self.survival, self.passes, self.cost, self.chances = 1.0, 0, cost, []
        self.chance = self.accepted[0] / self.verified[0]
        return self.gain(0, room)

    def proceed(self, entropy, largest, drafted, room):
        p, chance = PRIOR, largest
        if self.temperature > 0:
            logit = p.bias + p.log_temperature * math.log(self.temperature) - math.log(entropy + 0.02)
            chance = 1 / (1 + math.exp(-logit))
        self.chances.append((1 - self.lapses / self.trials) * chance)
        self.survival *= self.chances[-1]
        self.chance = self.accepted[1] / self.verified[1]
        self.passes += self.cost
        return self.gain(drafted, room - drafted)

    def update(self, drafted, accepted):
        seen = min(drafted, accepted + 1)
        for place, (right, tried) in enumerate(
            ((min(accepted, 1), min(seen, 1)), (max(accepted - 1, 0), max(seen - 1, 0)))
        ):
            self.accepted[place] = 3.2 + 0.98 * (self.accepted[place] - 3.2) + right
            self.verified[place] = 4.0 + 0.98 * (self.verified[place] - 4.0) + tried
        lapse = self.lapses / self.trials
        lapsed = lapse / (1 - self.chances[accepted]) if accepted < drafted else 0.0
        self.lapses = 0.15 + 0.98 * (self.lapses - 0.15) + lapsed
        self.trials = 5.0 + 0.98 * (self.trials - 5.0) + seen
        prior = self.weight * self.rate0
        self.tokens = prior + 0.98 * (self.tokens - prior) + accepted + 1
        spent = self.verify(drafted) + self.c * self.passes
        self.time = self.weight + 0.98 * (self.time - self.weight) + spent


TIMES = (1.0, 1.0, 1.05, 1.3, 1.3, 1.32, 1.6)


def test_rounds_line_by_line():
    """30 rounds of 40 rows: whenever the twin's gain is not within rounding of 0, both say the same. In some rounds
    another drafter takes its turn, at a cost of its own; some have no drafts. Every other row is greedy."""
    rows, rng, decided = 40, np.random.default_rng(3), set()
    temperatures = np.resize([0.0, 0.8], rows)
    policy = compiled(survival())
    costs = rng.uniform(0.02, 0.5, rows)
    state = policy.init(rows, drafter_cost=costs, verification_times=TIMES)
    twins = [Twin(cost, TIMES, temperature) for temperature, cost in zip(temperatures, costs, strict=True)]
    for number in range(30):
        room = int(rng.integers(1, K + 1))
        cost = rng.choice([0.0, 0.3, 1.0, 4.0], rows) if number % 3 else None
        now = context(rows, temperatures, room, cost)
        says, state = policy.begin(state, now)
        costs = np.ones(rows) if cost is None else cost
        gains = [twin.begin(room, one) for twin, one in zip(twins, costs, strict=True)]
        decided |= agree("begin", says, gains)
        length = int(rng.integers(0, room + 1))
        for drafted in range(1, length + 1):
            seen = distributions(rows, 100 * number + drafted, temperatures)
            says, state = policy.proceed(state, seen, seen.top_token, jnp.full(rows, drafted, jnp.int32), now)
            entropy, largest = np.asarray(seen.entropy, float), np.asarray(seen.max_prob, float)
            gains = [t.proceed(h, m, drafted, room) for t, h, m in zip(twins, entropy, largest, strict=True)]
            decided |= agree("proceed", says, gains)
        accepted = np.minimum(rng.integers(0, 2 * K, rows), length)
        state = policy.update(state, *outcome([length] * rows, accepted))
        for twin, taken in zip(twins, accepted.tolist(), strict=True):
            twin.update(length, taken)
        np.testing.assert_allclose(state.accepted, [twin.accepted for twin in twins], rtol=1e-5)
        np.testing.assert_allclose(state.verified, [twin.verified for twin in twins], rtol=1e-5)
        np.testing.assert_allclose(state.lapse, [twin.lapses / twin.trials for twin in twins], rtol=1e-4)
        np.testing.assert_allclose(policy.threshold(state), [twin.rate() for twin in twins], rtol=1e-4)
    assert len(decided) == 4, "a branch was never taken"


def agree(name, says, gains):
    clear = np.abs(gains) > 1e-4
    np.testing.assert_array_equal(np.asarray(says)[clear], np.asarray(gains)[clear] > 0, err_msg=name)
    return {(name, bool(answer)) for answer in np.asarray(says)}


ONE = compiled(survival())


def constant_distribution(rows, entropy=1.0, largest=0.5):
    fill = lambda value: jnp.full(rows, value, jnp.float32)  # noqa: E731
    return Distribution(
        fill(0.0)[:, None], jnp.zeros(rows, jnp.int32), *(fill(v) for v in (entropy, largest, 0.1, entropy, largest))
    )


def drafted_by(policy, state, seen, budget=30, temperature=0.0):
    rows = state.survival.shape[0]
    now, zero = context(rows, temperature, budget), jnp.zeros(rows, jnp.int32)
    going, state = policy.begin(state, now)
    lengths = np.zeros(rows, int)
    for drafted in range(budget):
        lengths += np.asarray(going)
        go_on, state = policy.proceed(state, seen, zero, zero + drafted + 1, now)
        going = going & go_on
    return lengths


@pytest.mark.parametrize("chance", [0.3, 0.65, 0.88, 0.98])
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.4])
def test_a_constant_chance_gives_the_threshold_on_survival(chance, cost):
    """SpecDec++'s special case: with verification free, draft token k + 1 iff chance^(k+1) > c R."""
    rate, prior = 1.5, Prior(math.log(chance / (1 - chance)), 0.0)  # the evidence is 0 at an entropy of 0.98
    state = ONE.init(1, drafter_cost=cost, verification_times=[1.0], prior=prior, initial_rate=rate)
    state = state._replace(accepted=state.verified * chance, lapse=jnp.zeros(1))
    expected = 0
    while expected < 30 and chance ** (expected + 1) > cost * rate:
        expected += 1
    for temperature, seen in ((0.0, constant_distribution(1, largest=chance)), (0.7, constant_distribution(1, 0.98))):
        assert drafted_by(ONE, state, seen, temperature=temperature).tolist() == [expected]


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize(("signal", "largest", "entropy"), [("probability", 0.8, 1.0), ("bound", 0.5, 0.2)])
def test_other_signals_are_probabilities_of_acceptance(signal, largest, entropy, temperature):
    """0.8 is the token's probability, and 1 - sqrt(0.2 H) at an entropy of 0.2."""
    seen = constant_distribution(1, entropy, largest)._replace(log_prob=jnp.full((1, 2), math.log(0.8), jnp.float32))
    policy = compiled(survival(signal=signal))
    state = policy.init(1, drafter_cost=0.2, verification_times=[1.0], initial_rate=1.5)._replace(lapse=jnp.zeros(1))
    state = state._replace(accepted=0.8 * state.verified)
    assert drafted_by(policy, state, seen, temperature=temperature).tolist() == [5]  # 0.8^5 > 0.3 > 0.8^6
    if signal == "bound":
        wide = policy.init(1, drafter_cost=0.2, verification_times=[1.0], initial_rate=1.5, entropy_factor=1.8)
        wide = wide._replace(accepted=0.4 * wide.verified)
        assert drafted_by(policy, wide, seen).tolist() == [1]  # 0.4: the next one would survive with 0.16


def test_a_row_that_loses_by_drafting_does_not_find_time_cheap():
    """Three of ten first drafts accepted at c = 0.4: whatever its rate fell to, a pass costs 0.4 tokens at least."""
    state = ONE.init(1, drafter_cost=0.4, verification_times=[1.0], initial_rate=0.6, rate_weight=100.0)
    assert float(ONE.threshold(state)[0]) == 1.0
    state = state._replace(accepted=state.verified * 0.3)
    assert drafted_by(ONE, state, constant_distribution(1)).tolist() == [0]


TOGETHER = compiled(survival(together=True))


def drafting_state(policy, rows, seed, **hyperparameters):
    """A state in the middle of a draft: other survivals, rates and first drafts in every row."""
    rng = np.random.default_rng(seed)
    state = policy.init(rows, verification_times=TIMES, **hyperparameters)
    drawn = {
        "survival": rng.uniform(0.1, 1, rows),
        "tokens": rng.uniform(5, 30, rows),
        "accepted": rng.uniform(0, 4, (rows, 2)),
        "lapse": rng.uniform(0, 0.3, rows),
    }
    return state._replace(**{name: jnp.asarray(values, jnp.float32) for name, values in drawn.items()})


@pytest.mark.parametrize("seed", range(20))
def test_together_is_what_all_rows_win_less_their_time(seed):
    """Summed in loops over rows: each brings what it has room for, and the time is worth something to all who live."""
    rng, rows = np.random.default_rng(seed), 4
    policy, cost = TOGETHER, float(rng.uniform(0.02, 0.9))
    dead_cost = np.where([False, False, seed % 2 == 1, False], 9.0, cost)  # a row that is done counts for nothing
    state = drafting_state(policy, rows, seed, drafter_cost=dead_cost)
    room, alive, drafted = (
        rng.integers(0, K, rows),
        np.array([True, True, seed % 2 == 0, True]),
        int(rng.integers(1, 3)),
    )
    now = context(rows)._replace(alive=jnp.asarray(alive), budget=jnp.asarray(room + drafted, jnp.int32))
    seen, token = distributions(rows, seed), jnp.zeros(rows, jnp.int32)
    survived = np.asarray(state.survival)
    says, state = policy.proceed(state, seen, token, jnp.full(rows, drafted, jnp.int32), now)
    twins = []
    for row in range(rows):
        twin = Twin(cost, TIMES)
        twin.begin(K, 1)
        twin.survival, twin.tokens = float(survived[row]), float(state.tokens[row])
        twin.lapses, twin.accepted = 5 * float(state.lapse[row]), np.asarray(state.accepted[row]).tolist()
        twin.proceed(float(seen.entropy[row]), float(seen.max_prob[row]), drafted, K)
        twins.append(twin)
    rate = sum(twin.rate() for twin, lives in zip(twins, alive, strict=True) if lives)
    best = -math.inf
    for count in range(1, max(room[alive], default=0) + 1):
        won = 0.0
        for twin, own, lives in zip(twins, room, alive, strict=True):
            won += twin.survival * sum(twin.chance**n for n in range(1, min(count, own) + 1)) if lives else 0.0
        time = count * cost + twins[0].verify(drafted + count) - twins[0].verify(drafted)
        best = max(best, won - rate * time)
    expected = (best > 0) & (room > 0) & alive
    if abs(best) > 1e-4:
        np.testing.assert_array_equal(np.asarray(says) & alive, expected)


def beside(step, room, chances=(0.8, 0.7, 0.6), free=4):
    """Siblings of three drafts where `free` places cost nothing and those after them a step."""
    times = [1.0] * free + [1.0 + step] * 8
    policy = survival_tree(siblings=3, positions=12)
    state = policy.init(1, verification_times=times, greedy_siblings=(0.28, 0.2, 0.17), initial_rate=1.5)
    known = state.policy._replace(chances=jnp.asarray([[*chances, *[0.9] * 9]], jnp.float32))
    state = state._replace(policy=known)
    asked = jnp.array([3], jnp.int32), jnp.array([room], jnp.int32), context(1, budget=8)
    return np.asarray(policy.beside(state, *asked))[0, :4].tolist()


def test_siblings_pay_for_a_step_together_where_one_alone_does_not():
    """Worth by draft: 0.056, 0.067 and 0.063 of second candidates, half as much of third ones; R is 1.5."""
    assert beside(0.1, room=4) == [1, 2, 1, 0]  # 0.22 for 0.15
    assert beside(0.1, room=2) == [0, 0, 0, 0]  # 0.13 for 0.15
    assert beside(0.2, room=4) == [0, 0, 0, 0]
    assert beside(0.0, room=9) == [3, 3, 3, 0]  # drafts that were not made have none
    assert beside(0.2, room=9, free=6) == [0, 1, 1, 0]  # what is free is filled
    assert beside(0.0, room=3, chances=(0.95, 0.3, 0.6)) == [0, 3, 0, 0]


def brought(chances, drafts, links, rate, times, right):
    """What the best siblings of the first `links` drafts bring beside `drafts` of them, in loops."""
    worth, reached = [], 1.0
    for chance in chances[:links]:
        missed = reached * (1 - chance)
        for share in right:
            worth.append(missed * share)
            missed *= 1 - share
        reached *= chance
    worth.sort(reverse=True)
    room = min(len(worth), len(times) - 1 - drafts)
    return max(sum(worth[:n]) - rate * (times[drafts + n] - times[drafts]) for n in range(room + 1))


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_a_further_draft_is_weighed_with_the_siblings_beside_it(temperature):
    """A fourth draft buys a width in which siblings have room too: with them it pays at chances where it would not.

    The rule's answer for every chance of that draft against loops.
    """
    times, cost, rate, known = [*[1.0] * 4, *[1.3] * 4], 0.05, 1.5, [0.6, 0.5]
    right = [0.28, 0.2, 0.17] if temperature == 0 else [0.23, 0.13, 0.1]
    asked, grid, pays = context(1, temperature, budget=4), np.linspace(0.02, 0.98, 49), {}
    for siblings in (0, 3):
        policy = survival_tree(siblings=siblings) if siblings else survival()

        def goes_on(chance, policy=policy, siblings=siblings):
            chances = jnp.asarray([[*known, *[0.9] * 30]], jnp.float32)
            seen = constant_distribution(
                1, (1 - chance) / chance - 0.02, chance
            )  # the third draft's, and the next one's
            prior = Prior(0.0, 0.0)
            state = policy.init(1, verification_times=times, drafter_cost=cost, initial_rate=rate, prior=prior)
            own = {"survival": jnp.full(1, 0.5 / chance, jnp.float32)}  # a chance of 0.5 that the drafts survive
            own |= {"chances": chances, "lapse": jnp.zeros(1), "accepted": jnp.full((1, 2), 4 * chance, jnp.float32)}
            state = state._replace(policy=state.policy._replace(**own)) if siblings else state._replace(**own)
            answer, _ = policy.proceed(state, seen, jnp.zeros(1, jnp.int32), jnp.array([3], jnp.int32), asked)
            return bool(answer[0])

        def expected(chance, siblings=siblings):
            own = 0.5 * chance - rate * (cost + times[4] - times[3])  # a chance of 0.5 that the drafts survive
            beside_four = brought([*known, chance, chance], 4, 4, rate, times, right[:siblings])
            return own + beside_four - brought([*known, chance], 3, 3, rate, times, right[:siblings]) > 0

        assert [goes_on(chance) for chance in grid] == [expected(chance) for chance in grid]
        pays[siblings] = sum(map(expected, grid))
    assert pays[0] == 0 < pays[3] < len(grid)
