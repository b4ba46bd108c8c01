"""Rounds with siblings, exactly: shapes, toys and requests are drawn, and rounds are played as in `lossless.rounds`.

Policies do not see the tokens of siblings, so only their acceptance can be wrong: a verifier's `outcomes`, or its next
distribution, by which they are tested. A verifier's rounds have up to SIBLINGS siblings at one draft, or one sibling at
every draft; a policy's have its own shapes. Toys have more tokens than a draft and its siblings.
"""

import numpy as np

from specdec_jax.contrib.trees.seams import TreePolicy
from specdec_jax.contrib.trees.stopping.comb import comb
from specdec_jax.lossless.counterexample import Result, shortest
from specdec_jax.lossless.drawing import Drawing, Shape
from specdec_jax.lossless.enumeration import setting_of
from specdec_jax.lossless.nodes import CHOSEN, DRAWN
from specdec_jax.lossless.rounds import play
from specdec_jax.lossless.toys import drawn_pair
from specdec_jax.types import Monitor, StoppingPolicy, Verifier

SIBLINGS, DRAFTS = 3, 4
REQUESTS = 8
ROUNDS = 2


def prove_siblings(
    policy: StoppingPolicy, verifier: Verifier, drawing: Drawing, monitor: Monitor | None
) -> tuple[Result, np.ndarray]:
    """(the results of drawn rounds with siblings, by draft the sum of the probabilities that a sibling is accepted)."""
    rng, results, accepted = drawing.rng, [], np.zeros(DRAFTS + 1)
    shapes = [np.eye(DRAFTS, dtype=int)[draft] * SIBLINGS for draft in rng.permutation(DRAFTS)] + [np.ones(DRAFTS, int)]
    combs = [comb(links=DRAFTS, siblings=tuple(shape.tolist()), most=SIBLINGS) for shape in shapes]
    batch = int(rng.integers(2, 6))
    cases = [(each, DRAFTS, 3.2) for each in combs] + ([(policy, 2, 3.0)] * 2 if isinstance(policy, TreePolicy) else [])
    for index, (rule, longest, choices) in enumerate(cases):
        vocab = max(SIBLINGS + 3, rule.siblings + 2)
        shape = Shape(vocab, longest, batch, False, False)
        for greedy in (True, False) if index == 0 and not verifier.greedy_only else (verifier.greedy_only,):
            requests = drawing.requests(REQUESTS, shape, greedy, ROUNDS)
            warp = requests.warp
            if not greedy:
                warp = warp._replace(temperature=np.maximum(warp.temperature, np.float32(0.3)))
            kind = np.where((requests.kind == CHOSEN) & (np.arange(REQUESTS) < 2), CHOSEN, DRAWN).astype(np.int8)
            requests = requests._replace(warp=warp, kind=kind)
            toys = [drawn_pair(rng, vocab, float(choices + rng.uniform(-0.8, 0.8))) for _ in range(REQUESTS)]
            setting = setting_of(
                rule,
                verifier,
                monitor,
                longest,
                requests,
                toys,
                tokens=ROUNDS * (longest + 1),
                batch=batch,
                seed=int(rng.integers(2**31)),
            )
            prompts = rng.integers(0, vocab, (REQUESTS, 2)).astype(np.int32)
            results.append(play(setting, ROUNDS, prompts, np.arange(REQUESTS)))
            accepted[: longest + 1] += setting.tally.siblings
    counts = {unit: sum(each.counts[unit] for each in results) for unit in ("rounds", "drafts")}
    error, examples = max(each.measure for each in results), [each.counterexample for each in results]
    return Result(
        error, counts, next((each.wrong for each in results if each.wrong), ""), shortest(examples)
    ), accepted[:DRAFTS]
