"""What siblings and subtrees would bring, predicted from a trace whose chains are known.

Chances by the drafter's entropy are fitted to other texts than they are used on. Rounds are played along the text: how
far a chain goes is decided as `survival` does, by the rate R of the run itself; then the places of a width are given to
the candidates that are most likely right, and the width is the one whose tokens are worth its time at R. It is a
prediction, not a replay: the rule's details are not those of stopping/survival.py, and after a sibling a drafter that
reads its target is taken to draft as it would at the start of a round.
"""

from collections import Counter
from typing import NamedTuple

import numpy as np

from specdec_jax.costs.cost_model import CostModel
from specdec_jax.replay.candidates import CANDIDATES
from specdec_jax.replay.siblings import candidates, chances, entropies, runs
from specdec_jax.replay.trace import Trace, select

EDGES = np.array([0.05, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])  # nats
AGAIN = 2  # times that rounds are played again at the rate they had


class Fitted(NamedTuple):
    """Chances by bin of the drafter's entropy."""

    accepted: np.ndarray  # [E], of a draft
    right: np.ndarray  # [E, C-1], of its siblings, those before them being wrong
    mean: float  # of accepted


class Known(NamedTuple):
    """A trace as rounds read it."""

    run: np.ndarray  # [N, T+1]
    right: np.ndarray  # [N, T+1], candidates
    bins: np.ndarray  # [N, T+1, K], of the entropies
    length: np.ndarray  # [N]


class Played(NamedTuple):
    """Of every text."""

    seconds: np.ndarray  # [N]
    rounds: np.ndarray  # [N]
    tried: np.ndarray  # [N], siblings and what follows them
    taken: np.ndarray  # [N], rounds that left the chain by a sibling

    def joined(self, other: "Played") -> "Played":
        """The texts of both."""
        return Played(*(np.concatenate(parts) for parts in zip(self, other, strict=True)))


def known(trace: Trace) -> Known:
    """What rounds read of a trace. Raises ValueError for one without candidates."""
    return Known(runs(trace), candidates(trace), np.searchsorted(EDGES, entropies(trace)), trace.length)


def fitted(seen: Known) -> Fitted:
    """Chances, of every draft that a round from anywhere may reach; half a draft more of either kind in each bin."""
    depth, at = np.arange(seen.bins.shape[2]), np.arange(seen.run.shape[1])
    inside = (at[:, None] + depth)[None] < seen.length[:, None, None]
    reached = inside & (depth <= seen.run[..., None])
    hit = reached & (depth < seen.run[..., None])
    size = len(EDGES) + 1
    tried, hits = (np.bincount(seen.bins[which], minlength=size) for which in (reached, hit))
    wrong = reached & ~hit
    by_bin = chances(seen.right[np.nonzero(wrong)[:2]], seen.bins[wrong], size)
    right = np.stack([(found + 0.5) / (of + 1) for found, of in by_bin], axis=1)
    return Fitted((hits + 0.5) / (tried + 1), right, float(hits.sum() / max(tried.sum(), 1)))


def predicted(trace: Trace, costs: CostModel, most: int, siblings: int, trees: bool = False) -> Played:
    """Both halves of the texts, each with chances from the other, in the order of `halves`.

    Args:
        most: longest chain; the trace follows no longer one.
        siblings: most a draft, 0 to 3; 0 plays chains.
        trees: what follows a sibling may be drafted too, down to the chain's depth.
    """
    both = [known(select(trace, half)) for half in halves(trace.num_texts)]
    parts = [play(mine, costs, fitted(other), most, siblings, trees) for mine, other in (both, both[::-1])]
    return parts[0].joined(parts[1])


def halves(texts: int) -> tuple[np.ndarray, np.ndarray]:
    """Every second text, and the others."""
    return np.arange(0, texts, 2), np.arange(1, texts, 2)


class _Rules(NamedTuple):
    """What decides how wide a round is."""

    chance: Fitted
    most: int
    siblings: int
    trees: bool
    costs: CostModel
    passes: np.ndarray  # seconds, by drafts verified
    rate: float  # tokens a second


def play(seen: Known, costs: CostModel, chance: Fitted, most: int, siblings: int, trees: bool) -> Played:
    """The rounds of every text, at the rate they themselves have."""
    passes = costs.pass_times(costs.widths[-1] - 1)
    rules = _Rules(chance, most, min(siblings, CANDIDATES - 1), trees, costs, passes, 1.0 / costs.plain_pass)
    found = _play(seen, rules)
    for _ in range(AGAIN):
        found = _play(seen, rules._replace(rate=float(seen.length.sum() / found.seconds.sum())))
    return found


def _play(seen: Known, rules: _Rules) -> Played:
    counts = np.zeros((4, len(seen.length)))
    for text, end in enumerate(seen.length):
        at = 0
        while at < end:
            bins, run = seen.bins[text, at], int(seen.run[text, at])
            survives, links = _chain(bins, rules, min(rules.most, end - at - 1))
            chosen, width = _leaves(bins, survives, links, rules)
            accepted, taken = min(run, links), 0
            if run < links:
                drafted = chosen.get((run, int(seen.right[text, at])), 0)
                taken = 0 if not drafted else 1 + min(int(seen.run[text, at + run + 1]), drafted - 1)
            time = links * rules.costs.drafter_step + rules.passes[width - 1]
            counts[:, text] += (time, 1, sum(chosen.values()), taken > 0)
            at += accepted + 1 + taken
    return Played(*counts)


def _chain(bins: np.ndarray, rules: _Rules, budget: int) -> tuple[list[float], int]:
    """Of every link the chance that it is reached; and how many are drafted, looking ahead along the staircase."""
    survives, mean = [1.0], rules.chance.mean
    for links in range(budget):
        ahead = np.arange(1, budget - links + 1)
        tokens = survives[-1] * np.cumsum(mean**ahead)
        time = ahead * rules.costs.drafter_step + rules.passes[links + ahead] - rules.passes[links]
        if np.all(tokens <= rules.rate * time):
            return survives, links
        survives.append(survives[-1] * rules.chance.accepted[bins[links]])
    return survives, budget


def _leaves(
    bins: np.ndarray, survives: list[float], links: int, rules: _Rules
) -> tuple[dict[tuple[int, int], int], int]:
    """What is verified beside the chain: (depth, candidate) to the tokens drafted there; and the width."""
    chance, options = rules.chance, []
    for depth in range(links):
        missed = survives[depth] * (1 - chance.accepted[bins[depth]])
        for candidate in range(1, rules.siblings + 1):
            right = chance.right[bins[depth], candidate - 1]
            further = range(links - depth if rules.trees else 1)
            options += [(missed * right * chance.mean**more, depth, candidate) for more in further]
            missed *= 1 - right
    options.sort(reverse=True)
    worth = np.cumsum([0.0, *(option[0] for option in options)])
    widths = [width for width in rules.costs.widths if width > links]
    free = [min(width - links - 1, len(options)) for width in widths]
    gains = [worth[count] - rules.rate * rules.passes[width - 1] for count, width in zip(free, widths, strict=True)]
    best = int(np.argmax(gains))
    chosen = Counter((depth, candidate) for _, depth, candidate in options[: free[best]])
    return dict(chosen), widths[best]
