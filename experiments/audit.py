"""Is another engine's speculative decoding lossless?

Question:  Do texts that transformers, llama.cpp and vLLM draft and sample have the target's distribution?
           And where greedy texts are not the target's first choices, is it rounding, or another choice?
Command:   python -m experiments.audit [--only transformers] [--samples 4000] [--greedy 40]
           python -m experiments.audit --write FOLDER, serve FOLDER/target (or target.gguf) with any engine and options,
           then python -m experiments.audit --url http://localhost:8000/v1, which has completions as OpenAI's
Time:      an hour and a half on one core, and the time of `experiments.peers` to make the environments, once
Expected:  docs/losslessness.md: the control, llama.cpp's tree and vLLM's drafter on a CPU are biased; exit code 1 where
           any but the control is, or where the control is not found out
Output:    runs/audit-<time>/, with the models and logs; results.jsonl has a line a method

A target of four tokens and its drafter (the target with noise) are written in Hugging Face format and as GGUF. The
distribution of four tokens after a prompt is enumerated by this package from the same weights, and the engine's samples
are compared with it by chi-square: the first token, the first two, and so on, the smallest p counting as often as there
are tests. Sequences that are expected fewer than five times are pooled. "Seen from" is the chi-square distance (the sum
of (p - q)^2 / p) of a bias that this many samples show in nine of ten runs, wherever it is. A greedy text that takes
another token than the first is rounding where that token's logit is nearly the largest, by this package in float32. A
method that cannot be installed or fails is a row that says so.
"""

import itertools
import json
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Annotated, Any
from urllib.request import Request, urlopen

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from scipy import optimize, stats
from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models

from experiments.lib.commands import command
from experiments.lib.engines import Failed
from experiments.lib.run_folder import RunFolder
from experiments.lib.tables import NONE, markdown, publish
from experiments.peers import REQUIREMENTS, Contender, Sided, Sides, export
from specdec_jax.loading import LoadedModel
from specdec_jax.loading.gguf.tokenizer import DIGIT_BY_DIGIT, pre_tokenizer
from specdec_jax.loading.tokenizer import Tokenizer
from specdec_jax.lossless.sampled import SPREAD, chi_square
from specdec_jax.models import llama
from specdec_jax.ranges import Between

CONTROL = "biased-3"
METHODS = {  # by engine, as its side calls them (experiments/lib/peer_sides)
    "transformers": ("plain", "assisted-3", CONTROL, "lookup", "assisted-dynamic", "assisted-heuristic", "exit-1"),
    "llama.cpp": ("plain", "draft-3", "lookup-3", "tree-3"),
    "vllm": ("plain", "draft-3", "sampled-3", "block-3", "ngram-3"),
}
LETTERS, LENGTH, PROMPT = "abcd", 4, (1, 2, 1, 3, 1, 2)  # a lookup has (1, 2) in the prompt
GREEDY_LENGTH = 32
EXTRA = 28  # tokens, and tries: llama.cpp's programs may exit before all output is flushed
SCALE = 3.0  # of the weights as initialised, and of noise in the drafter's: a quarter of its drafts is rejected
LEVEL = 1e-4  # significance level of one test; a run has about twenty
NEAR = {"float32": 1e-2, "bfloat16": 0.1, "served": 0.1}  # gaps that rounding may turn; llama.cpp caches float16
KINDS = {"float32": "F32", "bfloat16": "BF16"}  # GGUF's names


@dataclass(frozen=True, kw_only=True)
class Audit(Sided):
    """Sample other engines and compare with the exact distribution."""

    samples: Annotated[int, Between(200)] = 4000  # Texts sampled with each method.
    greedy: Annotated[int, Between(1)] = 40  # Greedy texts of each method.
    write: str | None = None  # Only write the models into this folder.
    url: str | None = None  # Audit the server at this address, of the target that --write wrote, as it is.
    model: str = "target"  # The model's name there.

    def __post_init__(self) -> None:
        super().__post_init__()
        if unknown := [name for name in self.only if name not in METHODS]:
            raise ValueError(f"engines to audit are {', '.join(METHODS)}, got {unknown[0]!r}")
        if sum(map(bool, (self.write is not None, self.url is not None, self.only))) > 1:
            raise ValueError("--write, --url and --only exclude each other")
        if self.url is not None and not self.url.startswith(("http://", "https://")):
            raise ValueError(f"--url begins with http:// or https://, got {self.url!r}")
        if self.write is not None and (not self.write or Path(self.write).exists()):
            raise ValueError(f"--write makes a new folder, got {self.write!r}")


def audit(config: Audit, console: Console) -> int:
    """Samples what is missing and writes the run folder; 1 where the wrong ones are biased."""
    target, drafter = tiny_pair()
    if config.write is not None:
        console.print(*export(Path(config.write), target, drafter, "F32").values(), sep="\n")
        return 0
    sides: dict[str, Any] = {} if config.url is None else {"served": Server(config.url, config.model)}
    folder = RunFolder.create("audit", config, config.out)
    law = exact_law(target, PROMPT, LENGTH)
    prompts = np.random.default_rng(1).integers(len(LETTERS), size=(config.greedy, 12)).tolist()
    methods = METHODS if config.url is None else {"server": (config.url,)}
    wanted = [(engine, method) for engine in config.only or methods for method in methods.get(engine, ())]
    missing, failed = folder.missing(("engine", "method"), wanted), []
    with ExitStack() as stack:
        for dtype, kind in KINDS.items() if config.url is None else ():
            weights = export(folder.path / f"weights-{dtype}", target, drafter, kind)
            sides[dtype] = stack.enter_context(closing(Sides(config, folder, weights, console)))
        for engine, method in missing:
            entry: dict[str, Any] = {"engine": engine, "method": method, "gaps": {}}
            try:
                for dtype, side in sides.items():
                    contender = Contender(f"{engine} {method}", engine, dtype, method, method * (engine == "vllm"))
                    texts = [answered(side, contender, prompt, GREEDY_LENGTH) for prompt in prompts]
                    entry["gaps"][dtype] = greedy_gaps(target, prompts, texts)
                    if dtype == next(iter(sides)):
                        numbers = range(config.samples)
                        drawn = [answered(side, contender, PROMPT, LENGTH, number) for number in numbers]
                        cells = np.ravel_multi_index(np.transpose(drawn), (len(LETTERS),) * LENGTH)
                        entry["counts"] = np.bincount(cells, minlength=len(law)).tolist()
                    if contender.process:
                        side.close()
            except Failed as error:
                entry["error"] = str(error)
            row = judged(entry, law)
            (failed if "error" in entry else folder).append(row)  # what failed is tried again next time
            console.print(f"{engine} {method}: {verdict(row)}")
    rows = folder.rows() + failed
    pinned = (Path(__file__).parents[1] / REQUIREMENTS).read_text(encoding="utf-8").splitlines()
    versions = [line.replace("==", " ") for line in pinned if "==" in line and not line.startswith("#")]
    here = f"{', '.join(versions)}; float32 on a CPU"
    about = here if config.url is None else f"{config.url}, model {config.model}"
    cells = []
    for row in rows:
        figures = [NONE] * 6
        if "error" not in row:
            test = f"{row['statistic']:.0f} / {row['degrees']} ({row['tokens']})", f"{row['p_value']:.2g}"
            greedy = [f"{sum(np.array(gaps) > 0)} of {len(gaps)} ({max(gaps):.2g})" for gaps in row["gaps"].values()]
            figures = [f"{row['samples']:,}", *test, f"{row['seen_from']:.3f}", *greedy, *[NONE] * (2 - len(greedy))]
        cells.append([f"{row['engine']} {row['method']}", *figures, verdict(row)])
    heads = ["method", "samples", "chi-square / degrees (tokens)", "p", "seen from", "greedy: differ (gap)"]
    table = markdown([*heads, "bfloat16", "verdict"], cells)
    publish(folder, f"{about}.\n\n{table}\n", console)
    wrong = [row for row in rows if row["biased"] != (row["method"] == CONTROL)]
    for row in wrong:
        state = "biased" if row["biased"] else "not shown to be biased"
        console.print(f"{row['engine']} {row['method']}: {state}", style="red")
    return 1 if wrong or all("error" in row for row in rows) else 0


class Server:
    """A side that others started: completions over HTTP. Raises Failed if it does not answer."""

    def __init__(self, url: str, model: str):
        self._url, self._model = url.rstrip("/") + "/completions", model
        self.answer(None, {"text": LETTERS, "new": 1, "temperature": 0.0, "seed": 0})

    def answer(self, contender: Contender | None, request: dict[str, Any]) -> dict[str, Any]:
        """Decodes a request as `Sides.answer`. Raises Failed."""
        del contender  # the server has no modes
        fields = {"model": self._model, "prompt": request["text"], "max_tokens": request["new"]}
        fields |= {"temperature": request["temperature"], "seed": request["seed"]}
        try:
            posted = Request(self._url, json.dumps(fields).encode(), {"Content-Type": "application/json"})
            with urlopen(posted, timeout=300) as answer:
                text = json.load(answer)["choices"][0]["text"]
            return {"tokens": [LETTERS.index(letter) for letter in text]}
        except (OSError, HTTPException, ValueError, LookupError, TypeError) as error:
            raise Failed(f"no completions of {LETTERS} from {self._url}: {error}") from None


def tiny_pair() -> tuple[LoadedModel, LoadedModel]:
    """A target with a letter a token and weights at random, and a drafter that is the target with noise."""
    backend = Backend(models.BPE({letter: token for token, letter in enumerate(LETTERS)}, []))
    backend.pre_tokenizer, backend.decoder = pre_tokenizer(DIGIT_BY_DIGIT), decoders.ByteLevel()
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    sizes |= {"num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 1024}
    config = llama.LlamaConfig(vocab_size=len(LETTERS), tie_word_embeddings=False, eos_token_ids=(), **sizes)
    params, noise = (llama.init_params(config, key, jnp.float32) for key in jax.random.split(jax.random.key(0), 2))
    params = jax.tree.map(lambda leaf: leaf * SCALE if leaf.ndim > 1 else leaf, params)
    drafting = jax.tree.map(lambda leaf, other: leaf + SCALE * other if leaf.ndim > 1 else leaf, params, noise)
    model = llama.language_model(config, jnp.float32)
    tokenizer = Tokenizer(backend, {})
    target, drafter = (LoadedModel(model, each, tokenizer, "tiny", config) for each in (params, drafting))
    return target, drafter


def answered(
    sides: Sides | Server, contender: Contender, prompt: Sequence[int], count: int, number: int | None = None
) -> list[int]:
    """`count` tokens after a prompt: greedy ones, or the sample of this number. Raises Failed."""
    text = "".join(LETTERS[token] for token in prompt)
    drawn = {"temperature": 0.0, "seed": 0} if number is None else {"temperature": 1.0, "seed": number * SPREAD % 2**31}
    more = EXTRA * (contender.peer == "llama.cpp")
    request = {"ids": list(prompt), "text": text, "new": count + more, "slots": 128, "untimed": True, **drawn}
    tokens: list[int] = []
    for _ in range(1 + more):
        answer = sides.answer(contender, request)
        if "tokens" not in answer:  # printed text, of the speculative programs after the prompt
            printed = answer["text"] if contender.mode == "plain" else answer["text"].partition(text)[2]
            answer["tokens"] = [LETTERS.index(letter) for letter in printed if letter in LETTERS]
        tokens = answer["tokens"][:count]
        if len(tokens) == count:
            break
    if len(tokens) < count or not set(tokens) <= set(range(len(LETTERS))):
        raise Failed(f"{count} tokens below {len(LETTERS)} were requested, got {tokens}")
    return tokens


def log_probs(model: LoadedModel, texts: np.ndarray, start: int) -> np.ndarray:
    """[B, T - start, V] float64: of the tokens from `start` on, given the text before each, in float32."""
    with jax.default_matmul_precision("highest"):
        cache = model.model.init_cache(model.params, *texts.shape)
        logits, _ = model.model.apply(model.params, jnp.asarray(texts, jnp.int32), cache)
    logits = logits[:, start - 1 : -1, : model.model.spec.vocab_size]
    return np.asarray(jax.nn.log_softmax(logits, axis=-1), np.float64)


def exact_law(model: LoadedModel, prompt: Sequence[int], length: int) -> np.ndarray:
    """[V ** length] float64: the probability of every sequence of tokens after the prompt."""
    sequences = np.array(list(itertools.product(range(model.model.spec.vocab_size), repeat=length)))
    texts = np.concatenate([np.tile(prompt, (len(sequences), 1)), sequences], axis=1)
    seen = np.take_along_axis(log_probs(model, texts, len(prompt)), sequences[..., None], axis=2)
    return np.exp(seen.sum(axis=(1, 2)))


def greedy_gaps(model: LoadedModel, prompts: Sequence[Sequence[int]], texts: Sequence[Sequence[int]]) -> list[float]:
    """For every greedy text the largest difference of a position's largest logit and its token's."""
    whole = np.concatenate([np.array(prompts), np.array(texts)], axis=1)
    seen = log_probs(model, whole, len(prompts[0]))
    chosen = np.take_along_axis(seen, np.array(texts)[..., None], axis=2)[..., 0]
    return (seen.max(axis=2) - chosen).max(axis=1).tolist()


def judged(entry: dict[str, Any], law: np.ndarray) -> dict[str, Any]:
    """The entry of a method with the verdict."""
    if "error" in entry:
        return entry | {"biased": False}
    counts, gaps = np.array(entry["counts"], float), entry["gaps"]
    tests = []  # for prefixes of length 1, 2, ...: a bias is clearest where it occurs
    for length in range(1, LENGTH + 1):
        prefixes = [each.reshape(len(LETTERS) ** length, -1).sum(axis=1) for each in (counts, law)]
        statistic, degrees, p_value = chi_square(prefixes[0], prefixes[1] / prefixes[1].sum() * prefixes[0].sum())
        tests.append((p_value, statistic, degrees, length))
    least, statistic, degrees, length = min(tests)
    p_value, seen_from = min(1.0, least * len(tests)), smallest_seen(tests[-1][2], LEVEL / len(tests)) / counts.sum()
    biased = p_value < LEVEL or any(max(gaps[dtype], default=0) > NEAR[dtype] for dtype in gaps)
    row = {"samples": int(counts.sum()), "tokens": length, "degrees": degrees, "statistic": statistic}
    return entry | row | {"p_value": p_value, "seen_from": seen_from, "biased": biased}


def smallest_seen(degrees: int, level: float) -> float:
    """The noncentrality that a test at this level finds in nine of ten runs."""
    limit = stats.chi2.isf(level, degrees)
    return float(optimize.brentq(lambda shift: stats.ncx2.sf(limit, degrees, shift) - 0.9, 1e-3, 1e4))


def verdict(row: dict[str, Any]) -> str:
    """The last cell of a method's row."""
    if "error" in row:
        return f"does not run: {row['error'][:150]}".replace("|", "/")
    return "biased" if row["biased"] else "lossless, as far as tested"


main = command(Audit, audit, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
