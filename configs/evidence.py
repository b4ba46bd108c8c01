"""What is recorded for the archive in results/, and which contrasts of stopping rules were named before that.

Command:   python -m experiments.record configs/evidence.py --data FOLDER
           (the folder of the three files below)
           S="python -m experiments.step_cost --dtypes bfloat16 --prompt 0"; N=smollm2-drafter-nano
           $S --target $N --drafter $N --widths 1 2 8 --repeats 150 --out runs/rules/49152  (then $N@8192, for reading)
           $S --target T --drafter D --widths 1 2 4 8 17 --repeats 80 --rules-of runs/rules/49152 \\
               --out runs/evidence/PAIR/costs
           (every pair, then 6 and 12 tokens by F=runs/evidence/PAIR/costs/cost_model.json; python -c "from
           specdec_jax.costs.cost_model import *; save_cost_model('$F', between(load_cost_model('$F'),
           (1, 2, 4, 6, 8, 12, 17)))"; reading with widths 1 2 4 6 8 12 17 and 150 repeats;
           20 repeats for gemma; 15, 12 and 6 for Qwen 0.5B, 1.5B and 1.5B with SmolLM2, the last two some hours before
           at 1 2 4 6 8 12 16)
Hardware:  2 x86 cores, 12 GB of memory
Time:      a day, 8 to 28 minutes a cell; stopped, the same command goes on; several processes share the cells
Expected:  docs/results.md, which is made of the archive

Prompts are of six kinds. The files are not part of the repository:

- spec_bench_dev.jsonl: questions of Spec-Bench (https://github.com/hemingkx/Spec-Bench, data/spec_bench/question.jsonl;
  Apache-2.0, but MT-bench, WMT14, CNN/DailyMail, Natural Questions, GSM8K and DPR have terms of their own)
- human_eval_dev.jsonl: tasks of HumanEval (https://github.com/openai/human-eval, MIT), as requests to complete a
  function
- gsm8k_dev.jsonl: questions of GSM8K's test set (https://github.com/openai/grade-school-math, MIT)

Each has lines with question_id, category and turns; the first turn is asked. Of the N prompts of a kind a pair gets n
that are evenly spaced in the file's order, numbers floor(i N / n): no result decides which. Answers have up to 128
tokens, and those of a fifth of the prompts up to 512 as well, with the first seed and up to temperature 1. Seeds are 0,
1000, 2000 ..., and prompt i has seed + i.

SmolLM2-135M, Gemma 3 270M and Qwen2.5-Coder 1.5B were in sight when constants of `survival` were chosen
(docs/limits.md), and earlier versions of it saw questions of Spec-Bench. Qwen2.5-Coder 0.5B has been a target of one
earlier pair (36 prompts of configs/prompts); no constant was fitted to it. Its drafter is SmolLM2-135M, over the tokens
that both have, until one is distilled for it.

A contrast is the ratio of the total predicted time of `over` to that of `rule`, above 1 where `rule` is faster. Times
are those of the machine's measured costs, greedy or sampled, with each rule's own computation, in passes of plain
decoding of the target, so that a token of a slow target weighs as much as one of a fast target; texts of 128 tokens.
Intervals are of a hierarchical bootstrap: targets are resampled, then prompts of a target (with all of its pairs), then
seeds of a prompt. `faster` and `slower` are confirmed if the interval excludes 1 on that side, `level` if it lies
within 0.97 to 1.03.
"""

from configs.base import Contrast, EvidenceConfig, JudgedRule, PromptKind, RecordedPair

MT_BENCH = ("writing", "roleplay", "reasoning", "math", "coding", "extraction", "stem", "humanities")
SPEC_BENCH, HUMAN_EVAL, GSM8K = "spec_bench_dev.jsonl", "human_eval_dev.jsonl", "gsm8k_dev.jsonl"
SMOLLM2, GEMMA = "smollm2", "runs/gemma-3-270m.gguf"
CODER, SMALL_CODER = "runs/coder-1.5b.gguf", "runs/coder-0.5b.gguf"
BASE, NANO, READING = "smollm2-drafter", "smollm2-drafter-nano", "smollm2-drafter-reading@8192"
USUAL, WIDE = (0.0, 0.7, 1.0), (0.0, 0.7, 1.0, 1.3, 1.7)  # temperatures; the paper's range for SmolLM2

config = EvidenceConfig(
    name="evidence",
    kinds=(
        PromptKind("chat", SPEC_BENCH, MT_BENCH),
        PromptKind("translation", SPEC_BENCH, ("translation",)),
        PromptKind("summarization", SPEC_BENCH, ("summarization",)),
        PromptKind("qa", SPEC_BENCH, ("qa", "rag")),
        PromptKind("math_reasoning", GSM8K, ("math_reasoning",)),
        PromptKind("code", HUMAN_EVAL, ("code",)),
    ),
    pairs=(
        RecordedPair("reading", SMOLLM2, READING, 27, WIDE, seeds=5, drafter_size="14.8 M"),
        RecordedPair("qwen-0.5b-smollm2", SMALL_CODER, SMOLLM2, 10, USUAL, seeds=2, batch=8, drafter_size="135 M"),
        # the base model, which has no chat
        RecordedPair("gemma", GEMMA, SMOLLM2, 17, USUAL, seeds=5, chat=False, batch=8, drafter_size="135 M"),
        RecordedPair("base", SMOLLM2, BASE, 27, WIDE, seeds=5, drafter_size="13.8 M"),
        RecordedPair("qwen-smollm2", CODER, SMOLLM2, 10, USUAL, seeds=2, batch=8, drafter_size="135 M"),
        RecordedPair("qwen", CODER, SMALL_CODER, 10, USUAL, seeds=2, batch=8, drafter_size="494 M"),
        RecordedPair("nano", SMOLLM2, NANO, 27, WIDE, seeds=5, drafter_size="3.9 M"),
    ),
    rules=(
        *(JudgedRule(f"static-{n}", f"static(draft_length={n})") for n in range(1, 9)),
        JudgedRule("static", "static", "here"),
        JudgedRule("static, elsewhere", "static", "elsewhere"),
        JudgedRule("adaedl 0.7", "adaedl"),
        JudgedRule("adaedl", "adaedl", "here"),
        JudgedRule("adaedl, lambda fixed", "adaedl-fixed", "here"),
        JudgedRule("adaedl-first", "adaedl-first", "here"),
        JudgedRule("adaedl-keep", "adaedl-keep", "here"),
        JudgedRule("adaedl-keep, elsewhere", "adaedl-keep", "elsewhere"),
        JudgedRule("max-confidence", "max-confidence", "here"),
        JudgedRule("max-confidence-keep", "max-confidence-keep", "here"),
        JudgedRule("cumulative-confidence", "cumulative-confidence", "here"),
        JudgedRule("cumulative-confidence, elsewhere", "cumulative-confidence", "elsewhere"),
        JudgedRule("cumulative-confidence, price", "cumulative-confidence", "price"),
        JudgedRule("svip", "svip", "here"),
        JudgedRule("goodput", "goodput", "here"),
        JudgedRule("hf-heuristic", "hf-heuristic", "here"),
        JudgedRule("survival", "survival"),
        JudgedRule("survival, probability", "survival(signal=probability)"),
        JudgedRule("survival, bound", "survival(signal=bound)"),
    ),
    contrasts=(
        Contrast(
            "as published",
            "adaedl 0.7",
            "static",
            "slower",
            "The paper's static lengths are 3, 7 and 16; one that is chosen for the pair is a stronger baseline.",
        ),
        Contrast(
            "lambda chosen",
            "adaedl",
            "static",
            "slower",
            "A check before the first token discards a drafter pass whenever it fails, also with the best lambda.",
        ),
        Contrast(
            "untuned length",
            "adaedl",
            "static-8",
            "faster",
            "Static drafts of eight tokens are too long for most texts; published gains are over such lengths.",
        ),
        Contrast(
            "first token",
            "adaedl-first",
            "adaedl",
            "faster",
            "With a first token in any case no round pays for a drafter pass that drafts nothing.",
        ),
        Contrast(
            "checked token",
            "adaedl-keep",
            "adaedl",
            "faster",
            "The distribution that fails its check has been paid for, and its token is often accepted.",
        ),
        Contrast(
            "checked token, static",
            "adaedl-keep",
            "static",
            "faster",
            "Without discarded passes the entropy is a better signal than none, where text is predictable.",
            (0.0, 0.7),
        ),
        Contrast(
            "entropy or probability",
            "adaedl-keep",
            "max-confidence-keep",
            "level",
            "Entropy and the largest probability order the positions nearly alike.",
        ),
        Contrast(
            "entropy thresholds",
            "svip",
            "adaedl-keep",
            "level",
            "Both compare the entropy with a threshold and discard no token; one moves it.",
        ),
        Contrast(
            "moving lambda",
            "adaedl",
            "adaedl, lambda fixed",
            "level",
            "Algorithm 1 moves lambda by 0.001 a round, which is little in a text of 128 tokens.",
        ),
        Contrast(
            "survival",
            "survival",
            "static",
            "faster",
            "A price on time adapts the length to the text without a setting.",
        ),
        Contrast(
            "survival, unseen target",
            "survival",
            "static",
            "faster",
            "The same on the target to which nothing was fitted.",
            targets=(SMALL_CODER,),
        ),
        Contrast(
            "survival, hot",
            "survival",
            "static",
            "level",
            "At high temperatures few drafts are accepted, and short static drafts are nearly the best.",
            (1.3, 1.7),
            (SMOLLM2,),
        ),
        Contrast(
            "survival or a chosen threshold",
            "survival",
            "cumulative-confidence",
            "level",
            "A threshold that is chosen for the pair stands for the price.",
        ),
        Contrast(
            "survival or the price as threshold",
            "survival",
            "cumulative-confidence, price",
            "level",
            "The price explains which threshold is right; the prior and what a text teaches add little.",
        ),
        Contrast(
            "price for a new pair",
            "cumulative-confidence, price",
            "cumulative-confidence, elsewhere",
            "faster",
            "A threshold of other targets is wrong where a drafter pass costs more or less; the price knows that cost.",
        ),
        Contrast(
            "lambda for a new pair",
            "survival, bound",
            "adaedl-keep, elsewhere",
            "faster",
            "The price in the place of lambda needs no setting from other targets.",
        ),
        Contrast(
            "length for a new pair",
            "static, elsewhere",
            "static",
            "slower",
            "The best static length depends on the pair.",
        ),
        Contrast(
            "odds or probability",
            "survival",
            "survival, probability",
            "faster",
            "The probability of the drawn token is no acceptance rate; the prior calibrates it.",
            (0.7, 1.0),
        ),
        Contrast(
            "odds or bound",
            "survival",
            "survival, bound",
            "faster",
            "The bound is far below the acceptance rate where the entropy is high.",
        ),
        Contrast(
            "goodput",
            "goodput",
            "static",
            "level",
            "A length from past acceptance alone follows the mean of a text, which one length does as well.",
        ),
    ),
)
