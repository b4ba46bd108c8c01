"""Decodes with transformers on torch. Run by that environment's Python: nothing of this project is imported.

    transformers_side.py TARGET DRAFTER DTYPE THREADS

Modes: plain; assisted-N, with N drafts a round; assisted-dynamic, which stops by the drafter's confidence;
assisted-heuristic, whose drafts grow and shrink; exit-N, where the target's first N layers draft; lookup;
biased-N, which replaces rejected drafts by draws from the target.
"""

import sys
import time

import torch
from serving import peak, serve
from transformers import AutoModelForCausalLM
from transformers.generation import utils

DRAFTS, CONFIDENCE = 20, 0.4  # transformers' own defaults
CORRECT = utils._speculative_sampling


def load(path, dtype):
    """A model in evaluation mode."""
    return AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()


def options_of(mode, drafter):
    """Options of `generate` for a mode."""
    kind, _, setting = mode.partition("-")
    utils._speculative_sampling = biased if kind == "biased" else CORRECT
    if kind == "plain":
        return {}
    if kind == "lookup":
        return {"prompt_lookup_num_tokens": 5}
    if kind == "exit":
        return {"assistant_early_exit": int(setting)}
    dynamic, grows = setting == "dynamic", setting == "heuristic"
    config = drafter.generation_config
    config.num_assistant_tokens = DRAFTS if dynamic else 2 if grows else int(setting)
    config.num_assistant_tokens_schedule = "heuristic" if grows else "constant"
    config.assistant_confidence_threshold = CONFIDENCE if dynamic else 0.0
    return {"assistant_model": drafter}


def biased(candidates, candidate_logits, candidate_length, new_logits, *rest, **options):
    """Their speculative sampling, but a rejected draft is replaced by a draw from the target's distribution."""
    accepted, matches = CORRECT(candidates, candidate_logits, candidate_length, new_logits, *rest, **options)
    if matches < candidate_length and matches + 1 == accepted.shape[1]:
        again = torch.multinomial(new_logits[:, matches].softmax(dim=-1), num_samples=1)
        accepted = torch.cat([accepted[:, :-1], again], dim=1)
    return accepted, matches


def answer(target, drafter, request, passes):
    """Decodes a request."""
    ids = torch.tensor([request["ids"]])
    sampled = request["temperature"] > 0
    options = options_of(request["mode"], drafter) | {"do_sample": sampled, "max_new_tokens": request["new"]}
    if sampled:
        options |= {"temperature": request["temperature"], "top_k": 0, "top_p": 1.0}
    torch.manual_seed(request["seed"])
    passes.clear()
    watch = time.perf_counter()
    with torch.inference_mode():
        out = target.generate(ids, attention_mask=torch.ones_like(ids), eos_token_id=-1, pad_token_id=0, **options)
    seconds = time.perf_counter() - watch
    return {"tokens": out[0, ids.shape[1] :].tolist(), "seconds": seconds, "passes": len(passes)}


def main():
    """Answers requests until there are no more."""
    target_path, drafter_path, dtype, threads = sys.argv[1:]
    torch.set_num_threads(int(threads))
    base = peak()
    target, drafter = load(target_path, dtype), load(drafter_path, dtype)
    passes = []
    target.register_forward_hook(lambda *_: passes.append(1))
    serve(f"transformers on torch {torch.__version__}", lambda request: answer(target, drafter, request, passes), base)


if __name__ == "__main__":
    main()
