"""Thirty seeded bugs: each is put into a copy of the package, and the tests named beside it must fail.

Question:  Would the tests notice?
Command:   python tools/mutations.py [--only WORDS] [--clean]     (--clean first runs the named tests without a bug)
Time:      about 10 minutes on 2 cores, a few seconds to two minutes a bug
Expected:  "caught" 30 times, exit code 0; 1 if a bug is missed, or its text is no longer there exactly once

A bug is found by its text, wherever in the package it stands, so that a move of code changes nothing here. Where the
code is rewritten, the words say what to write in its place.
"""

import argparse
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
TIER = "not long and not seldom"  # of the tests that `make test` runs
LONGEST = 900  # seconds of the tests of a bug
LEFT_OUT = shutil.ignore_patterns(".*", "runs", "__pycache__", "build", "dist", "*.egg-info")


class Bug(NamedTuple):
    """Where `old` stands in the package, exactly once, `new` is what the bug has."""

    words: str
    old: str
    new: str
    tests: str  # files or cases, of which one must fail
    folder: str = ""  # of the package, where the text is elsewhere too


BUGS = (
    # The draft loop.
    Bug(
        "a token is drafted that the rule said no to",
        "is_drafted = going & wants",
        "is_drafted = going",
        "tests/decoding/test_draft_loop.py",
    ),
    Bug(
        "a draft goes on beyond its budget",
        "is_drafted & goes_on & (drafted < context.budget)",
        "is_drafted & goes_on & (drafted <= context.budget)",
        "tests/decoding/test_draft_loop.py",
    ),
    Bug(
        "the rule's state changes in rows that have stopped drafting",
        "after = select_rows(is_drafted, proceeded, checked)",
        "after = proceeded",
        "tests/decoding/test_draft_loop.py",
    ),
    # Rounds.
    Bug(
        "the token after the draft is drawn with the draft's own uniform",
        "pick(uniforms[..., NEXT], accepted)",
        "pick(uniforms[..., DRAFT], accepted)",
        "tests/decoding/test_decoding.py::test_the_loop_is_the_twin",
        folder="decoding",
    ),
    Bug(
        "the verification is too narrow for the longest draft",
        "< jnp.max(drafted) + 1",
        "< jnp.max(drafted)",
        "tests/decoding/test_decoding.py::test_a_shorter_length_runs_in_a_narrower_width",
    ),
    Bug(
        "tokens after the end of sequence are emitted",
        "jnp.minimum(length, first + 1)",
        "jnp.minimum(length, first + 9)",
        "tests/decoding/test_decoding.py::test_a_stop_token_anywhere_ends_the_text_after_it",
    ),
    Bug(
        "rows that are done teach the rule",
        "policy = select_rows(context.alive, parts.policy.update(loop.policy, draft, result), loop.policy)",
        "policy = parts.policy.update(loop.policy, draft, result)",
        "tests/decoding/test_decoding.py::test_a_rules_state_changes_by_its_own_row_alone",
    ),
    # Statistics.
    Bug(
        "drafts accepted beyond the end of sequence are counted",
        "accepted=jnp.minimum(result.length - 1, emitted)",
        "accepted=result.length - 1",
        "tests/decoding/test_decoding.py::test_a_stop_token_anywhere_ends_the_text_after_it",
    ),
    Bug(
        "a position counts as evaluated although the text ended before it",
        "jnp.minimum(now.emitted, now.accepted + 1)",
        "(now.accepted + 1)",
        "tests/decoding/test_decoding.py::test_a_stop_token_anywhere_ends_the_text_after_it",
    ),
    # Sampling.
    Bug(
        "top-p leaves out the token that completes the mass",
        "_sum(jnp.where(keys > key[:, None], prob, 0.0)) >= mass",
        "_sum(jnp.where(keys >= key[:, None], prob, 0.0)) >= mass",
        "tests/decoding/test_sampling.py::test_warps_are_hugging_faces",
    ),
    Bug(
        "a uniform does not depend on the tokens emitted",
        "key = jax.random.fold_in(_key(seed), emitted)",
        "key = _key(seed)",
        "tests/decoding/test_sampling.py",
    ),
    Bug(
        "a token of weight zero can be drawn",
        "(goal - before)[:, None], inside > 0)",
        "(goal - before)[:, None], inside > -1)",
        "tests/decoding/test_sampling.py",
    ),
    # Stopping rules.
    Bug(
        "AdaEDL's lambda moves the wrong way",
        "jnp.where(acceptance < state.target_acceptance",
        "jnp.where(acceptance > state.target_acceptance",
        "tests/stopping/test_stopping_twins.py",
    ),
    Bug(
        "a round without drafts changes AdaEDL's running acceptance",
        "        acceptance=jnp.where(drafted, acceptance, state.acceptance),\n        threshold",
        "        acceptance=acceptance,\n        threshold",
        "tests/stopping/test_stopping_twins.py",
    ),
    Bug(
        "AdaEDL's bound has the entropy factor outside of the root",
        "return 1.0 - jnp.sqrt(entropy_factor * entropy.astype(jnp.float32))",
        "return 1.0 - entropy_factor * jnp.sqrt(entropy.astype(jnp.float32))",
        "tests/stopping/test_stopping_twins.py",
        folder="stopping",
    ),
    Bug(
        "survival takes wider verification to be free",
        "return passes * state.drafter_cost[:, None] + wider",
        "return passes * state.drafter_cost[:, None]",
        "tests/stopping/test_survival.py",
    ),
    Bug(
        "goodput counts drafts behind a rejected one as evaluated",
        "evaluated = jnp.minimum(result.length, draft.length).astype(jnp.float32)",
        "evaluated = draft.length.astype(jnp.float32)",
        "tests/stopping/test_stopping_twins.py",
    ),
    # Verifiers.
    Bug(
        "after a rejection the next token is drawn from the target's own distribution",
        "rest = jnp.maximum(jnp.exp(log_p) - jnp.exp(log_q), 0.0)\n    empty",
        "rest = jnp.exp(log_p)\n    empty",
        "tests/verification/test_verification.py",
    ),
    Bug(
        "block verification forgets that a weight is at most 1",
        "weight = jnp.minimum(0.0, weight + ratio)",
        "weight = jnp.minimum(0.0, ratio)",
        "tests/verification/test_verification.py",
    ),
    Bug(
        "a chosen draft is verified as if it were drawn",
        "jnp.where(draft.one_hot[:, :, None], certain, draft.log_q)",
        "draft.log_q",
        "tests/verification/test_verification.py",
    ),
    # Drafters.
    Bug(
        "the drafter's cache is not rolled back after a rejection",
        "jnp.minimum(valid, jnp.maximum(length - 1, 0))",
        "valid",
        "tests/decoding/test_state.py::test_the_drafters_cache_is_one_pass_over_the_text",
    ),
    Bug(
        "the last chunk that is fed begins where it runs over the cache's end",
        "start = jnp.minimum(valid, tokens.shape[1] - chunk)",
        "start = valid",
        "tests/decoding/test_state.py::test_a_last_chunk_does_not_run_over_the_end",
    ),
    Bug(
        "the first of several matches is copied",
        "end = jnp.max(jnp.where(matched == longest_match[:, None], slot, 0), axis=1)",
        "end = jnp.min(jnp.where(matched == longest_match[:, None], slot, slots), axis=1)",
        "tests/drafters/test_prompt_lookup.py",
    ),
    Bug(
        "a drafter that reads its target reads one position late",
        "start[:, None] + 1 + jnp.arange(new_reads.shape[1])",
        "start[:, None] + jnp.arange(new_reads.shape[1])",
        "tests/drafters/test_reading.py::test_score_reads_the_target_at_every_position",
    ),
    Bug(
        "rare tokens of a draft that was rejected stay in the draft vocabulary",
        "at = jnp.where(cache.at < cache.length[:, None], cache.at, NOWHERE)",
        "at = cache.at",
        "tests/drafters/test_draft_vocabulary.py",
    ),
    # Replay, costs.
    Bug(
        "a replay reads what follows a rejected draft one place late",
        "jnp.minimum(rows.drafted - rows.accepted, texts.tails.shape[1] - 1)",
        "jnp.minimum(rows.drafted, texts.tails.shape[1] - 1)",
        "tests/replay/test_replay.py::test_greedy_rounds_are_the_live_ones[adaedl_keep_fast]",
    ),
    Bug(
        "the pass that verifies k drafts costs what k tokens do",
        "np.searchsorted(self.widths, np.arange(max_draft_length + 1) + 1)",
        "np.searchsorted(self.widths, np.arange(max_draft_length + 1))",
        "tests/replay/test_replay.py::test_time_is_counted_by_width",
    ),
    # Loading, proofs, text.
    Bug(
        "GGUF's heads are not put back in order",
        "return array.reshape(count, -1, 2, *array.shape[1:]).swapaxes(1, 2).reshape(array.shape)",
        "return array",
        "tests/loading/test_loading.py::test_gguf_equals_its_dequantised_folder",
    ),
    Bug(
        "a proof with gaps calls itself lossless",
        "return NOT_SHOWN if self.gaps else LOSSLESS",
        "return LOSSLESS",
        "tests/lossless/test_proof.py::test_minutes_draw_until_they_are_over_and_gaps_are_named",
    ),
    Bug(
        "of two stop strings the one that begins first cuts the text",
        "places = [(text.find(word) + len(word), text.find(word)) for word in stop if word in text]",
        "places = [(text.find(word), text.find(word)) for word in stop if word in text]",
        "tests/text/test_streaming.py",
    ),
)


def place_of(bug: Bug, root: Path) -> Path | None:
    """The one file of the package that has the bug's text, once; None if there is no such file."""
    files = sorted((root / "specdec_jax" / bug.folder).rglob("*.py"))
    counts = {path: path.read_text(encoding="utf-8").count(bug.old) for path in files}
    hits = [path for path, count in counts.items() if count]
    return hits[0] if len(hits) == 1 and counts[hits[0]] == 1 else None


def failing(root: Path, tests: str) -> bool:
    """Whether one of the tests fails there. Raises RuntimeError where none was run."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", *tests.split()]
    command += ["-m", TIER]
    try:
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=LONGEST)
    except subprocess.TimeoutExpired:
        return True  # a loop that does not end
    if done.returncode not in (0, 1):
        raise RuntimeError(f"pytest {tests} ended with {done.returncode}:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="bugs whose words or tests contain this")
    parser.add_argument("--clean", action="store_true", help="first run the named tests without a bug")
    options = parser.parse_args()
    chosen = [bug for bug in BUGS if options.only in bug.words or options.only in bug.tests]
    with tempfile.TemporaryDirectory() as folder:
        root, wrong = Path(folder) / "tree", 0
        shutil.copytree(ROOT, root, ignore=LEFT_OUT)
        if options.clean and failing(root, " ".join(dict.fromkeys(" ".join(bug.tests for bug in chosen).split()))):
            print("the named tests fail without any bug")
            return 1
        for bug in chosen:
            begun, path = time.perf_counter(), place_of(bug, root)
            if path is None:
                outcome = "NOT THERE"
            else:
                text = path.read_text(encoding="utf-8")
                path.write_text(text.replace(bug.old, bug.new), encoding="utf-8")
                outcome = "caught" if failing(root, bug.tests) else "MISSED"
                path.write_text(text, encoding="utf-8")
            wrong += outcome != "caught"
            print(f"{outcome}: {bug.words} ({time.perf_counter() - begun:.0f} s)", flush=True)
    print(f"{len(chosen) - wrong} of {len(chosen)} caught")
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
