"""The `verify-lossless` command: the proofs of `lossless/proof.py`, their table, and a verdict with what was drawn."""

import secrets
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.text import Text

from specdec_jax.app.commands import VerifyLossless
from specdec_jax.app.views.printing import columns, interrupts_end_here, progress, status
from specdec_jax.compilation_cache import enable
from specdec_jax.costs.choices import ESTIMATED
from specdec_jax.loading import download
from specdec_jax.lossless import (
    FALSE_ALARM,
    LOSSLESS,
    NOT_LOSSLESS,
    NOT_SHOWN,
    Counterexample,
    Proof,
    SampledReport,
    check_on_toy,
    prove,
    test_by_sampling,
)
from specdec_jax.lossless.proof import LONGEST
from specdec_jax.lossless.rounds import MANY
from specdec_jax.text.generation import encode
from specdec_jax.text.json_lines import json_text
from specdec_jax.text.pair import measured_pair, without_model
from specdec_jax.text.strategies import choose
from specdec_jax.types import Drafter, Monitor, StoppingPolicy, Verifier

CHECKED, PAIR_DRAFTS = 5, 7  # maximum draft lengths of the first check of shapes, and on the pair, as in `generate`
PAIR_BATCH, PAIR_JOINT = 32, 3  # sequences decoded at a time, and tokens of the joint test
DRAFTER_VOCABULARY = 6  # vocabulary size of the first check of a user's drafter
ESCAPES = (
    "To escape, a mistake must need drafts longer than {longest} tokens, vocabularies or numbers that were not drawn, "
    "more than two drafts at real vocabularies, or {rounds} earlier rounds; or it must deviate by less than the bounds."
)


def verify(command: VerifyLossless) -> str:
    """Runs the proofs, prints them (optionally as one line of JSON), and returns the conclusion.

    Raises ValueError: unknown rules and options, numbers out of range, or only one of target and drafter, except for a
    drafter without a model.
    """
    policy, verifier, target, drafter = command.rules.policy, command.rules.verifier, command.target, command.drafter
    longest = LONGEST if command.max_draft_length is None else command.max_draft_length
    rules = choose("policy", policy), choose("verifier", verifier)
    watches = None if command.monitor is None else choose("monitor", command.monitor)
    if (target is None) != (drafter is None) and not (target is None and without_model(drafter)):
        raise ValueError(f"a pair needs both models: --target is {target}, --drafter is {drafter}")
    if target is not None and rules[1].greedy_only and command.temperature > 0:
        raise ValueError(f"{rules[1].name} verification needs temperature 0 on the pair, got {command.temperature:g}")
    seed, pair = secrets.randbelow(2**31) if command.seed is None else command.seed, None
    enable()
    with jax.default_matmul_precision("highest"):  # accelerators use lower precision for float32 by default
        with interrupts_end_here(), status("Checking shapes") as shown:

            def modelless(length: int, vocab_size: int) -> Drafter:
                return choose("drafter", str(drafter), max_draft_length=length, vocab_size=vocab_size)

            users = modelless if drafter is not None and target is None else None
            check_on_toy(*rules, watches, CHECKED)
            if users is not None:
                toy = users(CHECKED, DRAFTER_VOCABULARY)
                check_on_toy(*rules, watches, toy.max_draft_length, drafter=toy, vocab_size=DRAFTER_VOCABULARY)
            options: dict[str, Any] = {"monitor": watches, "drafter": users, "max_draft_length": longest}
            update = getattr(shown, "update", lambda text: None)
            proof = prove(*rules, seed=seed, minutes=command.minutes, progress=update, **options)
        if target is not None and proof.conclusion != NOT_LOSSLESS:
            pair = _sampled_on_pair(command, *rules, watches)
    conclusion = proof.conclusion if pair is None or pair.lossless else NOT_LOSSLESS
    missing = () if pair is None else [str(length) for length, times in enumerate(pair.drafted, 1) if not times]
    gaps = (*proof.gaps, *([f"on the pair drafts of {', '.join(missing)} tokens never occurred"] if missing else []))
    conclusion = NOT_SHOWN if gaps and conclusion == LOSSLESS else conclusion
    if command.json:
        fields = {"policy": policy, "verifier": verifier, "conclusion": conclusion, "lossless": conclusion == LOSSLESS}
        print(json_text(_by_name(fields | proof._asdict() | {"gaps": gaps, "pair": pair})))
    else:
        title = " and ".join(filter(None, [f"{policy} with {verifier} verification", users and drafter]))
        show(proof, title, conclusion, gaps, pair)
    return conclusion


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
    with progress(Console(stderr=True)) as bar:
        task = bar.add_task("Sampling on the pair", total=sequences)
        more["progress"] = lambda done: bar.update(task, completed=done)
        return test_by_sampling(pair.decoder, pair.params, prompt, source=source, **more)


def show(proof: Proof, title: str, conclusion: str, gaps: Sequence[str], pair: SampledReport | None) -> None:
    """Prints the properties as a table, the policy's decisions, and a verdict."""
    console = Console(highlight=False)
    table = columns("property", "drawn", "worst", "bound", texts=2, title=Text(f"{title}, seed {proof.seed}"))
    for row in proof.rows:
        sign = "over" if row.bound == FALSE_ALARM else "under"
        bound = "" if np.isnan(row.measure) else f"{sign} {row.bound:.0e}"
        worst = "" if np.isnan(row.measure) else f"{row.measure:.1e}"
        table.add_row(row.name, row.drawn, worst if row.passed else f"{worst} FAILED".strip(), bound)
    console.print(table)
    decisions, declined = (list(map(int, counts)) for counts in proof.coverage[:2])
    pairs = ", ".join(f"{no}/{yes}" if yes else "-" for no, yes in zip(declined, decisions, strict=True))
    console.print(f"The rule said no to draft 1, 2, ... in {pairs} of its decisions.", soft_wrap=True)
    if pair is not None:
        console.print(
            f"Sampled, the whole decoder on the pair: chi-square {pair.statistic:.1f} on {pair.degrees} degrees of "
            f"freedom, p = {pair.p_value:.2g}; by position p = {pair.least:.2g} (both must be over {FALSE_ALARM:g}), "
            f"{pair.sequences} sequences of {pair.tokens} tokens; drafts of at least 1, 2, ... tokens: "
            f"{', '.join(map(str, pair.drafted))}.",
            soft_wrap=True,
        )
    for row in proof.rows:
        if row.wrong:
            console.print(f"{row.name}: {row.wrong}.", soft_wrap=True, markup=False)
    example = proof.counterexample or (pair.counterexample if pair is not None else None)
    if conclusion == NOT_LOSSLESS:
        if example is not None:
            console.print(f"Smallest counterexample: {counterexample_text(example)}.", soft_wrap=True)
        console.print("NOT lossless.")
        return
    passes = f"{proof.passes} passes" if proof.passes > 1 else "one pass"
    rounds = f"{sum(row.rounds for row in proof.rows):,} rounds ({passes}, {proof.seconds:.0f} s)"
    largest = max(row.measure for row in proof.rows if row.bound != FALSE_ALARM and not np.isnan(row.measure))
    above = 10.0 ** np.ceil(np.log10(max(largest, 1e-12)))
    text = f"No deviation in {rounds}, total variation below {above:.0e}."
    console.print(f"{text} --seed {proof.seed} draws the same again, another seed other cases.", soft_wrap=True)
    console.print(ESCAPES.format(longest=len(decisions), rounds=MANY), soft_wrap=True)
    if conclusion == NOT_SHOWN:
        console.print(f"Not shown: {'; '.join(gaps)}.", soft_wrap=True)


def counterexample_text(example: Counterexample) -> str:
    """One sentence without its full stop."""
    prompt = f"after the text {_tokens(example.prompt)}, " if example.prompt else ""
    *first, token = example.tokens
    before = f" after {_tokens(first)}" if first else ""
    draft = "" if example.draft is None else f", for example with the draft {_tokens(example.draft)}"
    share = "came in a share of" if example.sampled else "has probability"
    warp = ", ".join(f"{name.replace('_', '-')} {value:g}" for name, value in example.warp.items())
    return (
        f"{prompt}at {warp}{draft}: token {token} at position {len(example.tokens)}{before} "
        f"{share} {example.probability:.6g}, should be {example.expected:.6g} ({example.proof})"
    )


def _tokens(tokens: Sequence[int]) -> str:
    return " ".join(map(str, tokens)) or "of no tokens"


def _by_name(value: Any) -> Any:
    """Reports as dicts of their fields, at any depth."""
    value = value._asdict() if hasattr(value, "_asdict") else value
    if isinstance(value, dict):
        return {name: _by_name(entry) for name, entry in value.items()}
    return [_by_name(entry) for entry in value] if isinstance(value, (list, tuple)) else value
