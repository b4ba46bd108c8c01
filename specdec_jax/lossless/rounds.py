"""Exact proof, round by round: the tokens that a round emits must have the target's conditional distributions.

If this holds for every round, from every text and all states, it holds for the whole decoding, by induction from the
last round. So rounds are enumerated one by one, each from the states that earlier ones left, and long drafts take no
longer than one round. The measure of a text is the total variation of its next token given the text, among rounds that
emit that token: a bias in long drafts, which are rare, is about as visible as one in all.

Requests, texts, warps and states are drawn (drawing.py).
"""

from typing import Any

import numpy as np

from specdec_jax.lossless import enumeration
from specdec_jax.lossless.batched import take_rows
from specdec_jax.lossless.drawing import Drawing, Shape
from specdec_jax.lossless.enumeration import Branches, Ends, Nodes, Setting
from specdec_jax.lossless.results import Counterexample, Coverage, Result, shown_warp
from specdec_jax.lossless.toys import drawn_pair
from specdec_jax.types import Monitor, StoppingPolicy, Verifier

ROUNDS, DRAFTS = 8, 8_000  # rounds of each request, and approximate number of drafts per round of a case
MANY = 256  # rounds of the few requests of a case with drafts of one token
TOLERANCE = 1e-5  # of a total variation, in float32; lossless rules have under 1e-6
FLOOR = 0.01  # texts that fewer of a node's rounds emit count as this share, because of rounding in float32
LEAK = 1e-8  # largest probability, by rounding, of a token that the target excludes


def prove_rounds(
    policy: StoppingPolicy | None,
    verifier: Verifier,
    drawing: Drawing,
    shape: Shape,
    *,
    monitor: Monitor | None = None,
    rounds: int = ROUNDS,
    drafts: int = DRAFTS,
) -> tuple[Result, Result, Coverage]:
    """Enumerated rounds of drawn toys and requests: (their error, rows compared among other rows, coverage).

    Args:
        policy: None: drafts end at random. Policies of trees draft chains here.
        drafts: approximate number of drafts per round of all requests, which decides how many there are.
    """
    rng, count = drawing.rng, 256 if shape.longest <= 2 else 96 if shape.longest <= 4 else 24
    count = count if rounds <= ROUNDS else 4 * shape.batch
    chain = None if policy is None else policy.as_chain()
    choices = min(shape.vocab_size, max(1.5, (drafts / count) ** (1 / max(shape.longest, 1))))
    toys = [drawn_pair(rng, shape.vocab_size, choices, shape.reads) for _ in range(count)]
    requests = drawing.requests(count, shape, verifier.greedy_only, rounds)
    size: dict[str, Any] = {"tokens": rounds * (shape.longest + 1), "batch": shape.batch}
    seed = int(rng.integers(2**31))
    setting = enumeration.setting_of(chain, verifier, monitor, shape.longest, requests, toys, **size, seed=seed)
    prompts = rng.integers(0, shape.vocab_size, (count, 2)).astype(np.int32)
    result, neighbours = enumerate_rounds(setting, rounds, prompts, np.arange(count)), setting.neighbours
    return result, Result(np.nan, {"answers": neighbours.compared}, neighbours.wrong), setting.tally


def enumerate_rounds(setting: Setting, rounds: int, prompts: np.ndarray, request: np.ndarray) -> Result:
    """Enumerates `rounds` rounds from each prompt [N, 2] of the requests [N]."""
    rng, error, num_rounds, drafts, wrong = setting.neighbours.rng, 0.0, 0, 0, None
    nodes = enumeration.first_nodes(setting, prompts, request)
    for _ in range(rounds):
        branches, ends = enumeration.ends_of_round(setting, nodes)
        worst, counterexample = round_error(setting, nodes, branches, ends)
        error, wrong = max(error, worst), wrong or counterexample
        num_rounds, drafts = num_rounds + len(nodes.emitted), drafts + len(branches.node)
        # One end per node: by probability in even nodes, in odd ones biased to long texts. A node whose ends are not
        # probabilities, because of a wrong verifier, has none.
        index = np.flatnonzero(ends.chance > 0)  # some are slightly negative by rounding
        node = branches.node[ends.branch[index]]
        weight = np.log(ends.chance[index])
        weight = np.where(node % 2 == 1, 2.0 * ends.length[index] + 0.2 * weight, weight)
        order = weight + rng.gumbel(size=len(weight))
        best = np.full(len(nodes.emitted), -np.inf)
        np.maximum.at(best, node, order)
        chosen = index[order == best[node]]
        chosen = chosen[np.argsort(branches.node[ends.branch[chosen]], kind="stable")]
        nodes = ends.following(chosen, ends.chance[chosen])
        nodes = take_rows(nodes, nodes.emitted < setting.requests.limit[nodes.request])
        if len(nodes.emitted) == 0:
            break
        nodes = nodes._replace(chance=np.ones(len(nodes.emitted)))
    return Result(error, {"rounds": num_rounds, "drafts": drafts}, setting.neighbours.wrong, wrong)


def round_error(setting: Setting, nodes: Nodes, branches: Branches, ends: Ends) -> tuple[float, Counterexample | None]:
    """The largest total variation of an emitted token from the target, given the text before it.

    Among rounds from one node that emit at least j tokens, the j-th has the target's distribution given the others.
    Also the shortest text with an error of TOLERANCE or more, as a counterexample.
    """
    vocab, width = setting.vocab_size, ends.text.shape[1]
    target = np.exp(setting.target_distributions.log_prob.astype(np.float64)).reshape(-1, vocab, vocab, vocab)
    target /= target.sum(axis=-1, keepdims=True)
    node = branches.node[ends.branch]
    emits = np.arange(width)[None, :] < ends.length[:, None]
    digits = np.where(emits, ends.text + 1, 0).astype(np.int64)  # 0: nothing
    key = node.astype(np.int64)
    for position in range(width):
        key = key * (vocab + 1) + digits[:, position]
    order = np.argsort(key, kind="stable")
    node, chance = node[order], ends.chance[order] / nodes.chance[node[order]]
    last_two = np.take_along_axis(nodes.tokens, nodes.emitted[:, None] + np.arange(2)[None, :], axis=1)
    text = np.concatenate([last_two[node], digits[order] - 1], axis=1)
    columns: list[Any] = [ends.branch[order], node, digits[order], key[order], chance, text]
    worst, wrong = 0.0, None
    for position in range(width):
        columns = [column[columns[2][:, position] > 0] for column in columns]
        branch, node, digits, key, chance, text = columns
        if len(node) == 0:
            break
        base = (vocab + 1) ** (width - position - 1)
        first = np.flatnonzero(np.diff(key // base, prepend=-1))  # of each text with this token
        group = np.cumsum(np.diff((key // base // (vocab + 1))[first], prepend=-1) != 0) - 1  # its text before
        mass = np.add.reduceat(chance, first)
        before = np.bincount(group, weights=mass)
        wanted = target[nodes.request[node[first]], *text[first, position : position + 2].T, text[first, position + 2]]
        off = np.abs(mass - before[group] * wanted)
        missing = before - np.bincount(group, weights=before[group] * wanted)  # of tokens that are not emitted
        scale = np.maximum(before, FLOOR)
        error = 0.5 * (np.bincount(group, weights=off) + np.maximum(missing, 0.0)) / scale
        leaks = (wanted == 0) & (mass > LEAK * scale[group])
        np.maximum.at(error, group[leaks], mass[leaks] / scale[group[leaks]] + TOLERANCE)
        error = np.where(np.isfinite(error), error, np.inf)
        largest = int(np.argmax(error))
        worst = max(worst, float(error[largest]))
        if wrong is None and error[largest] >= TOLERANCE:
            texts = np.flatnonzero(group == largest)
            each = texts[np.argmax(np.nan_to_num(off[texts], nan=np.inf))]
            same = np.flatnonzero(key // base == key[first[each]] // base)
            draft = int(branch[same[np.argmax(np.nan_to_num(chance[same]))]])
            wrong = Counterexample(
                f"round by round, {setting.requests.before[branches.request[draft]]} tokens into a text",
                tuple(map(int, branches.text[draft, :2])),
                shown_warp(setting.requests.warp, int(branches.request[draft])),
                tuple(map(int, text[first[each], 2 : position + 3])),
                float(mass[each] / before[largest]),
                float(wanted[each]),
                draft=tuple(map(int, branches.text[draft, 2 : 2 + branches.drafted[draft]])),
            )
    return worst, wrong
