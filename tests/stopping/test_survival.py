"""The survival rule against a plain-Python twin, and against what its derivation promises (docs/survival.md)."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import stopping_cases
from stopping_cases import outcome

from specdec_jax.contrib.trees import survival_tree
from specdec_jax.stopping import survival
from specdec_jax.stopping._survival_state import forecast
from specdec_jax.stopping.survival import GREEDY, SAMPLED, Prior
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

    def __init__(self, prior, c, times, temperature=0.0, precision=4.0, rate=None, weight=5.0):
        self.prior, self.c, self.times, self.temperature = prior, c, times, temperature
        if rate is None:
            fixed = [sum(0.6**n for n in range(k + 1)) / (self.verify(k) + k * c) for k in range(33)]
            rate = max(fixed)
        self.p0, self.rate0, self.weight = precision, rate, weight
        self.offset, self.precision, self.tokens, self.time = 0.0, precision, rate * weight, weight
        self.moves = [[0] * 4 for _ in range(5)]
        self.lapses, self.trials = 0.25 - 0.05, 0.0

    def lapse(self):
        return (0.05 + self.lapses) / (5 + self.trials)

    def chance(self, logit):
        return (1 - self.lapse()) / (1 + math.exp(-logit - self.offset))

    def expected(self, level, count):
        """Tokens that so many further drafts bring after a distribution of that level; 4 is a round's start."""
        if count == 0:
            return 0.0
        counts, found = [1 + seen + 2 * (then == 3) for then, seen in enumerate(self.moves[level])], 0.0
        for then, standing in enumerate((0.3, 0.65, 0.88, 0.98)):
            chance = self.chance(math.log(standing / (1 - standing)))
            found += counts[then] / sum(counts) * chance * (1 + self.expected(then, count - 1))
        return found

    def verify(self, drafts):
        return self.times[min(drafts, len(self.times) - 1)]

    def gain(self, brought, drafted, room, paid):
        best = -math.inf
        for count in range(1, room + 1):
            time = (count - paid) * self.cost * self.c + self.verify(drafted + count) - self.verify(drafted)
            net = self.survival * brought(count) - max(self.tokens / self.time, 1 / self.times[0]) * time
            best = max(best, net)
        return best

    def begin(self, room, cost):
        self.survival, self.passes, self.estimates, self.levels, self.cost = 1.0, 0, [], [], cost
        return self.gain(lambda count: self.expected(4, count), 0, room, 0)

    def check(self, entropy, largest, drafted, room):
        p, largest = self.prior, min(max(largest, 1e-4), 1 - 1e-4)
        if self.temperature > 0:
            self.logit = p.bias + p.log_temperature * math.log(self.temperature) - math.log(entropy + 0.02)
        else:
            self.logit = p.bias + math.log(largest / (1 - largest))
        level = sum(1 / (1 + math.exp(-self.logit)) > bound for bound in (0.5, 0.8, 0.95))
        self.estimates.append(self.chance(self.logit))
        self.levels.append(level)
        self.passes += self.cost
        return self.gain(lambda n: self.estimates[-1] * (1 + self.expected(level, n - 1)), drafted, room - drafted, 1)

    def proceed(self, surprise, drafted, room):
        self.survival *= self.chance(self.logit + self.prior.surprise * surprise)
        return self.gain(lambda count: self.expected(self.levels[-1], count), drafted, room - drafted, 0)

    def update(self, drafted, accepted):
        lapse, excess, information, lapses = self.lapse(), 0.0, 0.0, 0.0
        for index, estimates in enumerate(self.estimates[: min(drafted, accepted + 1)]):
            chance, lapsed = estimates / (1 - lapse), 0.0 if index < accepted else lapse / (1 - estimates)
            excess += (1 - lapsed) * ((index < accepted) - chance)
            information += (1 - lapsed) * chance * (1 - chance)
            lapses += lapsed
        self.lapses = 0.98 * self.lapses + lapses
        self.trials = 0.98 * self.trials + min(drafted, accepted + 1)
        self.precision = self.p0 + 0.95 * (self.precision - self.p0) + information
        kept = 1 - 0.05 * self.p0 / self.precision
        self.offset = min(max(self.offset * kept + excess / self.precision, -4), 4)
        self.moves = [[0.98 * seen for seen in row] for row in self.moves]
        for index, level in enumerate(self.levels[: accepted + 1]):
            self.moves[self.levels[index - 1] if index else 4][level] += 1
        prior = self.weight * self.rate0
        self.tokens = prior + 0.98 * (self.tokens - prior) + accepted + 1
        spent = self.verify(drafted) + self.c * self.passes
        self.time = self.weight + 0.98 * (self.time - self.weight) + spent


TIMES = (1.0, 1.0, 1.05, 1.3, 1.3, 1.32, 1.6)


def test_rounds_line_by_line():
    """30 rounds of 40 rows: whenever the twin's gain is not within rounding of 0, both say the same. In some rounds
    another drafter takes its turn, at a cost of its own. Every other row is greedy."""
    rows, rng, decided = 40, np.random.default_rng(3), set()
    temperatures = np.resize([0.0, 0.8], rows)
    is_sampled = temperatures > 0
    policy = compiled(survival())
    costs = rng.uniform(0.02, 0.5, rows)
    state = policy.init(rows, drafter_cost=costs, verification_times=TIMES)
    pairs = zip(temperatures, costs, strict=True)
    twins = [Twin(SAMPLED if warm else GREEDY, cost, TIMES, warm) for warm, cost in pairs]
    for number in range(30):
        room = int(rng.integers(1, K + 1))
        cost = rng.choice([0.0, 0.3, 1.0, 4.0], rows) if number % 3 else None
        now = context(rows, temperatures, room, cost)
        says, state = policy.begin(state, now)
        costs = np.ones(rows) if cost is None else cost
        gains = [twin.begin(room, one) for twin, one in zip(twins, costs, strict=True)]
        decided |= agree("begin", says, gains)
        length = int(rng.integers(1, room + 1))
        for drafted in range(length):
            seen = distributions(rows, 100 * number + drafted, temperatures)
            token = jnp.where(is_sampled, jnp.asarray(rng.integers(0, 30, rows), jnp.int32), seen.top_token)
            says, state = policy.check(state, seen, jnp.full(rows, drafted, jnp.int32), now)
            entropy, largest = np.asarray(seen.entropy, float), np.asarray(seen.max_prob, float)
            rows_seen = zip(twins, entropy, largest, strict=True)
            gains = [twin.check(*distribution, drafted, room) for twin, *distribution in rows_seen]
            decided |= agree("check", says, gains)
            says, state = policy.proceed(state, seen, token, jnp.full(rows, drafted + 1, jnp.int32), now)
            log_q = np.asarray(jnp.take_along_axis(seen.log_prob, token[:, None], axis=1)[:, 0], float)
            surprise = np.where(is_sampled, log_q + entropy, 0.0)
            gains = [t.proceed(s, drafted + 1, room) for t, s in zip(twins, surprise, strict=True)]
            decided |= agree("proceed", says, gains)
        accepted = np.minimum(rng.integers(0, 2 * K, rows), length)
        state = policy.update(state, *outcome([length] * rows, accepted))
        for twin, taken in zip(twins, accepted.tolist(), strict=True):
            twin.update(length, taken)
        np.testing.assert_allclose(state.offset, [twin.offset for twin in twins], rtol=1e-3, atol=1e-4)
        np.testing.assert_allclose(state.lapse, [twin.lapse() for twin in twins], rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(state.moves, [twin.moves for twin in twins], rtol=1e-4)
        np.testing.assert_allclose(policy.threshold(state), [max(t.tokens / t.time, 1.0) for t in twins], rtol=1e-4)
    assert len(decided) == 6, "a branch was never taken"


def agree(name, says, gains):
    clear = np.abs(gains) > 1e-4
    np.testing.assert_array_equal(np.asarray(says)[clear], np.asarray(gains)[clear] > 0, err_msg=name)
    return {(name, bool(answer)) for answer in np.asarray(says)}


ONE = compiled(survival())


def after(state, seen, *rounds):
    """The state of one row after rounds of (drafted, accepted) tokens whose distributions are all alike."""
    for drafted, accepted in rounds:
        _, state = ONE.begin(state, context(1))
        for index in range(drafted):
            _, state = ONE.check(state, seen, jnp.full(1, index, jnp.int32), context(1))
        state = ONE.update(state, *outcome([drafted], [accepted]))
    return state


def constant_distribution(rows, entropy=1.0, largest=0.5):
    fill = lambda value: jnp.full(rows, value, jnp.float32)  # noqa: E731
    return Distribution(
        fill(0.0)[:, None], jnp.zeros(rows, jnp.int32), *(fill(v) for v in (entropy, largest, 0.1, entropy, largest))
    )


def drafted_by(policy, state, seen, budget=30):
    rows = state.offset.shape[0]
    now, zero = context(rows, budget=budget), jnp.zeros(rows, jnp.int32)
    going, state = policy.begin(state, now)
    lengths = np.zeros(rows, int)
    for drafted in range(budget):
        draw, state = policy.check(state, seen, zero + drafted, now)
        lengths += np.asarray(going & draw)
        go_on, state = policy.proceed(state, seen, zero, zero + drafted + 1, now)
        going = going & draw & go_on
    return lengths


def settled(state, level):
    """A state whose row has only ever seen one level of confidence, and no lapse."""
    return state._replace(moves=jnp.asarray(state.moves).at[:, :, level].set(1e6), lapse=jnp.zeros_like(state.lapse))


@pytest.mark.parametrize("level", range(4))
@pytest.mark.parametrize("cost", [0.02, 0.1, 0.4])
def test_a_constant_chance_gives_the_threshold_on_survival(level, cost):
    """SpecDec++'s special case: with verification free, draft token k + 1 iff chance^(k+1) > c R."""
    chance, rate = (0.3, 0.65, 0.88, 0.98)[level], 1.5
    prior = Prior(math.log(chance / (1 - chance)), 0.0, 0.0)  # whose evidence is 0 at a largest probability of 0.5
    state = ONE.init(1, drafter_cost=cost, verification_times=[1.0], greedy=prior, initial_rate=rate)
    expected = 0
    while expected < 30 and chance ** (expected + 1) > cost * rate:
        expected += 1
    assert drafted_by(ONE, settled(state, level), constant_distribution(1)).tolist() == [expected]


def test_a_row_that_gave_up_drafting_tries_again():
    seen = constant_distribution(1)
    gave_up = after(ONE.init(1, drafter_cost=0.5, prior_precision=1.0), seen, *[(1, 0)] * 30)
    begins = [ONE.begin(state, context(1))[0] for state in (gave_up, after(gave_up, seen, *[(0, 0)] * 300))]
    assert [bool(answer[0]) for answer in begins] == [False, True]


TOGETHER = compiled(survival(together=True))


def drafting_state(policy, rows, seed, **hyperparameters):
    """A state in the middle of a draft: other offsets, survivals and rates in every row."""
    rng = np.random.default_rng(seed)
    state = policy.init(rows, verification_times=TIMES, **hyperparameters)
    drawn = {
        "survival": rng.uniform(0.1, 1, rows),
        "offset": rng.normal(0, 1, rows),
        "tokens": rng.uniform(5, 30, rows),
        "moves": rng.integers(0, 9, (rows, 5, 4)),
    }
    return state._replace(**{name: jnp.asarray(values, jnp.float32) for name, values in drawn.items()})


@pytest.mark.parametrize("seed", range(20))
def test_together_is_what_all_rows_win_less_their_time(seed):
    """Summed in loops over rows: each brings what it has room for, and the time is worth something to all who live."""
    rng, rows = np.random.default_rng(seed), 4
    policy, cost = TOGETHER, float(rng.uniform(0.02, 0.9))
    dead_cost = np.where([False, False, seed % 2 == 1, False], 9.0, cost)  # a row that is done counts for nothing
    state = drafting_state(policy, rows, seed, drafter_cost=dead_cost)
    room, drafted = rng.integers(0, K, rows), int(rng.integers(1, 3))
    alive = np.array([True, True, seed % 2 == 0, True])
    now = context(rows)._replace(alive=jnp.asarray(alive), budget=jnp.asarray(room + drafted, jnp.int32))
    seen, token = distributions(rows, seed), jnp.zeros(rows, jnp.int32)
    state = state._replace(forecast=forecast(state))
    _, state = policy.check(state, seen, jnp.full(rows, drafted - 1, jnp.int32), now)
    says, state = policy.proceed(state, seen, token, jnp.full(rows, drafted, jnp.int32), now)
    twins = []
    for row in range(rows):
        twin = Twin(GREEDY, cost, TIMES)
        twin.offset, twin.survival = float(state.offset[row]), float(state.survival[row])
        twin.tokens, twin.moves = float(state.tokens[row]), np.asarray(state.moves[row]).tolist()
        largest = float(seen.max_prob[row])
        logit = GREEDY.bias + math.log(largest / (1 - largest))
        twin.levels = [sum(1 / (1 + math.exp(-logit)) > bound for bound in (0.5, 0.8, 0.95))]
        twins.append(twin)
    rate = sum(max(t.tokens / t.time, 1.0) for t, lives in zip(twins, alive, strict=True) if lives)
    best = -math.inf
    for count in range(1, max(room[alive], default=0) + 1):
        won = 0.0
        for twin, own, lives in zip(twins, room, alive, strict=True):
            won += twin.survival * twin.expected(twin.levels[-1], min(count, own)) if lives else 0.0
        time = count * cost + twins[0].verify(drafted + count) - twins[0].verify(drafted)
        best = max(best, won - rate * time)
    expected = (best > 0) & (room > 0) & alive
    if abs(best) > 1e-4:
        np.testing.assert_array_equal(np.asarray(says) & alive, expected)


def test_together_one_row_decides_as_it_does_alone():
    for seed in range(20):
        decisions = []
        for policy in (ONE, TOGETHER):
            state = drafting_state(policy, 1, seed, drafter_cost=0.2)
            decisions.append(drafted_by(policy, state, distributions(1, seed), budget=K).tolist())
        assert decisions[0] == decisions[1]


def beside(step, room, chances=(0.8, 0.7, 0.6), free=4):
    """Siblings of three drafts where `free` places cost nothing and those after them a step."""
    times = [1.0] * free + [1.0 + step] * 8
    policy = survival_tree(siblings=3, positions=12)
    state = policy.init(1, verification_times=times, greedy_siblings=(0.28, 0.2, 0.17), initial_rate=1.5)
    known = state.policy._replace(predicted=jnp.asarray([[*chances, *[0.9] * 9]], jnp.float32))
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
def test_a_further_draft_is_weighed_with_its_siblings(temperature):
    """A fourth draft buys a width in which siblings have room too: with them it pays at chances where it would not.

    The rule's answer for every chance of that draft against loops.
    """
    times, cost, rate, known = [*[1.0] * 4, *[1.3] * 4], 0.05, 1.5, [0.6, 0.5, 0.4]
    right = [0.28, 0.2, 0.17] if temperature == 0 else [0.23, 0.13, 0.1]
    seen = Distribution(*[jnp.zeros(1)] * 7, token_log_prob=jnp.zeros(1))
    asked, grid, pays = context(1, temperature, budget=4), np.linspace(0.02, 0.98, 49), {}
    for siblings in (0, 3):
        policy = survival_tree(siblings=siblings) if siblings else survival()

        def goes_on(chance, policy=policy, siblings=siblings):
            state = policy.init(1, verification_times=times, drafter_cost=cost, initial_rate=rate)
            known_chances = {
                "predicted": jnp.asarray([[*known, *[0.9] * 29]], jnp.float32),
                "forecast": jnp.full((1, 5, 8), chance, jnp.float32),  # of the next draft, whatever is seen
                "lapse": jnp.zeros(1, jnp.float32),
            }
            if siblings:
                state = state._replace(policy=state.policy._replace(**known_chances))
            else:
                state = state._replace(**known_chances)
            answer, _ = policy.proceed(state, seen, jnp.zeros(1, jnp.int32), jnp.array([3], jnp.int32), asked)
            return bool(answer[0])

        def expected(chance, siblings=siblings):
            own = 0.5 * chance - rate * (cost + times[4] - times[3])  # a chance of 0.5 that the drafts survive
            beside_four = brought([*known, chance], 4, 4, rate, times, right[:siblings])
            return own + beside_four - brought(known, 3, 3, rate, times, right[:siblings]) > 0

        assert [goes_on(chance) for chance in grid] == [expected(chance) for chance in grid]
        pays[siblings] = sum(map(expected, grid))
    assert pays[0] == 0 < pays[3] < len(grid)
