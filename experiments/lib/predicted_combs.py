"""Combs and trees predicted from a trace of chains.

The chances by the drafter's entropy are fitted to other texts than those they are used on. Rounds are played along the
text: the length of the chain is decided as `survival` does, by the rate R of the same run; then the places of a
verification width go to the candidates that are most likely right, and the width is the one whose tokens are worth
their time at R. This is no replay: details of the rule differ from contrib/trees, and a drafter that reads its target
is assumed to draft after a sibling as it does at the start of a round.
"""

from typing import NamedTuple

import numpy as np

from specdec_jax.contrib.trees.rejections import candidates, chances, entropies, runs
from specdec_jax.costs.cost_model import CostModel
from specdec_jax.replay.candidates import CANDIDATES
from specdec_jax.replay.trace import Trace, select

EDGES = np.array([0.05, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0])  # nats
ITERATIONS = 3  # the rate of each is that of the rounds before; the first has the rate of plain decoding


class Tree(NamedTuple):
    """What is drafted after siblings."""

    expanded: int  # nodes that each pass of the drafter reads in addition to the chain
    levels: int  # of nodes that may be expanded: 1 are siblings, 2 also their first children ...
    children: int  # candidates after each


AS_BUILT = Tree(expanded=2, levels=1, children=3)
UNBOUNDED = Tree(expanded=1000, levels=1000, children=1)  # a chain after every sibling


class Fitted(NamedTuple):
    """Chances by bin of the drafter's entropy."""

    accepted: np.ndarray  # [E], of a draft
    right: np.ndarray  # [E, C-1], of its siblings, those before them being wrong
    mean: float  # of accepted


class Starts(NamedTuple):
    """A trace by the position at which a round starts."""

    run: np.ndarray  # [N, T+1], drafts accepted in a row
    right: np.ndarray  # [N, T+1], the right candidate after them; 0: none
    bins: np.ndarray  # [N, T+1, K], of the entropies
    length: np.ndarray  # [N]


class Predicted(NamedTuple):
    """Totals of each text."""

    seconds: np.ndarray  # [N]
    rounds: np.ndarray  # [N]
    tried: np.ndarray  # [N], siblings and what follows them
    taken: np.ndarray  # [N], rounds that left the chain by a sibling


def starts(trace: Trace) -> Starts:
    """The rounds of a trace. Raises ValueError for one without candidates."""
    return Starts(runs(trace), candidates(trace), np.searchsorted(EDGES, entropies(trace)), trace.length)


def fitted(seen: Starts) -> Fitted:
    """Chances over every draft that a round from any position reaches, with half a count more of either outcome."""
    depth, at = np.arange(seen.bins.shape[2]), np.arange(seen.run.shape[1])
    inside = (at[:, None] + depth)[None] < seen.length[:, None, None]
    reached = inside & (depth <= seen.run[..., None])
    hit = reached & (depth < seen.run[..., None])
    size = len(EDGES) + 1
    tried, hits = (np.bincount(seen.bins[which], minlength=size) for which in (reached, hit))
    wrong = reached & ~hit
    by_bin = chances(seen.right[np.nonzero(wrong)[:2]], seen.bins[wrong], size)
    right = np.stack([(count + 0.5) / (of + 1) for count, of in by_bin], axis=1)
    return Fitted((hits + 0.5) / (tried + 1), right, float(hits.sum() / max(tried.sum(), 1)))


def halves(texts: int) -> tuple[np.ndarray, np.ndarray]:
    """Every second text, and the others."""
    return np.arange(0, texts, 2), np.arange(1, texts, 2)


def predicted(trace: Trace, costs: CostModel, longest: int, siblings: int, tree: Tree | None = None) -> Predicted:
    """Both halves of the texts, each with chances from the other, in the order of `halves`.

    Args:
        longest: chain, at most the trace's.
        siblings: largest number a draft, 0 to 3; 0 plays chains.
        tree: also drafts what follows siblings, except those of the last pass.
    """
    both = [starts(select(trace, half)) for half in halves(trace.num_texts)]
    parts = [play(seen, costs, fitted(other), longest, siblings, tree) for seen, other in (both, both[::-1])]
    return Predicted(*(np.concatenate(values) for values in zip(*parts, strict=True)))


class _Settings(NamedTuple):
    """What decides the shape of a round."""

    chance: Fitted
    siblings: int
    tree: Tree | None
    costs: CostModel
    passes: np.ndarray  # seconds, by drafts verified
    rate: float  # tokens a second


class _Node(NamedTuple):
    """A token outside the chain: a sibling, or a descendant of one by first children."""

    depth: int  # of the draft whose sibling it is or follows
    sibling: int  # which one, from 1 on
    level: int  # 0: the sibling; 1: its children ...
    child: int  # which candidate after its parent, from 0 on


def play(
    seen: Starts, costs: CostModel, chance: Fitted, longest: int, siblings: int, tree: Tree | None = None
) -> Predicted:
    """The rounds of every text, decided by the rate that they themselves have."""
    passes = costs.pass_times(costs.widths[-1] - 1)
    settings = _Settings(chance, min(siblings, CANDIDATES - 1), tree, costs, passes, 1.0 / costs.plain_pass)
    for _ in range(ITERATIONS):
        counts = np.zeros((4, len(seen.length)))
        for text, end in enumerate(seen.length):
            at = 0
            while at < end:
                bins, run = seen.bins[text, at], int(seen.run[text, at])
                survives, links = _chain(bins, settings, min(longest, end - at - 1))
                chosen, width = _chosen(bins, survives, links, settings)
                taken = _taken(seen, text, at, run, chosen) if run < links else 0
                counts[:, text] += (links * costs.drafter_step + passes[width - 1], 1, len(chosen), taken > 0)
                at += min(run, links) + 1 + taken
        settings = settings._replace(rate=float(seen.length.sum() / counts[0].sum()))
    return Predicted(*counts)


def _chain(bins: np.ndarray, settings: _Settings, budget: int) -> tuple[list[float], int]:
    """The chance that each link is reached, and the number of links, looking ahead along the staircase of costs."""
    survives, mean = [1.0], settings.chance.mean
    for links in range(budget):
        ahead = np.arange(1, budget - links + 1)
        tokens = survives[-1] * np.cumsum(mean**ahead)
        time = ahead * settings.costs.drafter_step + settings.passes[links + ahead] - settings.passes[links]
        if np.all(tokens <= settings.rate * time):
            return survives, links
        survives.append(survives[-1] * settings.chance.accepted[bins[links]])
    return survives, budget


def _taken(seen: Starts, text: int, at: int, run: int, chosen: set[_Node]) -> int:
    """Tokens accepted outside the chain after `run` of its drafts."""
    sibling, taken, begin = int(seen.right[text, at]), 0, at + run + 1
    inside = begin < seen.run.shape[1]
    first_children = int(seen.run[text, begin]) if inside else 0  # right in a row
    while _Node(run, sibling, taken, 0) in chosen and taken <= first_children:
        taken += 1
    other = int(seen.right[text, begin]) if inside and taken == first_children + 1 else 0
    return taken + (other > 0 and _Node(run, sibling, taken, other) in chosen)


def _chosen(bins: np.ndarray, survives: list[float], links: int, settings: _Settings) -> tuple[set[_Node], int]:
    """The nodes verified outside the chain, and the width."""
    chance, worth_of = settings.chance, {}  # of nodes, in tokens
    for depth in range(links):
        wrong = survives[depth] * (1 - chance.accepted[bins[depth]])
        each = _in_turn(wrong, chance.right[bins[depth], : settings.siblings])
        worth_of |= {_Node(depth, sibling, 0, 0): worth for sibling, worth in enumerate(each, 1)}
    options = [*worth_of.items(), *_children(worth_of, links, settings)]
    options.sort(key=lambda option: option[1], reverse=True)
    total = np.cumsum([0.0, *(worth for _, worth in options)])
    widths = [width for width in settings.costs.widths if width > links]
    places = [min(width - links - 1, len(options)) for width in widths]
    gains = [total[n] - settings.rate * settings.passes[width - 1] for n, width in zip(places, widths, strict=True)]
    best = int(np.argmax(gains))
    return {node for node, _ in options[: places[best]]}, widths[best]


def _children(siblings: dict[_Node, float], links: int, settings: _Settings) -> list[tuple[_Node, float]]:
    """What follows the nodes that passes after the first read, the best nodes first; worth in tokens."""
    children: list[tuple[_Node, float]] = []
    tree, mean, right = settings.tree, settings.chance.mean, settings.chance.right.mean(axis=0)
    if tree is None:
        return children
    ready: list[tuple[float, _Node]] = []
    for number in range(1, links):
        ready += [(worth, node) for node, worth in siblings.items() if node.depth == number - 1]
        ready.sort(reverse=True)
        read, ready = ready[: tree.expanded], ready[tree.expanded :]
        for worth, node in read:  # whose distribution is not in the trace, so that its candidates have mean chances
            each = [worth * mean, *_in_turn(worth * (1 - mean), right[: tree.children - 1])]
            following = [node._replace(level=node.level + 1, child=child) for child in range(len(each))]
            children += zip(following, each, strict=True)
            if node.level + 1 < tree.levels:
                ready.append((each[0], following[0]))
    return children


def _in_turn(chance: float, right: np.ndarray) -> list[float]:
    """The chance that each candidate is right and those before it are not; `chance` is that of the whole case."""
    each = []
    for of_candidate in right:
        each.append(chance * of_candidate)
        chance *= 1 - of_candidate
    return each
