"""The conclusion of a proof of losslessness: whether a test failed, and what was not tested."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax.lossless.counterexample import Counterexample, shortest
from specdec_jax.lossless.coverage import Coverage
from specdec_jax.lossless.exact import LosslessReport
from specdec_jax.lossless.long_drafts import RoundsReport
from specdec_jax.lossless.long_texts import LongTextsReport
from specdec_jax.lossless.real_size import RealSizeReport
from specdec_jax.lossless.sampled import SampledReport
from specdec_jax.types import StoppingPolicy, Verifier

LOSSLESS, NOT_LOSSLESS, NOT_SHOWN = "lossless", "not lossless", "not shown"


class Proof(NamedTuple):
    """The reports on the policy with the verifier, and on the verifier with full-length drafts."""

    exact: LosslessReport
    rounds: RoundsReport
    rounds_to_the_end: RoundsReport
    sampled: SampledReport
    sampled_in_turn: SampledReport  # with drafts of all lengths in turn instead of the policy
    pair: SampledReport | None = None  # on the user's own models
    texts: LongTextsReport | None = None
    trees: Any = None  # for verifiers and policies of trees (`rounds.prove_rounds`): has `lossless` and `gaps`
    together: RoundsReport | None = None  # rows of several warps in one batch, drafts drawn and chosen
    verifier: RoundsReport | None = None  # the same without the policy, a case for each maximum draft length
    real_size: RealSizeReport | None = None
    several: SampledReport | None = None  # with prompt lookup and a model as drafters
    drafter: SampledReport | None = None  # with the user's drafter, drafts of all lengths in turn

    @property
    def passed(self) -> bool:
        """Whether no proof failed."""
        return all(report.lossless for report in self if report is not None)

    @property
    def gaps(self) -> tuple[str, ...]:
        """Clauses about what was not tested."""
        rule, verifier = _by_warp(self.rounds, _undecided), _by_warp(self.rounds_to_the_end, _never_accepted)
        gaps = *rule, *verifier, *_pair_gaps(self.pair)
        nothing = self.drafter is not None and not any(self.drafter.drafted)
        trees = () if self.trees is None else self.trees.gaps
        return (*gaps, *trees, *(["this drafter drafted nothing on the toy's text"] if nothing else []))

    @property
    def shown(self) -> int:
        """The longest draft length that was tested completely."""
        least = min(case.coverage.shown for case in self.rounds.cases)
        accepted = [case.coverage.never_accepted for case in self.rounds_to_the_end.cases]
        least = min([least, *(missing[0] - 1 for missing in accepted if missing)])
        return max(0, least if self.pair is None else min(least, _occurred(self.pair)))

    @property
    def enumerated(self) -> tuple[RoundsReport, ...]:
        """The reports of round-by-round proofs."""
        every = self.rounds, self.rounds_to_the_end, self.together, self.verifier
        return tuple(report for report in every if report is not None)

    @property
    def alone(self) -> bool:
        """Whether no row's results depended on other rows."""
        return all(report.alone is not False for report in (*self.enumerated, *filter(None, [self.texts])))

    @property
    def counterexample(self) -> Counterexample | None:
        """The smallest counterexample of all proofs."""
        cases = [*self.exact.cases, *(case for report in self.enumerated for case in report.cases)]
        examples = [case.counterexample for case in cases]
        others = self.real_size, self.sampled, self.sampled_in_turn, self.pair, self.several, self.drafter
        return shortest([*examples, *(report.counterexample for report in others if report is not None)])

    @property
    def never(self) -> tuple[str, ...]:
        """Clauses about behaviour that did not occur in the sampled tests but in other proofs."""
        clauses = [] if self.sampled.stopped else ["in the sampled test the rule never stopped"]
        longest, limit = _occurred(self.sampled), len(self.sampled.drafted)
        if longest < limit:
            missing = listed(range(longest + 1, limit + 1))
            clauses.append(f"in the sampled test drafts of {missing} tokens never occurred")
        if self.several is not None and not any(self.several.drafted):
            clauses.append("with several drafters it never drafted")
        if self.drafter is not None and any(self.drafter.drafted) and not all(self.drafter.drafted):
            missing = [length for length, times in enumerate(self.drafter.drafted, 1) if not times]
            clauses.append(f"with this drafter drafts of {listed(missing)} tokens never occurred")
        return tuple(clauses)

    def scope(self, policy: StoppingPolicy, verifier: Verifier) -> str:
        """A description of what was tested, such as "drafts of up to 5 tokens, chains, batches of mixed warps, ..."."""
        longest = len(self.rounds.cases[0].coverage.asked)
        tokens = "1 token" if longest == 1 else f"{longest} tokens"
        shapes = "chains" if policy.rounds is None else policy.rounds.shapes_of(policy)
        warps = "temperature 0" if verifier.greedy_only else "batches of mixed warps" if self.together else "one warp"
        drafters = "model, lookup and mixed drafters" if self.several else "model drafters"
        drafters += " and this one" if self.drafter else ""
        pair = ", this pair of models" if self.pair else ""
        return f"drafts of up to {tokens}, {shapes}, {warps}, {drafters}{pair}, at these hyperparameters"

    @property
    def conclusion(self) -> str:
        """LOSSLESS, NOT_LOSSLESS, or NOT_SHOWN if no test failed but something was not tested."""
        if not self.passed:
            return NOT_LOSSLESS
        return NOT_SHOWN if self.gaps else LOSSLESS


def _undecided(coverage: Coverage) -> list[str]:
    """Clauses about draft positions at which the policy's decisions were not observed."""
    if coverage.shown == len(coverage.asked):
        return []
    declined = [draft for draft in coverage.never_declined if draft > coverage.shown]
    gaps = [f"the rule never said no to {_drafts(declined)}"] if declined else []
    return gaps + ([f"{_drafts(coverage.never_asked)} never came up"] if coverage.never_asked else [])


def _never_accepted(coverage: Coverage) -> list[str]:
    """A clause about numbers of accepted drafts that did not occur."""
    missing = coverage.never_accepted
    return [f"it never happened that {listed(missing)} drafts were accepted"] if missing else []


def _by_warp(report: RoundsReport, gaps_of: Callable[[Coverage], list[str]]) -> list[str]:
    """Each gap once, with its warps unless it occurs in all of them."""
    warps: dict[str, list[str]] = {}
    for case in report.cases:
        for gap in gaps_of(case.coverage):
            warps.setdefault(gap, []).append(warp_text(case.warp))
    everywhere = len(report.cases)
    return [gap if len(at) == everywhere else f"{gap} (at {'; '.join(at)})" for gap, at in warps.items()]


def _pair_gaps(report: SampledReport | None) -> list[str]:
    if report is None or _occurred(report) == len(report.drafted):
        return []
    missing = range(_occurred(report) + 1, len(report.drafted) + 1)
    return [f"on the pair drafts of {listed(missing)} tokens never occurred"]


def _occurred(report: SampledReport) -> int:
    """The longest draft that occurred while sampling."""
    return max((length for length, times in enumerate(report.drafted, 1) if times), default=0)


def _drafts(numbers: Sequence[int]) -> str:
    return ("drafts " if len(numbers) > 1 else "draft ") + listed(numbers)


def listed(numbers: Sequence[int]) -> str:
    """Numbers as text, such as "1, 2, 3"."""
    return ", ".join(map(str, numbers))


def warp_text(warp: Mapping[str, Any]) -> str:
    """A warp as text, such as "temperature 0.7, top-k 2"."""
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in warp.items())
