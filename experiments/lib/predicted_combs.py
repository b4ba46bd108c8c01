"""What siblings and trees would bring, predicted from a trace whose chains are known.

Chances by the drafter's entropy are fitted to other texts than they are used on. Rounds are played along the text: how
far a chain goes is decided as `survival` does, by the rate R of the run itself; then the places of a width are given to
the candidates that are most likely right, and the width is the one whose tokens are worth its time at R. It is a
prediction, not a replay: the rule's details are not those of stopping/survival.py, and after a sibling a drafter that
reads its target is taken to draft as it would at the start of a round.
"""

from typing import NamedTuple

import numpy as np

from specdec_jax.contrib.trees.rejections import candidates, chances, entropies, runs
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.replay.candidates import CANDIDATES
from specdec_jax.replay.trace import Trace, select

EDGES = np.array([0.05, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])  # nats
AGAIN = 2  # times that rounds are played again at the rate they had


class Tree(NamedTuple):
    """How siblings are drafted on."""

    expanded: int  # nodes that each pass of the drafter reads beside the chain's last tokens
    levels: int  # of nodes that may be expanded: 1 are siblings, 2 their first children too ...
    children: int  # candidates after each


AS_BUILT = Tree(expanded=2, levels=1, children=3)
UNBOUNDED = Tree(expanded=1000, levels=1000, children=1)  # whatever follows a sibling, as a chain


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


def predicted(trace: Trace, costs: CostModel, most: int, siblings: int, tree: Tree | None = None) -> Played:
    """Both halves of the texts, each with chances from the other, in the order of `halves`.

    Args:
        most: longest chain; the trace follows no longer one.
        siblings: most a draft, 0 to 3; 0 plays chains.
        tree: what follows siblings is drafted too; none of those that the last pass gives.
    """
    both = [known(select(trace, half)) for half in halves(trace.num_texts)]
    parts = [play(mine, costs, fitted(other), most, siblings, tree) for mine, other in (both, both[::-1])]
    return parts[0].joined(parts[1])


def halves(texts: int) -> tuple[np.ndarray, np.ndarray]:
    """Every second text, and the others."""
    return np.arange(0, texts, 2), np.arange(1, texts, 2)


class _Rules(NamedTuple):
    """What decides how wide a round is."""

    chance: Fitted
    most: int
    siblings: int
    tree: Tree | None
    costs: CostModel
    passes: np.ndarray  # seconds, by drafts verified
    rate: float  # tokens a second


def play(seen: Known, costs: CostModel, chance: Fitted, most: int, siblings: int, tree: Tree | None = None) -> Played:
    """The rounds of every text, at the rate they themselves have."""
    passes = costs.pass_times(costs.widths[-1] - 1)
    rules = _Rules(chance, most, min(siblings, CANDIDATES - 1), tree, costs, passes, 1.0 / costs.plain_pass)
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
            accepted = min(run, links)
            taken = _taken(seen, text, at, run, chosen) if run < links else 0
            time = links * rules.costs.drafter_step + rules.passes[width - 1]
            counts[:, text] += (time, 1, len(chosen), taken > 0)
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


class _Node(NamedTuple):
    """A token beside the chain: a sibling, or what follows one by first children."""

    depth: int  # of the draft that its sibling is beside
    sibling: int  # which one, from 1 on
    level: int  # tokens between the sibling and it, and itself; 0: the sibling
    child: int  # which candidate, from 0 on


def _taken(seen: Known, text: int, at: int, run: int, chosen: set[_Node]) -> int:
    """Tokens accepted beside a chain of which `run` are."""
    sibling, taken, begin = int(seen.right[text, at]), 0, at + run + 1
    right = 0 if begin >= seen.run.shape[1] else int(seen.run[text, begin])  # first children in a row
    while _Node(run, sibling, taken, 0) in chosen and taken <= right:
        taken += 1
    other = 0 if taken != right + 1 or begin >= seen.run.shape[1] else int(seen.right[text, begin])
    return taken + (other > 0 and _Node(run, sibling, taken, other) in chosen)


def _leaves(bins: np.ndarray, survives: list[float], links: int, rules: _Rules) -> tuple[set[_Node], int]:
    """What is verified beside the chain, and the width."""
    options = _siblings(bins, survives, links, rules)
    options += _children(dict(options), links, rules)
    options.sort(key=lambda option: option[1], reverse=True)
    worth = np.cumsum([0.0, *(value for _, value in options)])
    widths = [width for width in rules.costs.widths if width > links]
    free = [min(width - links - 1, len(options)) for width in widths]
    gains = [worth[count] - rules.rate * rules.passes[width - 1] for count, width in zip(free, widths, strict=True)]
    best = int(np.argmax(gains))
    return {node for node, _ in options[: free[best]]}, widths[best]


def _siblings(bins: np.ndarray, survives: list[float], links: int, rules: _Rules) -> list[tuple[_Node, float]]:
    """Every sibling, and what it is worth in tokens."""
    found = []
    for depth in range(links):
        missed = survives[depth] * (1 - rules.chance.accepted[bins[depth]])
        for candidate in range(1, rules.siblings + 1):
            right = rules.chance.right[bins[depth], candidate - 1]
            found.append((_Node(depth, candidate, 0, 0), missed * right))
            missed *= 1 - right
    return found


def _children(siblings: dict[_Node, float], links: int, rules: _Rules) -> list[tuple[_Node, float]]:
    """What follows those that the passes after the first read, the best ones at hand first."""
    found: list[tuple[_Node, float]] = []
    if rules.tree is None:
        return found
    ready: list[tuple[float, _Node]] = []
    for number in range(1, links):
        ready += [(worth, node) for node, worth in siblings.items() if node.depth == number - 1]
        ready.sort(reverse=True)
        read, ready = ready[: rules.tree.expanded], ready[rules.tree.expanded :]
        for worth, node in read:
            each = _candidates(worth, rules)
            following = [node._replace(level=node.level + 1, child=child) for child in range(len(each))]
            found += zip(following, each, strict=True)
            if node.level + 1 < rules.tree.levels:
                ready.append((each[0], following[0]))
    return found


def _candidates(worth: float, rules: _Rules) -> list[float]:
    """What each candidate after a node of that worth is worth; nothing is known of its distribution."""
    assert rules.tree is not None
    mean, right = rules.chance.mean, rules.chance.right.mean(axis=0)
    found, missed = [worth * mean], worth * (1 - mean)
    for candidate in range(rules.tree.children - 1):
        found.append(missed * right[candidate])
        missed *= 1 - right[candidate]
    return found
