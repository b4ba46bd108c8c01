"""Golden runs: texts, statistics, records of rounds, traces and replays of the built-in pair, compared bit for bit.

Question:  Does a change of the code alter a token, a count or a recorded number of plain (chain) drafting?
Command:   python tools/golden.py write FOLDER    before the change; then, after every step of it:
           python tools/golden.py check FOLDER [--only model/adaedl]
Hardware:  any CPU; compare on the machine that wrote, with the jax that wrote
Time:      about 5 minutes on 2 cores, fewer where programs are in the compilation cache
Expected:  exit code 0 and "equal"; else 1 and a line for every field that differs

Costs are literal numbers, so nothing depends on timing. Only the fields named below are compared: others may go.
"""

import argparse
import json
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

os.environ["SPECDEC_JAX_COSTS"] = "estimated"  # no measurement, in versions where build_pair measures
sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
import numpy as np

import specdec_jax as sd
from specdec_jax import compilation_cache, stopping
from specdec_jax.replay.replay import replay
from specdec_jax.replay.trace import load_trace, save_trace
from specdec_jax.replay.tracing import trace_texts

words = str.split
NEW, DRAFTS, SEED, TEMPERATURES, TRACED = 48, 7, 7, (0.0, 0.8), 2  # the last: prompts of a trace
COUNTS = words(
    """num_rounds num_drafts num_draft_tokens num_accepted_tokens num_emitted_tokens
    drafter_passes discarded_passes drafted_at evaluated_at accepted_at"""
)
ROUNDS = words("proposed drafted accepted emitted drafter_passes width entropy max_prob threshold drafter_id")
TRACE = words(
    """path accepted tail_of tails length limit prompt_length seed temperature tokens
    overlap cross_entropy target_entropy raw_target_entropy chains run"""
)
REPLAY = words("rounds emitted drafted accepted passes discarded by_length record")
Fields = Iterator[tuple[str, np.ndarray]]
TIMES = (1.0, 1.02, 1.05, 1.08, 1.12, 1.16, 1.2, 1.25)
RULES = {
    "static": lambda: stopping.static(draft_length=4),
    "adaedl": lambda: stopping.adaedl(),
    "max_confidence": lambda: stopping.max_confidence(keep_checked_token=True),
    "survival": lambda: stopping.survival(drafter_cost=0.2, verification_times=TIMES),
    "goodput": lambda: stopping.goodput(drafter_cost=0.2, verification_cost=0.03),
}
MODEL, READING = "smollm2-drafter", "smollm2-drafter-reading@8192"
DRAFTERS = {"model": MODEL, "reading": READING, "several": ["prompt_lookup", MODEL]}


def recorded(state: Any) -> Fields:
    """The named fields of a state that was decoded with a record; entries that mean nothing are 0 or NaN."""
    length, prompt = np.asarray(state.length), np.asarray(state.prompt_length)
    spans = [np.asarray(state.tokens)[row, prompt[row] : length[row]] for row in range(len(length))]
    yield "tokens", np.stack([np.pad(span, (0, NEW - len(span)), constant_values=-1) for span in spans])
    for name in COUNTS:
        yield f"counts.{name}", np.asarray(getattr(state.statistics, name))
    occurred = np.arange(NEW)[None, :] < np.asarray(state.statistics.num_rounds)[:, None]
    drafted, passes = (np.asarray(getattr(state.record, name)) for name in ("drafted", "drafter_passes"))
    for name in ROUNDS:
        value = np.asarray(getattr(state.record, name))
        used = drafted if name == "proposed" else np.maximum(drafted, passes)
        means = occurred if value.ndim == 2 else occurred[..., None] & (np.arange(value.shape[2]) < used[..., None])
        yield f"rounds.{name}", np.where(means, value, np.array(np.nan if value.dtype.kind == "f" else 0, value.dtype))


def decoded(target: Any, prompts: list[list[int]], drafter: Any, rule: str) -> Fields:
    """Texts, counts and records of all prompts as one batch."""
    policy, widths = RULES[rule](), (2, 4, 8)
    pair = sd.build_pair(target, drafter, policy=policy, max_draft_length=DRAFTS, verification_widths=widths)
    ends = sorted({*target.model.spec.eos_ids, *target.tokenizer.eos_ids})
    options = {"max_new_tokens": NEW, "seed": SEED, "stop_ids": ends, "slots": 384, "record_rounds": NEW}
    for temperature in TEMPERATURES:
        warp = sd.make_warp(len(prompts), temperature=temperature)
        state = pair.decoder.prefill(pair.params, prompts, warp=warp, policy=policy, **options)
        fields = dict(recorded(pair.decoder.run(pair.params, state)))
        texts = [target.tokenizer.decode([int(t) for t in row if t >= 0 and t not in ends]) for row in fields["tokens"]]
        yield from ((f"{temperature:g}/{name}", value) for name, value in (fields | {"texts": np.array(texts)}).items())


def measure(folder: Path, prompts: list[str], only: str, first: bool) -> dict[str, np.ndarray]:
    """Every array of the cases whose name contains `only`; replays read the traces that the `first` run stored."""
    target, figures = sd.load_model("smollm2", dtype="bfloat16"), {}
    tokenizer = target.tokenizer
    encoded = [tokenizer.encode(tokenizer.chat([{"role": "user", "content": prompt}])) for prompt in prompts]
    loaded = {name: sd.load_model(name, dtype="bfloat16") for name in (MODEL, READING)}

    def case(name: str, fields: Callable[[], Fields]) -> None:
        try:
            if only in name:
                figures.update({f"{name}/{field}": value for field, value in fields()})
                print(name, flush=True)
        except Exception:  # the case is then missing
            print(f"{name} FAILED\n{traceback.format_exc()}", flush=True)

    def traced(small: Any, tokens: np.ndarray, temperature: float, path: Path) -> Fields:
        texts = [(encoded[row], [int(t) for t in tokens[row] if t >= 0]) for row in range(TRACED)]
        models, params, warp = (target.model, small.model), (target.params, small.params), {"temperature": temperature}
        made = trace_texts(models, params, texts, limit=NEW, warp=warp, seed=SEED, max_draft_length=8)
        if first:
            save_trace(path, made)
        yield from ((name, getattr(made, name)) for name in TRACE if getattr(made, name, None) is not None)

    def replayed(path: Path, rule: str) -> Fields:
        counts = replay(load_trace(path), RULES[rule](), max_draft_length=DRAFTS, record=True)
        yield from ((name, getattr(counts, name)) for name in REPLAY)

    for drafter, source in DRAFTERS.items():
        chosen = [loaded.get(part, part) for part in source] if isinstance(source, list) else loaded[source]
        for rule in RULES:
            case(f"{drafter}/{rule}", partial(decoded, target, encoded, chosen, rule))
            for t in TEMPERATURES if drafter != "several" else ():
                path, tokens = folder / f"trace-{drafter}-{t:g}.npz", figures.get(f"{drafter}/static/{t:g}/tokens")
                if rule == "static" and tokens is not None:
                    case(f"{drafter}/static/trace/{t:g}", partial(traced, chosen, tokens, t, path))
                case(f"{drafter}/{rule}/replay/{t:g}", partial(replayed, path, rule))
    return figures


def difference(old: np.ndarray, new: np.ndarray) -> str:
    """What differs, or an empty string. Equal bits are equal; NaN is equal to NaN."""
    if old.shape != new.shape or old.dtype != new.dtype:
        return f"{old.dtype}{list(old.shape)} became {new.dtype}{list(new.shape)}"
    unequal = (old != new) & ~((old != old) & (new != new))
    if not unequal.any():
        return ""
    at = tuple(int(i) for i in np.argwhere(unequal)[0])
    return f"{unequal.sum()} of {old.size} entries; the first at {list(at)}: {old[at]} became {new[at]}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=("write", "check"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this, of DRAFTER/RULE")
    options = parser.parse_args()
    compilation_cache.enable()
    file, about = options.folder / "golden.npz", options.folder / "about.json"
    if options.action == "write":
        options.folder.mkdir(parents=True, exist_ok=True)
        lines = (Path(__file__).parent.parent / "configs/prompts/demo.jsonl").read_text().splitlines()
        prompts = [json.loads(line)["turns"][0] for line in lines[::2]]
        np.savez_compressed(file, **measure(options.folder, prompts, "", first=True))  # type: ignore[arg-type]
        about.write_text(json.dumps({"jax": jax.__version__, "prompts": prompts}, indent=1))
        return 0
    before = json.loads(about.read_text())
    if before["jax"] != jax.__version__:
        print(f"written with jax {before['jax']}, checked with {jax.__version__}")
    with np.load(file) as archive:
        old = {name: archive[name] for name in archive.files if options.only in name}
    new = measure(options.folder, before["prompts"], options.only, first=False)
    wrong = {name: difference(old[name], new[name]) if name in new else "missing" for name in old}
    wrong |= dict.fromkeys(new.keys() - old.keys(), "not among the golden runs")
    lines = [f"{name}: {text}" for name, text in wrong.items() if text]
    print("\n".join(lines) or f"equal: {len(old)} arrays")
    return int(bool(lines))


if __name__ == "__main__":
    sys.exit(main())
