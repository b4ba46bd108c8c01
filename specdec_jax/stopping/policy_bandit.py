"""A bandit over stopping policies: TapOut (arXiv 2511.02017), one policy per round.

In every round one of the policies drafts and updates its state; the others keep theirs. After each was tried once, UCB1
plays the largest `mean + exploration * sqrt(2 ln(rounds) / pulls)`, Thompson sampling the largest draw from a Gaussian
with that mean and the standard deviation `exploration / sqrt(pulls)`. Choices left open: the reward is tokens per time
of the cost model of `bandit`, including discarded passes; the arms are the paper's max-confidence, SVIP and AdaEDL,
AdaEDL also with its checked token kept, and a static length; arms are chosen per round, not per token; a round without
a drafter pass is not counted. Exploration has a scale, because rewards are not in [0, 1]: 0.1 for UCB1 (as `bandit`), 1
for Thompson sampling, about the spread of one round's reward.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.scipy.special import ndtri

from specdec_jax.decoding.sampling import policy_uniforms
from specdec_jax.hyperparameters import full, select_rows
from specdec_jax.ranges import NotNegative
from specdec_jax.stopping._readings import relative_drafter_cost
from specdec_jax.stopping._thresholded import in_unit
from specdec_jax.stopping.adaedl import adaedl
from specdec_jax.stopping.bandit import Arms, begin_arms, best, learn, samples, upper_bounds
from specdec_jax.stopping.max_confidence import max_confidence
from specdec_jax.stopping.static import static
from specdec_jax.stopping.svip import svip
from specdec_jax.strategy import strategy
from specdec_jax.types import Array, Distribution, Draft, PolicyState, RoundContext, StoppingPolicy, VerificationResult

UCB_WIDTH = 2.0
EXPLORATION = {"ucb1": 0.1, "thompson": 1.0}


class PolicyBanditState(NamedTuple):
    arms: Arms
    passes: Array  # [B] int32, drafter passes of this round; -1: the chosen policy declined, which counts as a round
    policies: tuple[PolicyState, ...]


@strategy
def policy_bandit(policies: Sequence[StoppingPolicy] | None = None, method: str = "ucb1") -> StoppingPolicy:
    """One of several stopping policies in each round, chosen by its past rewards.

    Args:
        policies: two or more policies (default: max_confidence keeping its token, svip, adaedl, adaedl keeping its
            token, static), such as `[adaedl(threshold=0.5), static(draft_length=2)]`.
        method: 'ucb1' or 'thompson'. Thompson's draws are functions of the row's seed and number of emitted tokens.

    Hyperparameters (`init`), all >= 0: exploration (tokens per target pass; 0.1 for ucb1 and 1 for thompson unless
    given), drafter_cost 0.1 (a drafter pass, in target passes), verification_cost 0.02 (one more token to verify).

    Raises:
        ValueError: an unknown method, fewer than two policies, or an entry that is not a policy of chains.
    """
    if method not in EXPLORATION:
        raise ValueError(f"policy_bandit's method must be one of {', '.join(EXPLORATION)}, got {method!r}")
    if policies is None:
        policies = max_confidence(keep_checked_token=True), svip(), adaedl(), adaedl(keep_checked_token=True), static()
    if isinstance(policies, StoppingPolicy) or not isinstance(policies, Sequence) or len(policies) < 2:
        got = len(policies) if isinstance(policies, (list, tuple)) else f"a {type(policies).__name__}"
        raise ValueError(f"policy_bandit needs a sequence of at least two policies, got {got}")
    for policy in policies:
        if isinstance(policy, StoppingPolicy) and not policy.drafts_chains:
            raise ValueError(f"policy_bandit chooses among rules of chains, and {policy.name} drafts trees")
        if not isinstance(policy, StoppingPolicy):
            raise ValueError(f"policy_bandit chooses between policies, got {policy!r}")
    rules = tuple(policies)

    def init(
        batch: int,
        exploration: NotNegative = None,
        drafter_cost: NotNegative = 0.1,
        verification_cost: NotNegative = 0.02,
    ) -> PolicyBanditState:
        scale = full(batch, EXPLORATION[method]) if exploration is None else exploration
        return PolicyBanditState(
            arms=begin_arms(batch, len(rules), drafter_cost, verification_cost, scale),
            passes=full(batch, 0, dtype=jnp.int32),
            policies=tuple(rule.init(batch) for rule in rules),
        )

    def ask(state: PolicyBanditState, question: str, *arguments: Any) -> tuple[Array, PolicyBanditState]:
        answers, policies = jnp.zeros(state.passes.shape, bool), []
        for index, (rule, inner) in enumerate(zip(rules, state.policies, strict=True)):
            chosen = state.arms.arm == index  # other arms keep their states
            answer, after = getattr(rule, question)(inner, *arguments)
            answers = jnp.where(chosen, answer, answers)
            policies.append(select_rows(chosen, after, inner))
        return answers, state._replace(policies=tuple(policies))

    def begin(state: PolicyBanditState, context: RoundContext) -> tuple[Array, PolicyBanditState]:
        if method == "thompson":  # standard normals from the row's uniforms
            normal = ndtri(jnp.clip(policy_uniforms(context, len(rules)), 1e-7, 1.0 - 1e-7))
            arm = best(samples(state.arms, normal))
        else:
            arm = best(upper_bounds(state.arms, UCB_WIDTH))
        cost = state.arms.drafter_cost * relative_drafter_cost(context)
        answer, state = ask(state._replace(arms=state.arms._replace(arm=arm, pass_cost=cost)), "begin", context)
        return answer, state._replace(passes=jnp.where(~answer & (context.budget > 0), -1, 0))

    def check(
        state: PolicyBanditState, distribution: Distribution, drafted: Array, context: RoundContext
    ) -> tuple[Array, PolicyBanditState]:
        return ask(state._replace(passes=state.passes + 1), "check", distribution, drafted, context)

    def proceed(
        state: PolicyBanditState, distribution: Distribution, token: Array, drafted: Array, context: RoundContext
    ) -> tuple[Array, PolicyBanditState]:
        return ask(state, "proceed", distribution, token, drafted, context)

    def update(state: PolicyBanditState, draft: Draft, result: VerificationResult) -> PolicyBanditState:
        policies = tuple(
            select_rows(state.arms.arm == index, rule.update(inner, draft, result), inner)
            for index, (rule, inner) in enumerate(zip(rules, state.policies, strict=True))
        )
        counts = result.length, jnp.maximum(state.passes, 0), draft.length, state.passes != 0
        return state._replace(arms=learn(state.arms, *counts), policies=policies)

    reads = frozenset().union(*(rule.reads for rule in rules))
    shown = in_unit("number of the chosen policy", lambda state: state.arms.arm.astype(jnp.float32))
    return StoppingPolicy(init, begin, check, proceed, update, shown, reads)
