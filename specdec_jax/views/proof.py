"""The `verify-lossless` command: the proofs of analysis/losslessness.py on a policy and a verifier, as a table."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_jax.analysis.losslessness import (
    FALSE_ALARM,
    TOLERANCE,
    TOYS,
    Case,
    LosslessReport,
    SampledReport,
    prove_exactly,
    test_by_sampling,
    toy_decoder,
)
from specdec_jax.choices import Choice, choose
from specdec_jax.compilation_cache import enable
from specdec_jax.generation import build_pair, encode
from specdec_jax.views.printing import plain, status

PAIR_DRAFTS, PAIR_TOKENS = 3, 3  # drafts a round and tokens compared on a real pair: every one more multiplies cells


class Proof(NamedTuple):
    """What was found."""

    exact: LosslessReport
    sampled: SampledReport
    pair: SampledReport | None  # on the user's own models

    @property
    def lossless(self) -> bool:
        return all(report.lossless for report in self if report is not None)

    @property
    def drafted(self) -> bool:
        """Whether anything was drafted at all; if not, nothing was put to the test."""
        return max(self.exact.draft_lengths) > 0


def verify(
    *,
    policy: str = "adaedl",
    policy_options: Sequence[str] = (),
    verifier: str = "rejection",
    verifier_options: Sequence[str] = (),
    sequences: int = 40_960,
    target: str | None = None,
    drafter: str | None = None,
    prompt: str = "Once upon a time",
    temperature: float = 1.0,
    pair_sequences: int = 512,
    json: bool = False,
) -> bool:
    """Runs the proofs, prints them (as one line of JSON if asked), and says whether the pair of rules is lossless.

    Raises ValueError on unknown rules and options, numbers out of range, and one of target and drafter alone."""
    rules = choose("policy", policy, policy_options), choose("verifier", verifier, verifier_options)
    if (target is None) != (drafter is None):
        raise ValueError(f"a pair needs both models: --target is {target}, --drafter is {drafter}")
    if min(sequences, pair_sequences) < 1:
        raise ValueError(f"sequences must be at least 1, got {min(sequences, pair_sequences)}")
    if target is not None and rules[1].strategy.greedy_only and temperature > 0:
        raise ValueError(f"{verifier} verification needs temperature 0 on the pair, got {temperature:g}")
    enable()
    pair = None
    with jax.default_matmul_precision("highest"):  # accelerators multiply float32 in less unless told
        with status("Enumerating the output law on toy models"):
            exact = prove_exactly(*(rule.strategy for rule in rules), **_numbers(*rules))
        with status(f"Decoding {sequences} sequences on a toy"):
            sampled = _sampled_on_toy(*rules, sequences)
        if target is not None and drafter is not None:
            with status(f"Decoding {pair_sequences} sequences with {target} and {drafter}"):
                pair = _sampled_on_pair(*rules, target, drafter, prompt, temperature, pair_sequences)
    proof = Proof(exact, sampled, pair)
    if json:
        print(as_json(proof, policy, verifier))
    else:
        show(proof, Console(highlight=False), f"{policy} with {verifier} verification")
    return proof.lossless


def _numbers(policy: Choice, verifier: Choice) -> dict[str, Any]:
    return {"policy_numbers": policy.numbers, "verifier_numbers": verifier.numbers}


def _sampled_on_toy(policy: Choice, verifier: Choice, sequences: int) -> SampledReport:
    decoder, params = toy_decoder(policy.strategy, verifier.strategy)
    warp = {"temperature": 0.0 if verifier.strategy.greedy_only else 1.0}
    return test_by_sampling(decoder, params, warp=warp, sequences=sequences, **_numbers(policy, verifier))


def _sampled_on_pair(
    policy: Choice, verifier: Choice, target: str, drafter: str, prompt: str, temperature: float, sequences: int
) -> SampledReport:
    """In float32: in bfloat16 one text's logits differ between batch shapes, and enough sequences show it."""
    pair = build_pair(
        target,
        drafter,
        policy=policy.strategy,
        verifier=verifier.strategy,
        max_draft_length=PAIR_DRAFTS,
        dtype="float32",
    )
    return test_by_sampling(
        pair.decoder,
        pair.params,
        encode(pair.target, prompt, chat=False),
        warp={"temperature": temperature},
        tokens=PAIR_TOKENS,
        sequences=sequences,
        **_numbers(policy, verifier),
    )


def show(proof: Proof, console: Console, title: str) -> None:
    """The table of exact distances and a line for every other finding."""
    exact = proof.exact
    console.print(_table(exact.cases, title))
    console.print(
        f"Exact: the largest total variation of {len(exact.cases)} enumerated laws from the target's is "
        f"{exact.total_variation:.1e} (must be under {TOLERANCE:.0e}); "
        f"draft lengths that occurred: {', '.join(map(str, exact.draft_lengths))}."
    )
    console.print(f"Sampled, the whole decoder on a toy: {_sentence(proof.sampled)}.")
    if proof.pair is not None:
        console.print(f"Sampled, the whole decoder on the pair: {_sentence(proof.pair)}.")
    if not proof.drafted:
        console.print("This policy never drafted on the toys, so nothing was put to the test.", style="bold yellow")
    elif proof.lossless:
        console.print("Lossless.", style="bold green")
    else:
        console.print("NOT lossless.", style="bold red")


def as_json(proof: Proof, policy: str, verifier: str) -> str:
    """The same as one line of JSON."""
    cases = [{key: value for key, value in case._asdict().items() if key != "law"} for case in proof.exact.cases]
    fields = {
        "policy": policy,
        "verifier": verifier,
        "lossless": proof.lossless,
        "drafted": proof.drafted,
        "exact": {**proof.exact._asdict(), "cases": cases},
        "sampled": proof.sampled._asdict(),
        "pair": None if proof.pair is None else proof.pair._asdict(),
    }
    return json.dumps(plain(fields), ensure_ascii=False, allow_nan=False)


def _table(cases: Sequence[Case], title: str) -> Table:
    """Total variation by warp and batch, a column a toy; drawn and chosen drafts as the worse of the two."""
    table = Table(title=f"Total variation from the target's law: {title}", box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("warp", no_wrap=True)
    table.add_column("batch", justify="right")
    toys = sorted({case.toy for case in cases})
    for toy in toys:
        same = toy < len(TOYS) and (TOYS[toy].target == TOYS[toy].drafter).all()
        table.add_column(f"toy {toy + 1}" + (", q = p" if same else ""), justify="right")
    worst: dict[tuple[str, int], dict[int, float]] = {}
    for case in cases:
        row = worst.setdefault((_warp_text(case.warp), case.batch), {})
        row[case.toy] = max(row.get(case.toy, 0.0), case.total_variation)
    for (warp, batch), row in worst.items():
        table.add_row(warp, str(batch), *(_distance(row[toy]) for toy in toys))
    return table


def _warp_text(warp: Mapping[str, Any]) -> str:
    return ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in warp.items())


def _distance(value: float) -> Text:
    return Text(f"{value:.1e}", "" if value < TOLERANCE else "bold red")


def _sentence(report: SampledReport) -> str:
    return (
        f"chi-square {report.statistic:.1f} on {report.degrees} degrees of freedom, p = {report.p_value:.2g} "
        f"(must be over {FALSE_ALARM:g}), {report.sequences} sequences of {report.tokens} tokens"
    )
