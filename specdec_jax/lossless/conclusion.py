"""What a proof of losslessness concludes: whether something failed, and what was not put to the test."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from specdec_jax.lossless.comb_rounds import CombRoundsReport
from specdec_jax.lossless.coverage import Coverage
from specdec_jax.lossless.exact import LosslessReport
from specdec_jax.lossless.long_drafts import RoundsReport
from specdec_jax.lossless.long_texts import LongTextsReport
from specdec_jax.lossless.sampled import SampledReport

LOSSLESS, NOT_LOSSLESS, NOT_SHOWN = "lossless", "not lossless", "not shown"


class Proof(NamedTuple):
    """What was found, of the policy with the verifier and of the verifier with drafts to the end."""

    exact: LosslessReport
    rounds: RoundsReport
    rounds_to_the_end: RoundsReport
    sampled: SampledReport
    sampled_to_the_end: SampledReport
    pair: SampledReport | None = None  # on the user's own models
    texts: LongTextsReport | None = None
    combs: CombRoundsReport | None = None  # of verifiers that decide about siblings, and of policies that have some

    @property
    def passed(self) -> bool:
        """No proof failed."""
        return all(report.lossless for report in self if report is not None)

    @property
    def gaps(self) -> tuple[str, ...]:
        """What was not put to the test, a clause each."""
        gaps = *_policy_gaps(self.rounds), *_verifier_gaps(self.rounds_to_the_end), *_pair_gaps(self.pair)
        return (*gaps, *_comb_gaps(self.combs))

    @property
    def shown(self) -> int:
        """The longest draft of which all was put to the test."""
        least = min(case.coverage.shown for case in self.rounds.cases)
        accepted = [case.coverage.never_accepted for case in self.rounds_to_the_end.cases]
        least = min([least, *(missing[0] - 1 for missing in accepted if missing)])
        return max(0, least if self.pair is None else min(least, _occurred(self.pair)))

    @property
    def conclusion(self) -> str:
        """LOSSLESS, NOT_LOSSLESS, or NOT_SHOWN: nothing failed, and something was not tried."""
        if not self.passed:
            return NOT_LOSSLESS
        return NOT_SHOWN if self.gaps else LOSSLESS


def _policy_gaps(report: RoundsReport) -> list[str]:
    """Drafts that a rule was not seen to decide about."""
    return _by_warp(report, _undecided)


def _undecided(coverage: Coverage) -> list[str]:
    if coverage.shown == len(coverage.asked):
        return []
    declined = [draft for draft in coverage.never_declined if draft > coverage.shown]
    gaps = [f"the rule never said no to {_drafts(declined)}"] if declined else []
    return gaps + ([f"{_drafts(coverage.never_asked)} never came up"] if coverage.never_asked else [])


def _verifier_gaps(report: RoundsReport) -> list[str]:
    """Numbers of accepted drafts that did not occur though drafts were as long."""
    return _by_warp(report, _never_accepted)


def _never_accepted(coverage: Coverage) -> list[str]:
    missing = coverage.never_accepted
    return [f"it never happened that {listed(missing)} drafts were accepted"] if missing else []


def _by_warp(report: RoundsReport, gaps_of: Callable[[Coverage], list[str]]) -> list[str]:
    """Each gap once, with the warps where it is unless that is all of them."""
    found: dict[str, list[str]] = {}
    for case in report.cases:
        for gap in gaps_of(case.coverage):
            found.setdefault(gap, []).append(warp_text(case.warp))
    everywhere = len(report.cases)
    return [gap if len(at) == everywhere else f"{gap} (at {'; '.join(at)})" for gap, at in found.items()]


def _comb_gaps(report: CombRoundsReport | None) -> list[str]:
    missing = () if report is None else report.never_accepted
    return [f"no sibling of {_drafts(missing)} was accepted"] if missing else []


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
    """1, 2, 3."""
    return ", ".join(map(str, numbers))


def warp_text(warp: Mapping[str, Any]) -> str:
    """temperature 0.7, top-k 2."""
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in warp.items())
