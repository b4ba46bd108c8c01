"""Decodes with vLLM's CPU build. Run by that environment's Python: nothing of this project is imported.

    vllm_side.py TARGET DRAFTER DTYPE THREADS MODE

The mode is the process's: plain; draft-N, with the drafter's N first choices a round; sampled-N, with samples of it;
block-N, the same with block verification; ngram-N, with drafts of the text.
"""

import os
import sys
import time

from serving import peak, serve

LOOKUP = {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 2}
os.environ |= {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
if len(sys.argv) > 4:
    os.environ["OMP_NUM_THREADS"] = sys.argv[4]


def passes_of(llm):
    """Rounds of drafting so far; None where nothing drafts."""
    metrics = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    return metrics.get("vllm:spec_decode_num_drafts")


def main():
    """Answers requests until there are no more."""
    from vllm import LLM, SamplingParams
    from vllm import __version__ as version

    target, drafter, dtype, _, mode = sys.argv[1:]
    out, base = os.dup(1), peak()
    os.dup2(2, 1)  # what vLLM prints is no answer
    options = {"max_model_len": 1024, "enforce_eager": True, "disable_log_stats": False}
    kind, _, drafts = mode.partition("-")
    if drafts:
        method = LOOKUP if kind == "ngram" else {"method": "draft_model", "model": drafter}
        method |= {} if kind in ("ngram", "draft") else {"draft_sample_method": "probabilistic"}
        method |= {"rejection_sample_method": "block"} if kind == "block" else {}
        options["speculative_config"] = method | {"num_speculative_tokens": int(drafts)}
    llm = LLM(model=target, dtype=dtype, **options)

    def answer(request):
        before, new = passes_of(llm), request["new"]
        params = SamplingParams(
            temperature=request["temperature"], max_tokens=new, seed=request["seed"], ignore_eos=True
        )
        watch = time.perf_counter()
        result = llm.generate([{"prompt_token_ids": request["ids"]}], params, use_tqdm=False)[0]
        seconds, after = time.perf_counter() - watch, passes_of(llm)
        passes = new if after is None else int(after - (before or 0))
        return {"tokens": list(result.outputs[0].token_ids), "seconds": seconds, "passes": passes}

    with os.fdopen(out, "w") as answers:
        serve(f"vLLM {version}", answer, base, answers)


if __name__ == "__main__":
    main()
