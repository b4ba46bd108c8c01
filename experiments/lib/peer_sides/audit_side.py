"""Samples tiny models with transformers' assisted generation. Run by that environment's Python: nothing of this project
is imported.

    audit_side.py OUT SAMPLES GREEDY

Writes a target and a drafter of V tokens to OUT/target and OUT/drafter, samples answers of LENGTH tokens in every way
of METHODS, and greedy ones in float32 and bfloat16, and writes OUT/<number>.json as each is done.
"""

import json
import pathlib
import sys

import torch
import transformers
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM
from transformers.generation import utils

VOCAB, LENGTH, PROMPT = 4, 4, (1, 2, 1, 3, 1, 2)  # lookup finds (1, 2) in the prompt
SIZES = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
GREEDY_LENGTH = 32
NOISE = 0.25  # scale of the drafter's noise: about half of its drafts are rejected
PLAIN, HEURISTIC = "plain", "heuristic"
CONSTANT = {"num_assistant_tokens_schedule": "constant", "assistant_confidence_threshold": 0.0}
METHODS = {  # options of `generate` and of the drafter's generation config; the most telling first
    "assisted, 3 tokens": ({}, {"num_assistant_tokens": 3} | CONSTANT),
    "biased on purpose": ({}, {"num_assistant_tokens": 3} | CONSTANT),
    "prompt lookup": ({"prompt_lookup_num_tokens": 3}, None),
    "assisted, confidence 0.4": ({}, {"num_assistant_tokens": 3} | CONSTANT | {"assistant_confidence_threshold": 0.4}),
    PLAIN: ({}, None),
    "assisted, early exit": ({"assistant_early_exit": 1}, {}),
    "assisted, heuristic": ({}, {"num_assistant_tokens": 2} | CONSTANT | {"num_assistant_tokens_schedule": HEURISTIC}),
}


def write_models(out):
    """Random weights, large enough that tokens differ in probability; the drafter is the target with noise."""
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=VOCAB, eos_token_id=None, bos_token_id=None, pad_token_id=None, **SIZES)
    config.tie_word_embeddings = False
    target, drafter = LlamaForCausalLM(config), LlamaForCausalLM(config)
    for parameter, copy in zip(target.parameters(), drafter.parameters(), strict=True):
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.35)
        copy.data.copy_(parameter.data + NOISE * torch.randn_like(parameter) * (parameter.dim() > 1))
    for name, model in (("target", target), ("drafter", drafter)):
        model.save_pretrained(out / name)
        words = {f"w{number}": number for number in range(VOCAB)}
        Tokenizer(WordLevel(words, unk_token="w0")).save(str(out / name / "tokenizer.json"))


def load(out, name, dtype):
    """A model in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(out / name, dtype=dtype).eval()


def generate(models, method, ids, count, sampled):
    """Tokens after the prompt."""
    options, drafting = METHODS[method]
    options = dict(options) | {"do_sample": sampled, "max_new_tokens": count, "eos_token_id": -1, "pad_token_id": 0}
    if drafting is not None:
        assistant = models[0] if "assistant_early_exit" in options else models[1]
        for name, value in drafting.items():
            setattr(assistant.generation_config, name, value)
        if assistant is models[1]:
            options["assistant_model"] = assistant
    if sampled:
        options |= {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return models[0].generate(ids, attention_mask=torch.ones_like(ids), **options)[0, ids.shape[1] :].tolist()


def biased(candidates, candidate_logits, candidate_length, new_logits, *rest, **options):
    """Their speculative sampling, but a rejected draft is replaced by a draw from the target's own distribution."""
    accepted, matches = CORRECT(candidates, candidate_logits, candidate_length, new_logits, *rest, **options)
    if matches < candidate_length and matches + 1 == accepted.shape[1]:
        again = torch.multinomial(new_logits[:, matches].softmax(dim=-1), num_samples=1)
        accepted = torch.cat([accepted[:, :-1], again], dim=1)
    return accepted, matches


CORRECT = utils._speculative_sampling


def sampled_counts(models, method, samples):
    """How often each sequence came, by its number in base V."""
    ids, counts = torch.tensor([PROMPT]), [0] * VOCAB**LENGTH
    utils._speculative_sampling = biased if method == "biased on purpose" else CORRECT
    for seed in range(samples):
        torch.manual_seed(seed)
        number = 0
        for token in generate(models, method, ids, LENGTH, True):
            number = number * VOCAB + token
        counts[number] += 1
    utils._speculative_sampling = CORRECT
    return counts


def greedy_gaps(models, method, prompts):
    """Gap of the two largest logits at the first difference, per prompt whose greedy text differs from plain."""
    gaps = []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        plain, other = (generate(models, name, ids, GREEDY_LENGTH, False) for name in (PLAIN, method))
        at = next((place for place, pair in enumerate(zip(plain, other, strict=True)) if pair[0] != pair[1]), None)
        if at is not None:
            logits = models[0](torch.tensor([[*prompt, *plain[:at]]])).logits[0, -1].float()
            gaps.append(float(logits.max() - logits[other[at]]))
    return gaps


def main():
    """Writes all that is missing."""
    out, samples, greedy = pathlib.Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    if not (out / "drafter").exists():
        write_models(out)
    models = {dtype: [load(out, name, getattr(torch, dtype)) for name in ("target", "drafter")] for dtype in DTYPES}
    prompts = torch.randint(0, VOCAB, (greedy, 12), generator=torch.Generator().manual_seed(1)).tolist()
    for number, method in enumerate(METHODS):
        path = out / f"{number}.json"
        if path.exists():
            continue
        record = {"method": method, "versions": f"transformers {transformers.__version__}, torch {torch.__version__}"}
        try:
            record["counts"] = sampled_counts(models["float32"], method, samples)
            record["gaps"] = {dtype: greedy_gaps(models[dtype], method, prompts) for dtype in DTYPES}
        except (AttributeError, RuntimeError, TypeError, ValueError) as error:
            record["error"] = f"{type(error).__name__}: {error}"
        path.write_text(json.dumps(record | {"prompt": PROMPT, "vocab": VOCAB, "length": LENGTH, "prompts": greedy}))


DTYPES = ("float32", "bfloat16")

if __name__ == "__main__":
    with torch.inference_mode():
        main()
