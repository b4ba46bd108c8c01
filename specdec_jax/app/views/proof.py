"""The `verify-lossless` command: the proofs of `lossless/` on a policy and a verifier, and what they tried."""

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from specdec_jax.app.views.interrupts import interrupts_end_here
from specdec_jax.app.views.printing import plain, status
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.choices import ESTIMATED
from specdec_jax.loading import download
from specdec_jax.lossless import (
    FALSE_ALARM,
    TOLERANCE,
    TOYS,
    Case,
    RoundsReport,
    SampledReport,
    prove_comb_rounds,
    prove_exactly,
    prove_long_drafts,
    prove_long_texts,
    test_by_sampling,
    toy_decoder,
)
from specdec_jax.lossless.conclusion import LOSSLESS, NOT_SHOWN, Proof, listed, warp_text
from specdec_jax.stopping.static import static
from specdec_jax.text.generation import build_pair, encode
from specdec_jax.text.strategies import choose
from specdec_jax.types import StoppingPolicy, Verifier

TOY_DRAFTS, PAIR_DRAFTS = 5, 7  # drafts a round unless told; 7 is what `generate` drafts
PAIR_BATCH, PAIR_JOINT = 32, 3  # sequences decoded at a time, and tokens of the joint test
CLOSE = 0.5  # how far the drafter of the sampled toy is from its target: long drafts are accepted


def verify(
    *,
    policy: str = "survival",
    verifier: str = "rejection",
    max_draft_length: int | None = None,
    sequences: int = 40_960,
    target: str | None = None,
    drafter: str | None = None,
    prompt: str = "Once upon a time",
    temperature: float = 1.0,
    pair_sequences: int = 512,
    json: bool = False,
) -> str:
    """Runs the proofs, prints them (as one line of JSON if asked), and returns the conclusion.

    Raises ValueError on unknown rules and options, hyperparameters out of range, and one of target and drafter
    alone."""
    rules = choose("policy", policy), choose("verifier", verifier)
    if (target is None) != (drafter is None):
        raise ValueError(f"a pair needs both models: --target is {target}, --drafter is {drafter}")
    if min(sequences, pair_sequences) < 1:
        raise ValueError(f"sequences must be at least 1, got {min(sequences, pair_sequences)}")
    if target is not None and rules[1].greedy_only and temperature > 0:
        raise ValueError(f"{rules[1].name} verification needs temperature 0 on the pair, got {temperature:g}")
    enable()
    with jax.default_matmul_precision("highest"):  # accelerators multiply float32 in less unless told
        with interrupts_end_here():
            proof = _on_toys(*rules, max_draft_length or TOY_DRAFTS, sequences)
        if target is not None and drafter is not None:
            most = max_draft_length or PAIR_DRAFTS
            pair = _sampled_on_pair(*rules, target, drafter, prompt, temperature, most, pair_sequences)
            proof = proof._replace(pair=pair)
    if json:
        print(as_json(proof, policy, verifier))
    else:
        show(proof, Console(highlight=False), f"{policy} with {verifier} verification")
    return proof.conclusion


def _on_toys(policy: StoppingPolicy, verifier: Verifier, most: int, sequences: int) -> Proof:
    """All but the pair."""
    strategies, to_the_end = (policy, verifier), (static(draft_length=most), verifier)
    with status("Enumerating all rounds of short drafts"):
        exact = prove_exactly(*strategies)
    with status(f"Enumerating rounds of up to {most} drafts"):
        rounds = prove_long_drafts(*strategies, max_draft_length=most)
        rounds_to_the_end = prove_long_drafts(*to_the_end, max_draft_length=most, rounds=2)
    with status(f"Decoding {sequences} sequences on a toy, twice"):
        sampled = _sampled_on_toy(*strategies, most, sequences)
        sampled_to_the_end = _sampled_on_toy(*to_the_end, most, sequences)
    with status("Decoding long texts on a toy, one by one and beside others"):
        texts = prove_long_texts(*strategies, max_draft_length=most)
    combs = None
    if verifier.outcomes is not None or policy.siblings:
        with status("Enumerating rounds with siblings"):
            combs = prove_comb_rounds(verifier)
    return Proof(exact, rounds, rounds_to_the_end, sampled, sampled_to_the_end, texts=texts, combs=combs)


def _sampled_on_toy(policy: StoppingPolicy, verifier: Verifier, most: int, sequences: int) -> SampledReport:
    decoder, params = toy_decoder(policy, verifier, most, distance=CLOSE)
    warp = {"temperature": 0.0 if verifier.greedy_only else 1.0}
    return test_by_sampling(decoder, params, warp=warp, tokens=most + 1, sequences=sequences)


def _sampled_on_pair(
    policy: StoppingPolicy,
    verifier: Verifier,
    target: str,
    drafter: str,
    prompt: str,
    temperature: float,
    most: int,
    sequences: int,
) -> SampledReport:
    """In float32: in bfloat16 one text's logits differ between batch shapes, and enough sequences show it."""
    more: dict[str, Any] = {"max_draft_length": most, "dtype": "float32", "costs": ESTIMATED}
    with interrupts_end_here():
        download(target, drafter)
        with status(f"Loading {target} and {drafter}"):
            pair = build_pair(target, drafter, policy=policy, verifier=verifier, **more)
    ids, reads = encode(pair.target, prompt, chat=False), pair.target.model.spec.source
    with stoppable(sequences) as progress:
        return test_by_sampling(
            pair.decoder,
            pair.params,
            ids if reads is None else [reads.first_token],
            warp={"temperature": temperature},
            tokens=most + 1,
            joint=PAIR_JOINT,
            source=None if reads is None else ids,
            sequences=sequences,
            batch=min(PAIR_BATCH, sequences),
            progress=progress,
            policy=policy,
            verifier=verifier,
        )


@contextlib.contextmanager
def stoppable(sequences: int) -> Iterator[Callable[[int, float], bool]]:
    """A `progress` for `test_by_sampling` that says how long it will take, and ends it at Ctrl-C with what there is.

    A second Ctrl-C interrupts as ever.
    """
    stopped = False

    def stop(number: int, frame: Any) -> None:
        nonlocal stopped
        stopped = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        print("stopping after this batch; Ctrl-C again ends at once", file=sys.stderr)

    def progress(done: int, seconds: float) -> bool:
        timed = done - PAIR_BATCH  # the first batch was compiled too
        left = f", about {seconds / timed * (sequences - done):.0f} s left" if timed > 0 and done < sequences else ""
        print(f"{done} of {sequences} sequences on the pair{left}", file=sys.stderr)
        return not stopped

    print(f"Compiling, then {sequences} sequences on the pair; Ctrl-C stops with what there is", file=sys.stderr)
    before = signal.signal(signal.SIGINT, stop)
    try:
        yield progress
    finally:
        signal.signal(signal.SIGINT, before)


def show(proof: Proof, console: Console, title: str) -> None:
    """The table of exact distances, that of what was asked, and a line for every other finding."""
    exact, rounds = proof.exact, proof.rounds
    console.print(_table(exact.cases, title))
    console.print(
        f"Exact, all rounds: the largest total variation of {len(exact.cases)} enumerated distributions from the "
        f"target's is {exact.total_variation:.1e} (must be under {TOLERANCE:.0e}); "
        f"draft lengths that occurred: {listed(exact.draft_lengths)}."
    )
    console.print(_asked_table(rounds))
    console.print(
        f"Exact, round by round: the largest relative error of a sequence's probability in "
        f"{sum(case.rounds for case in rounds.cases)} rounds is {rounds.error:.1e}, drafting to the end "
        f"{proof.rounds_to_the_end.error:.1e} (must be under {TOLERANCE:.0e})."
    )
    if proof.combs is not None:
        console.print(
            f"Exact, rounds of {proof.combs.drafts} drafts with up to {proof.combs.siblings} siblings: the largest "
            f"relative error is {proof.combs.error:.1e} (must be under {TOLERANCE:.0e}); other rounds are of chains."
        )
    if not (rounds.alone and proof.rounds_to_the_end.alone and (proof.texts is None or proof.texts.alone is not False)):
        console.print("A row's results depend on its neighbours or on its place in the batch.", style="bold red")
    console.print(f"Sampled, the whole decoder on a toy: {_sentence(proof.sampled)}.")
    console.print(f"The same, drafting to the end: {_sentence(proof.sampled_to_the_end)}.")
    if proof.texts is not None:
        console.print(
            f"Long texts, {proof.texts.rows} of {proof.texts.tokens} tokens, at keys that a rule can guess: by stretch "
            f"p = {proof.texts.least:.2g} (must be over {FALSE_ALARM:g})."
        )
    if proof.pair is not None:
        console.print(f"Sampled, the whole decoder on the pair: {_sentence(proof.pair)}.")
    if proof.conclusion == NOT_SHOWN:
        console.print(f"Not shown beyond draft {proof.shown}: {'; '.join(proof.gaps)}.", style="bold yellow")
        console.print("--max-draft-length sets the longest draft tested.")
        return
    style = "bold green" if proof.conclusion == LOSSLESS else "bold red"
    console.print("Lossless." if proof.conclusion == LOSSLESS else "NOT lossless.", style=style)


def _asked_table(report: RoundsReport) -> Table:
    """A line a draft, a column a warp: times the rule said no of times it was asked."""
    title = "Times the rule said no to a draft / times it was asked"
    table = Table(title=title, box=box.SIMPLE_HEAD, show_edge=False)
    table.add_column("draft", justify="right")
    for case in report.cases:
        table.add_column(warp_text(case.warp).replace("temperature", "T").replace(", ", ",\n"), justify="right")
    for index in range(len(report.cases[0].coverage.asked)):
        counts = [(case.coverage.declined[index], case.coverage.asked[index]) for case in report.cases]
        table.add_row(
            str(index + 1), *(f"{declined}/{asked}" if asked else "never asked" for declined, asked in counts)
        )
    return table


def as_json(proof: Proof, policy: str, verifier: str) -> str:
    """The same as one line of JSON."""
    cases = [
        {key: value for key, value in case._asdict().items() if key != "distribution"} for case in proof.exact.cases
    ]
    fields = {
        "policy": policy,
        "verifier": verifier,
        "conclusion": proof.conclusion,
        "lossless": proof.conclusion == LOSSLESS,
        "shown": proof.shown,
        "gaps": list(proof.gaps),
        "exact": {**proof.exact._asdict(), "cases": cases},
        "rounds": _rounds_fields(proof.rounds),
        "rounds_to_the_end": _rounds_fields(proof.rounds_to_the_end),
        "sampled": proof.sampled._asdict(),
        "sampled_to_the_end": proof.sampled_to_the_end._asdict(),
        **{
            name: None if report is None else report._asdict()
            for name, report in (("pair", proof.pair), ("texts", proof.texts), ("combs", proof.combs))
        },
    }
    return json.dumps(plain(fields), ensure_ascii=False, allow_nan=False)


def _rounds_fields(report: RoundsReport) -> dict[str, Any]:
    counts = [{**case._asdict(), "coverage": case.coverage._asdict()} for case in report.cases]
    return {**report._asdict(), "cases": counts}


def _table(cases: Sequence[Case], title: str) -> Table:
    """Total variation by warp and batch, a column a toy; drawn and chosen drafts as the worse of the two."""
    table = Table(
        title=f"Total variation from the target's distribution: {title}", box=box.SIMPLE_HEAD, show_edge=False
    )
    table.add_column("warp", no_wrap=True)
    table.add_column("batch", justify="right")
    toys = sorted({case.toy for case in cases})
    for toy in toys:
        same = toy < len(TOYS) and (TOYS[toy].target == TOYS[toy].drafter).all()
        table.add_column(f"toy {toy + 1}" + (", q = p" if same else ""), justify="right")
    worst: dict[tuple[str, int], dict[int, float]] = {}
    for case in cases:
        row = worst.setdefault((warp_text(case.warp), case.batch), {})
        row[case.toy] = max(row.get(case.toy, 0.0), case.total_variation)
    for (warp, batch), row in worst.items():
        table.add_row(warp, str(batch), *(_distance(row[toy]) for toy in toys))
    return table


def _distance(value: float) -> Text:
    return Text(f"{value:.1e}", "" if value < TOLERANCE else "bold red")


def _sentence(report: SampledReport) -> str:
    return (
        f"chi-square {report.statistic:.1f} on {report.degrees} degrees of freedom, p = {report.p_value:.2g}; by "
        f"position p = {report.least:.2g} (both must be over {FALSE_ALARM:g}), {report.sequences} sequences of "
        f"{report.tokens} tokens; drafts of at least 1, 2, ... tokens: {listed(report.drafted)}"
    )
