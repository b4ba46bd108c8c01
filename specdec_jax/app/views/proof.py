"""The `verify-lossless` command: the proofs of `lossless/` on a policy and a verifier, and their coverage."""

import contextlib
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
from rich.console import Console
from rich.table import Table

from specdec_jax.app.commands import VerifyLossless
from specdec_jax.app.views.interrupts import interrupts_end_here
from specdec_jax.app.views.printing import columns, status
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.choices import ESTIMATED
from specdec_jax.decoding.decoder import default_widths, widest_draft
from specdec_jax.loading import download
from specdec_jax.lossless import (
    FALSE_ALARM,
    TOLERANCE,
    TOYS,
    Case,
    Counterexample,
    RoundsReport,
    SampledReport,
    check_on_toy,
    drawn_warps,
    prove_exactly,
    prove_long_drafts,
    prove_long_texts,
    prove_real_size,
    prove_together,
    prove_verifier,
    test_by_sampling,
    toy_decoder,
)
from specdec_jax.lossless.conclusion import LOSSLESS, NOT_SHOWN, Proof, listed, warp_text
from specdec_jax.lossless.real_size import ROUNDING
from specdec_jax.lossless.together import LENGTHS, in_turn
from specdec_jax.stopping.static import static
from specdec_jax.text.generation import encode
from specdec_jax.text.json_lines import json_text
from specdec_jax.text.pair import measured_pair, without_model
from specdec_jax.text.strategies import choose
from specdec_jax.types import Monitor, StoppingPolicy, Verifier

TOY_DRAFTS, PAIR_DRAFTS = 5, 7  # default maximum draft lengths; 7 is that of `generate`
PAIR_BATCH, PAIR_JOINT = 32, 3  # sequences decoded at a time, and tokens of the joint test
SEVERAL = 16_384  # maximum sequences of the sampled tests of other drafters
QUOTES = (0, 1, 2, 0, 1, 2, 0, 1)  # a prompt in which lookups find matches
DRAFTER_VOCABULARY = 6  # vocabulary size of the toy for a user's drafter
CLOSE = 0.5  # distance of the sampled toy's drafter from its target, so that long drafts are accepted


def verify(command: VerifyLossless) -> str:
    """Runs the proofs, prints them (optionally as one line of JSON), and returns the conclusion.

    Raises:
        ValueError: unknown rules and options, numbers out of range, or only one of target and drafter, except for a
            drafter without a model.
    """
    policy, verifier = command.rules.policy, command.rules.verifier
    target, drafter, sequences, seed = command.target, command.drafter, command.sequences, command.seed
    if command.max_draft_length is not None and command.max_draft_length < 1:
        raise ValueError(f"max_draft_length must be at least 1, got {command.max_draft_length}")
    rules = choose("policy", policy), choose("verifier", verifier)
    watches = None if command.monitor is None else choose("monitor", command.monitor)
    if (target is None) != (drafter is None) and not (target is None and without_model(drafter)):
        raise ValueError(f"a pair needs both models: --target is {target}, --drafter is {drafter}")
    if (least := min(sequences, command.pair_sequences)) < 1:
        raise ValueError(f"sequences must be at least 1, got {least}")
    if target is not None and rules[1].greedy_only and command.temperature > 0:
        raise ValueError(f"{rules[1].name} verification needs temperature 0 on the pair, got {command.temperature:g}")
    if seed is not None and seed < 0:
        raise ValueError(f"a seed must be 0 or more, got {seed}")
    draft_limit, seed = command.max_draft_length or TOY_DRAFTS, secrets.randbelow(2**31) if seed is None else seed
    enable()
    with jax.default_matmul_precision("highest"):  # accelerators use lower precision for float32 by default
        with interrupts_end_here():
            modelless, toy = None, {"vocab_size": DRAFTER_VOCABULARY}
            if drafter is not None and target is None:
                modelless = choose("drafter", drafter, max_draft_length=draft_limit, **toy)
            check_on_toy(*rules, watches, draft_limit)
            if modelless is not None:
                check_on_toy(*rules, watches, modelless.max_draft_length, drafter=modelless, **toy)
            proof = _on_toys(*rules, watches, draft_limit, sequences, seed)
            if modelless is not None:
                longest, few = modelless.max_draft_length, min(sequences, SEVERAL)
                with status(f"Decoding {few} sequences with {modelless.name}"):
                    sizes = longest, longest + 1, few
                    turns = in_turn(longest), rules[1]  # the policy itself may draft nothing with this drafter
                    report = _sampled_on_toy(*turns, watches, *sizes, QUOTES, drafter=modelless, **toy)
                proof = proof._replace(drafter=report)
        if target is not None and drafter is not None:
            proof = proof._replace(pair=_sampled_on_pair(command, *rules, watches))
    scope = proof.scope(*rules)
    if command.json:
        print(as_json(proof, policy, verifier, scope, seed))
    else:
        show(proof, Console(highlight=False), f"{policy} with {verifier} verification", scope, seed)
    return proof.conclusion


def _on_toys(
    policy: StoppingPolicy, verifier: Verifier, monitor: Monitor | None, longest: int, sequences: int, seed: int
) -> Proof:
    """All proofs except those on the pair."""
    strategies, to_the_end = (policy, verifier), (static(draft_length=longest), verifier)
    warps: dict[str, Any] = {"warps": drawn_warps(seed), "monitor": monitor}
    with status("Enumerating all rounds of short drafts"):
        exact = prove_exactly(*strategies, monitor=monitor)
    with status(f"Enumerating rounds of up to {longest} drafts"):
        rounds = prove_long_drafts(*strategies, monitor=monitor, max_draft_length=longest)
        rounds_to_the_end = prove_long_drafts(*to_the_end, monitor=monitor, max_draft_length=longest, rounds=2)
        together = prove_together(*strategies, **warps, max_draft_length=longest)
        alone = prove_verifier(verifier, **warps)
        real_size = prove_real_size(verifier, monitor=monitor)
    with status(f"Decoding {sequences} sequences on a toy, twice"):
        some = (1, *default_widths(widest_draft(policy, longest)))
        sampled = _sampled_on_toy(*strategies, monitor, longest, longest + 1, sequences, widths=some)
        every = range(1, longest + 2)
        rules = in_turn(longest), verifier
        sampled_in_turn = _sampled_on_toy(*rules, monitor, longest, 2 * longest + 2, sequences, widths=every)
    several = None
    if policy.rounds is None or not policy.rounds.needs_one_model(policy):
        with status("Decoding with several drafters"):
            few = min(sequences, SEVERAL)
            several = _sampled_on_toy(*strategies, monitor, longest, longest + 1, few, QUOTES, several=True)
    with status("Decoding long texts on a toy, one by one and in batches"):
        texts = prove_long_texts(*strategies, monitor=monitor, max_draft_length=longest)
    trees, of_trees = None, policy.rounds or verifier.rounds
    if of_trees is not None:
        with status("Enumerating rounds of trees"):
            trees = of_trees.prove_rounds(verifier)
    proof = Proof(exact, rounds, rounds_to_the_end, sampled, sampled_in_turn, texts=texts, trees=trees)
    return proof._replace(together=together, verifier=alone, real_size=real_size, several=several)


def _sampled_on_toy(
    policy: StoppingPolicy,
    verifier: Verifier,
    monitor: Monitor | None,
    longest: int,
    tokens: int,
    sequences: int,
    prompt: Sequence[int] = (0, 1),
    **toy: Any,
) -> SampledReport:
    """A sampled test on a toy; `toy`: further options of `toy_decoder`."""
    decoder, params = toy_decoder(policy, verifier, longest, monitor=monitor, distance=CLOSE, **toy)
    warp = {"temperature": 0.0 if verifier.greedy_only else 1.0}
    return test_by_sampling(decoder, params, prompt, warp=warp, tokens=tokens, sequences=sequences)


def _sampled_on_pair(
    command: VerifyLossless, policy: StoppingPolicy, verifier: Verifier, monitor: Monitor | None
) -> SampledReport:
    """A sampled test on the pair in float32, because in bfloat16 logits differ between batch shapes."""
    assert command.target is not None and command.drafter is not None  # checked by verify
    longest, sequences = command.max_draft_length or PAIR_DRAFTS, command.pair_sequences
    more: dict[str, Any] = {"max_draft_length": longest, "dtype": "float32", "costs": ESTIMATED}
    with interrupts_end_here():
        download(command.target, command.drafter)
        with status(f"Loading {command.target} and {command.drafter}"):
            models = command.target, command.drafter
            pair = measured_pair(*models, policy=policy, verifier=verifier, monitor=monitor, **more)
    ids, reads = encode(pair.target, command.prompt, chat=False), pair.target.model.spec.source
    prompt, source = (ids, None) if reads is None else ([reads.first_token], ids)
    more = {"warp": {"temperature": command.temperature}, "policy": policy, "verifier": verifier}
    more |= {"tokens": longest + 1, "joint": PAIR_JOINT, "sequences": sequences, "batch": min(PAIR_BATCH, sequences)}
    with stoppable(sequences) as progress:
        return test_by_sampling(pair.decoder, pair.params, prompt, source=source, progress=progress, **more)


@contextlib.contextmanager
def stoppable(sequences: int) -> Iterator[Callable[[int, float], bool]]:
    """A `progress` for `test_by_sampling` that shows the remaining time; Ctrl-C ends the test with the samples so far.

    A second Ctrl-C interrupts as usual.
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


def show(proof: Proof, console: Console, title: str, scope: str, seed: int) -> None:
    """Prints the table of exact distances, that of the policy's decisions, lines of other results, and the verdict."""
    exact, rounds = proof.exact, proof.rounds
    console.print(_table(exact.cases, title))
    console.print(
        f"Exact, all rounds: the largest total variation of {len(exact.cases)} enumerated distributions from the "
        f"target's is {exact.total_variation:.1e} (must be under {TOLERANCE:.0e}); "
        f"draft lengths that occurred: {listed(exact.draft_lengths)}."
    )
    console.print(_coverage_table(rounds))
    console.print(
        f"Exact, round by round: the largest relative error of a sequence's probability in "
        f"{sum(case.rounds for case in rounds.cases)} rounds is {rounds.error:.1e}, drafting to the end "
        f"{proof.rounds_to_the_end.error:.1e} (must be under {TOLERANCE:.0e})."
    )
    if proof.trees is not None:
        console.print(proof.trees.sentence)
    _show_together(proof, console, seed)
    if not proof.alone:
        console.print("A row's results depend on its neighbours or on its place in the batch.")
    console.print(f"Sampled, the whole decoder on a toy: {_sentence(proof.sampled)}.")
    console.print(f"The same, drafting every length in turn: {_sentence(proof.sampled_in_turn)}.")
    for report, where in ((proof.several, "prompt lookup and a model as drafters"), (proof.drafter, "your drafter")):
        if report is not None:
            console.print(f"Sampled with {where}: {_sentence(report)}.")
    if proof.texts is not None:
        console.print(
            f"Long texts, {proof.texts.rows} of {proof.texts.tokens} tokens, at keys that a rule can guess: by stretch "
            f"p = {proof.texts.least:.2g} (must be over {FALSE_ALARM:g})."
        )
    if proof.pair is not None:
        console.print(f"Sampled, the whole decoder on the pair: {_sentence(proof.pair)}.")
    if proof.counterexample is not None and not proof.passed:
        console.print(f"Smallest counterexample: {counterexample_text(proof.counterexample)}.")
    if proof.conclusion == NOT_SHOWN:
        too_short = proof.shown < len(proof.rounds.cases[0].coverage.asked)
        console.print(f"Not shown{f' beyond draft {proof.shown}' if too_short else ''}: {'; '.join(proof.gaps)}.")
        if too_short:
            console.print("--max-draft-length sets the longest draft tested.")
    elif proof.conclusion == LOSSLESS:
        console.print(f"Lossless for {'; '.join((scope, *proof.never))}.")
    else:
        console.print("NOT lossless.")


def _show_together(proof: Proof, console: Console, seed: int) -> None:
    """Prints the results for rows of several warps, the verifier alone, and float32."""
    if proof.together is not None and proof.verifier is not None:
        temperatures = proof.together.cases[0].warp["temperature"]
        console.print(
            f"The same of rows of several warps in one batch, drafts drawn and chosen: {proof.together.error:.1e}; the "
            f"verifier alone with drafts of up to {listed(LENGTHS)} tokens: {proof.verifier.error:.1e}. Temperatures: "
            f"{', '.join(f'{number:g}' for number in temperatures)} (--seed {seed} draws them again)."
        )
    if proof.real_size is not None:
        report = proof.real_size
        console.print(
            f"Exact, in float32 with {report.vocab_size:,} tokens: total variation {report.total_variation:.1e} (must "
            f"be under {ROUNDING:.0e}); largest probability of a truncated token: {report.truncated:.1g} (must be 0)."
        )


def counterexample_text(example: Counterexample) -> str:
    """One sentence without its full stop."""
    prompt = f"after the text {_tokens(example.prompt)}, " if example.prompt else ""
    *first, token = example.tokens
    before = f" after {_tokens(first)}" if first else ""
    draft = "" if example.draft is None else f", for example with the draft {_tokens(example.draft)}"
    share = "came in a share of" if example.sampled else "has probability"
    return (
        f"{prompt}at {warp_text(example.warp)}{draft}: token {token} at position {example.position}{before} "
        f"{share} {example.probability:.6g}, should be {example.expected:.6g} ({example.proof})"
    )


def _tokens(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens)) or "of no tokens"


def _coverage_table(report: RoundsReport) -> Table:
    """A row per draft position, a column per warp: number of stops of the number of decisions."""
    warps = [warp_text(case.warp).replace("temperature", "T").replace(", ", ",\n") for case in report.cases]
    table = columns("draft", *warps, title="Times the rule said no to a draft / times it was asked")
    for index in range(len(report.cases[0].coverage.asked)):
        counts = [(case.coverage.declined[index], case.coverage.asked[index]) for case in report.cases]
        table.add_row(
            str(index + 1), *(f"{declined}/{times}" if times else "never asked" for declined, times in counts)
        )
    return table


def as_json(proof: Proof, policy: str, verifier: str, scope: str, seed: int) -> str:
    """The proof as one line of JSON."""
    example = proof.counterexample
    fields = {
        "policy": policy,
        "verifier": verifier,
        "conclusion": proof.conclusion,
        "lossless": proof.conclusion == LOSSLESS,
        "shown": proof.shown,
        "gaps": list(proof.gaps),
        "scope": scope,
        "never": list(proof.never),
        "seed": seed,
        "counterexample": None if example is None or proof.passed else example,
        "verifier_rounds": proof.verifier,
        **{name: report for name, report in proof._asdict().items() if name != "verifier"},
    }
    return json_text(_by_name(fields))


def _by_name(value: Any) -> Any:
    """Reports as dicts of their fields, at any depth, without the enumerated distributions."""
    if hasattr(value, "_asdict"):
        value = {name: entry for name, entry in value._asdict().items() if name != "distribution"}
    if isinstance(value, dict):
        return {name: _by_name(entry) for name, entry in value.items()}
    return [_by_name(entry) for entry in value] if isinstance(value, (list, tuple)) else value


def _table(cases: Sequence[Case], title: str) -> Table:
    """Total variation by warp and batch, a column per toy; the worse of drawn and chosen drafts."""
    toys = sorted({case.toy for case in cases})
    equal = [toy < len(TOYS) and bool((TOYS[toy].target == TOYS[toy].drafter).all()) for toy in toys]
    heads = [f"toy {toy + 1}" + (", q = p" if same else "") for toy, same in zip(toys, equal, strict=True)]
    title = f"Total variation from the target's distribution: {title}"
    table = columns("warp", "batch", *heads, texts=1, title=title)
    table.columns[0].no_wrap = True
    worst: dict[tuple[str, int], dict[int, float]] = {}
    for case in cases:
        row = worst.setdefault((warp_text(case.warp), case.batch), {})
        row[case.toy] = max(row.get(case.toy, 0.0), case.total_variation)
    for (warp, batch), row in worst.items():
        table.add_row(warp, str(batch), *(f"{row[toy]:.1e}" for toy in toys))
    return table


def _sentence(report: SampledReport) -> str:
    return (
        f"chi-square {report.statistic:.1f} on {report.degrees} degrees of freedom, p = {report.p_value:.2g}; by "
        f"position p = {report.least:.2g} (both must be over {FALSE_ALARM:g}), {report.sequences} sequences of "
        f"{report.tokens} tokens; drafts of at least 1, 2, ... tokens: {listed(report.drafted)}"
    )
