"""Round-by-round proof for long drafts: a round's tokens, continued by the target, must have the target's distribution.

If this holds for every round, from every text and all states, it holds for the whole decoding (by induction from the
last round). So rounds can be proven one by one, each from the states that earlier rounds left, and drafts of five
tokens take no longer than one round. All sequences have the same weight: the measure is the largest relative error of a
sequence's probability given the round's beginning, so a bias in rare long drafts is detected as clearly as one in all
drafts.

The rounds continue from many prompts, half of them biased to long acceptance, half by chance, carrying the states of
policy, verifier and monitor. For rows of several warps in a batch see together.py.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from specdec_jax.lossless import enumeration
from specdec_jax.lossless.batched import take
from specdec_jax.lossless.counterexample import Counterexample
from specdec_jax.lossless.coverage import Coverage, Tally
from specdec_jax.lossless.enumeration import Outcomes
from specdec_jax.lossless.exact import TOLERANCE, WARPS, monitor_for, warps_for
from specdec_jax.lossless.nodes import Branches, Nodes, Setting, numbers_at
from specdec_jax.lossless.toys import Toy, narrow_pair, with_reading
from specdec_jax.types import Monitor, StoppingPolicy, Verifier

LONGEST = 10
CHOICES = 3.4  # geometric mean of the number of tokens that a toy's drafter may draw in a context
COMPARED = (0, 3)  # rounds that are repeated with their rows in another order
TOYS = (*(narrow_pair(seed=seed) for seed in range(3)), with_reading(narrow_pair(seed=3)))
RAREST = 1e-8  # smaller probabilities are zero up to rounding
# With two tokens (top-k 2) the entropy is at most 0.69 nats, too low to stop drafting with many thresholds.
LONG_WARPS = tuple(warp if "top_k" not in warp else {**warp, "top_k": 6} for warp in WARPS)
OFF = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
DRAWN = 5_500  # approximate number of drafts per round that are enumerated, for drafters that draw


class RoundsCase(NamedTuple):
    """All rounds under one warp."""

    warp: Mapping[str, Any]
    error: float  # largest relative error of a sequence's probability, given the beginning of its round
    rounds: int  # number of rounds
    coverage: Coverage
    counterexample: Counterexample | None = None


class Played(NamedTuple):
    """The results of some rounds."""

    error: float  # the largest relative error of a sequence's probability
    rounds: int  # number of rounds
    alone: bool  # whether the results of rows do not depend on other rows
    counterexample: Counterexample | None


class Round(NamedTuple):
    """One round of all rows: its beginning, all drafts, and all outcomes of each draft."""

    setting: Setting
    nodes: Nodes
    branches: Branches
    outcomes: Outcomes

    @property
    def last_two(self) -> np.ndarray:
        """[N, 2], the last two tokens of each row before the round."""
        return np.take_along_axis(self.nodes.tokens, self.nodes.emitted[:, None] + np.arange(2)[None, :], axis=1)


class RoundsReport(NamedTuple):
    """The worst of all warps, and the coverage of each."""

    error: float
    lossless: bool  # error < TOLERANCE, and rows do not depend on each other
    cases: tuple[RoundsCase, ...]
    alone: bool = True  # whether the results of rows do not depend on other rows or on their index

    @property
    def coverage(self) -> Coverage:
        """Coverage of all warps together."""
        return sum((case.coverage for case in self.cases[1:]), self.cases[0].coverage)


def prove_long_drafts(
    policy: StoppingPolicy,
    verifier: Verifier,
    *,
    monitor: Monitor | None = None,
    max_draft_length: int = 5,
    rounds: int = 8,
    warps: Sequence[Mapping[str, Any]] = LONG_WARPS,
) -> RoundsReport:
    """The exact distribution of every round, given its beginning, with drafts of up to `max_draft_length` tokens.

    Drafters draw their tokens, or choose them (one-hot distributions).

    Args:
        rounds: number of consecutive rounds from each prompt.
        warps: arguments of `make_warp`; a verifier for greedy decoding is tested with those at temperature 0.

    Raises:
        ValueError: no warp is left, or a length below 1 or too long to enumerate.
    """
    if not 1 <= max_draft_length <= LONGEST:
        raise ValueError(f"drafts of 1 to {LONGEST} tokens can be enumerated, got max_draft_length {max_draft_length}")
    monitor, cases, alone = monitor or monitor_for(policy, verifier), [], True
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        for warp in warps_for(verifier, warps):
            setting, played = setting_of(policy, verifier, monitor, max_draft_length, rounds, warp, TOYS), []
            for one_hot in (False, True):
                setting = setting._replace(chosen=one_hot)
                played.append(play(setting, rounds, *_prompts(setting)))
            alone = alone and all(part.alone for part in played)
            cases.append(case_of(warp, setting, played))
    return report_of(cases, alone)


def setting_of(
    policy: StoppingPolicy,
    verifier: Verifier,
    monitor: Monitor,
    longest: int,
    rounds: int,
    warp: Mapping[str, Any],
    toys: Sequence[Toy],
) -> Setting:
    """The setting of `rounds` rounds with drafts of up to `longest` tokens; chains, also for policies of trees."""
    policy = policy if policy.rounds is None else policy.rounds.as_chain(policy)
    tokens = rounds * (longest + 1)
    strategies = policy, verifier, monitor
    return enumeration.setting_of(*strategies, longest, warp, toys, tokens=tokens, limit=tokens + longest + 1)


def case_of(warp: Mapping[str, Any], setting: Setting, played: Sequence[Played]) -> RoundsCase:
    """The case of a setting from the results of its rounds."""
    wrong = next((part.counterexample for part in played if part.counterexample is not None), None)
    error, rounds = max(part.error for part in played), sum(part.rounds for part in played)
    return RoundsCase(warp, error, rounds, setting.tally.coverage, wrong)


def report_of(cases: Sequence[RoundsCase], alone: bool) -> RoundsReport:
    """The report of all cases."""
    worst = max(case.error for case in cases)
    return RoundsReport(worst, worst < TOLERANCE and alone, tuple(cases), alone)


def _prompts(setting: Setting) -> tuple[np.ndarray, np.ndarray]:
    """Prompts [N, 2] and the toy of each [N]: all prompts, or fewer if each has many drafts."""
    vocab = setting.target_distributions.log_prob.shape[-1]
    toy, first, second = (place.ravel() for place in np.indices((len(TOYS), vocab, vocab)))
    allowed = max(2, int(DRAWN / CHOICES**setting.longest)) * (2 if setting.chosen else 1)
    allowed = len(toy) if setting.warp["temperature"] == 0 else allowed
    some = np.random.default_rng(0).permutation(len(toy))[:allowed]
    return np.stack([first, second], axis=1)[some], toy[some]


def play(setting: Setting, rounds: int, prompts: np.ndarray, toy: np.ndarray) -> Played:
    """Enumerates `rounds` rounds from each prompt [N, 2] of toys [N]."""
    rng, worst, alone, wrong = np.random.default_rng(0), 0.0, True, None
    nodes = enumeration.first_nodes(setting, prompts, toy)
    for index in range(rounds):
        this = _round_from(setting, nodes)
        error, counterexample = round_error(this)
        worst, wrong = max(worst, error), wrong or counterexample
        chosen = _one_each(rng, this)
        following = _following(this, chosen)
        if index in COMPARED and not setting.policy.joins_rows:
            alone = alone and _stands_alone(rng, this, chosen, following)
        nodes = following._replace(chance=np.ones(len(following.emitted)))
        if len(nodes.emitted) == 0:
            break
    return Played(worst, rounds * len(prompts), alone, wrong)


def _round_from(setting: Setting, nodes: Nodes) -> Round:
    branches = enumeration.draft_tree(setting, nodes)
    return Round(setting, nodes, branches, enumeration.verified(setting, nodes, branches))


def _following(this: Round, chosen: tuple[np.ndarray, ...]) -> Nodes:
    """The rows at the beginning of the next round, after the chosen (branch, accepted, token)."""
    return enumeration.after(*this, chosen, this.outcomes.chance[chosen])


def _stands_alone(rng: np.random.Generator, this: Round, chosen: tuple[np.ndarray, ...], following: Nodes) -> bool:
    """Whether the round is the same with its rows in another order, and so with other rows in each batch."""
    order = rng.permutation(len(this.nodes.emitted))
    shuffled = _round_from(this.setting._replace(tally=Tally(this.setting.longest)), take(this.nodes, order))
    in_old_order = shuffled.branches._replace(node=order[shuffled.branches.node])
    first, second = _sorted(this.branches), _sorted(in_old_order)
    if len(first) != len(second):
        return False
    rows = take((this.branches._replace(log_q=None), this.outcomes.chance, this.outcomes.verifier), first)
    again = in_old_order._replace(log_q=None), shuffled.outcomes.chance, shuffled.outcomes.verifier
    if not _alike(rows, take(again, second)):
        return False
    place = np.empty(len(first), np.int64)
    place[first] = second
    return _alike(following, _following(shuffled, (place[chosen[0]], *chosen[1:])))


def _sorted(branches: Branches) -> np.ndarray:
    """An order of the branches that does not depend on the order of the rows."""
    beyond = np.arange(branches.text.shape[1])[None, :] >= 2 + branches.drafted[:, None]
    text = np.where(beyond, -1, branches.text)
    return np.lexsort([*text.T, branches.drafted, branches.node])


def _alike(first: Any, second: Any) -> bool:
    """Whether values are equal up to rounding."""
    pairs = zip(jax.tree.leaves(first), jax.tree.leaves(second), strict=True)
    return all(np.allclose(leaf, other, rtol=1e-4, atol=1e-6, equal_nan=True) for leaf, other in pairs)


def round_error(this: Round) -> tuple[float, Counterexample | None]:
    """The largest relative error of a sequence's probability given its node, relative to RAREST for smaller ones.

    Also the shortest beginning of a sequence with an error above TOLERANCE.

    Sequences of j tokens that can occur are listed, with `key` = node * V ** j + their tokens as digits, ascending;
    `distribution` is that of rounds that emitted at most j tokens, the target going on from shorter ones.
    """
    setting, nodes, branches, outcomes = this
    vocab, digits = outcomes.chance.shape[-1], np.arange(outcomes.chance.shape[-1])
    target = np.exp(setting.target_distributions.log_prob)  # [V * V, V], indexed by the last two tokens
    last = this.last_two
    key, pair, table = np.arange(len(last)), nodes.table + last[:, 0] * vocab + last[:, 1], nodes.table
    distribution, goal = np.zeros(len(last)), np.ones(len(last))
    branch_key = branches.node.astype(np.int64)
    for accepted in range(setting.longest + 1):
        distribution, goal = distribution[:, None] * target[pair], goal[:, None] * target[pair]
        emitted = outcomes.chance[:, accepted] / nodes.chance[branches.node][:, None]  # [M, V]
        place = np.minimum(np.searchsorted(key, branch_key), len(key) - 1)
        listed = key[place] == branch_key
        if np.any(emitted[~listed] > 0):
            branch = np.flatnonzero(~listed)[np.argmax(emitted[~listed].sum(axis=1))]
            return np.inf, _impossible(this, int(branch))
        np.add.at(distribution, place[listed], emitted[listed])
        occurs = (distribution > 0) | (goal > 0) | np.isnan(distribution)
        key = (key[:, None] * vocab + digits)[occurs]
        pair = (table[:, None] + pair[:, None] % vocab * vocab + digits)[occurs]
        table = np.broadcast_to(table[:, None], occurs.shape)[occurs]
        distribution, goal = distribution[occurs], goal[occurs]
        if accepted < setting.longest:
            branch_key = branch_key * vocab + branches.text[:, 2 + accepted]
    error = np.max(_relative(distribution, goal))
    if error < TOLERANCE:
        return float(error), None
    wrong = _shortest(this, key, distribution, goal)
    return (float(error) if np.isfinite(error) else np.inf), wrong


def _relative(distribution: np.ndarray, goal: np.ndarray) -> np.ndarray:
    return np.abs(distribution - goal) / np.maximum(goal, RAREST)


def _shortest(this: Round, key: np.ndarray, distribution: np.ndarray, goal: np.ndarray) -> Counterexample:
    """The shortest wrong beginning of sequences of K + 1 tokens, with arguments as in `round_error`."""
    vocab, longest, begin, before = this.outcomes.chance.shape[-1], this.setting.longest + 1, key, (key, goal)
    for count in range(1, longest + 1):
        begin, group = np.unique(key // vocab ** (longest - count), return_inverse=True)
        probability, expected = (np.bincount(group, weights) for weights in (distribution, goal))
        off = ~(_relative(probability, expected) < TOLERANCE)
        if np.any(off):
            break
        before = begin, expected
    else:
        raise AssertionError("sequences that are wrong as a whole are wrong at their last token")
    wrong = np.argmax(np.where(off, np.nan_to_num(np.abs(probability - expected), nan=np.inf), -1.0))
    node, tokens = int(begin[wrong]) // vocab**count, int(begin[wrong]) % vocab**count
    parent = 1.0 if count == 1 else before[1][np.searchsorted(before[0], begin[wrong] // vocab)]
    numbers = float(probability[wrong] / parent), float(expected[wrong] / parent)
    digits = tuple(tokens // vocab**place % vocab for place in reversed(range(count)))
    return _counterexample(this, node, digits, numbers)


def _impossible(this: Round, branch: int) -> Counterexample:
    """A draft with an accepted token whose probability under the target is zero."""
    setting, _, branches, outcomes = this
    vocab, node, text = outcomes.chance.shape[-1], int(branches.node[branch]), branches.text[branch].astype(np.int64)
    rows = branches.table[branch] + text[:-2] * vocab + text[1:-1]
    accepted = int(np.argmax(np.exp(setting.target_distributions.log_prob)[rows, text[2:]] == 0))
    same = (branches.node == node) & np.all(branches.text[:, 2 : 3 + accepted] == text[2 : 3 + accepted], axis=1)
    probability = outcomes.chance[same][:, accepted + 1 :].sum() / branches.chance[branches.node == node].sum()
    tokens = tuple(map(int, text[2 : 3 + accepted]))
    return _counterexample(this, node, tokens, (float(probability), 0.0))


def _counterexample(this: Round, node: int, tokens: tuple[int, ...], numbers: tuple[float, float]) -> Counterexample:
    """The counterexample with the draft that contributes most of the last token's probability."""
    setting, _, branches, outcomes = this
    accepted, drafts = len(tokens) - 1, branches.text[:, 2:]
    same = (branches.node == node) & np.all(drafts[:, :accepted] == np.array(tokens[:-1], np.int32), axis=1)
    some, draft = np.flatnonzero(same), None
    if len(some):
        brings = outcomes.chance[some, accepted, tokens[-1]]
        if accepted < setting.longest:
            longer = outcomes.chance[some, accepted + 1 :].sum(axis=(1, 2))
            brings = brings + np.where(drafts[some, accepted] == tokens[-1], longer, 0.0)
        best = some[np.argmax(np.nan_to_num(brings))]
        draft = tuple(map(int, drafts[best, : branches.drafted[best]]))
    numbers_of_row = numbers_at(setting, branches.table[branches.node == node][:1])
    warp = {name: np.asarray(number).item() for name, number in numbers_of_row.items() if number != OFF.get(name)}
    prompt = tuple(map(int, this.last_two[node]))
    return Counterexample("round by round", prompt, warp, tokens, len(tokens), *numbers, draft=draft)


def _one_each(rng: np.random.Generator, this: Round) -> tuple[np.ndarray, ...]:
    """One (branch, accepted, token) per node: by probability in even ones, in odd ones biased to long acceptance.

    A node whose outcomes are not probabilities, because of a wrong verifier, has none.
    """
    branch, accepted, token = np.nonzero(this.outcomes.chance > 0)  # some are slightly negative by rounding
    node = this.branches.node[branch]
    weight = np.log(this.outcomes.chance[branch, accepted, token])
    weight = np.where(node % 2 == 1, 2.0 * accepted + 0.2 * weight, weight)
    order = weight + rng.gumbel(size=len(weight))
    best = np.full(len(this.nodes.emitted), -np.inf)
    np.maximum.at(best, node, order)
    index = np.flatnonzero(order == best[node])
    index = index[np.argsort(node[index], kind="stable")]
    return take((branch, accepted, token), index)
