"""Records a trace of any pair of Hugging Face models with torch: one file, without JAX and without this package.

    python record_torch.py --target Qwen/Qwen2.5-1.5B-Instruct --drafter Qwen/Qwen2.5-0.5B-Instruct \
        --prompts prompts.jsonl --temperatures 0 0.7 --out traces [--device cuda --dtype bfloat16]

Needs numpy, torch and transformers 5. Writes OUT/trace-<temperature>.npz in format 1 of docs/traces.md: the target's
own texts, and along them, teacher-forced, what stopping rules read of the drafter, with the drafter's continuation
after each token that would be rejected. Every rule of specdec_jax replays it exactly, as it does a trace of
`python -m experiments.record`; the random numbers are others, so sampled texts and acceptance bits differ from it.

A line of the prompt file has `turns`, `prompt` or `text` (through the chat template unless --no-chat), or `tokens`, a
list of ids; `id` and `category` are kept. Both models need one vocabulary. A drafter that reads its target's hidden
states (EAGLE) cannot be recorded this way. Time is mostly the continuations: a text of 128 tokens of which 40 % are
rejected takes 51 rows of 15 drafter passes, in batches of --batch rows.
"""

import argparse
import inspect
import json
import os
import sys
from pathlib import Path

import numpy as np
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer

FORMAT = 1
FEATURES = ("entropy", "max_prob", "margin", "raw_entropy", "raw_max_prob", "log_q")
CANDIDATES = 4  # of which a trace says whether they are the text's token: the draft and three others
WRITE, ACCEPT, REJECT, FURTHER, CONTINUE = range(5)  # what a random number is for


def uniforms(seed, purpose, count, *at):
    """Random numbers that depend on nothing but the text's seed, their purpose and the position."""
    return np.random.default_rng((seed, purpose, *at)).random(count)


def warped(logits, warp):
    """Log-probabilities [R, V] of the distribution as sampled; at temperature 0 one-hot."""
    if warp["temperature"] == 0:
        one_hot = torch.full_like(logits, -torch.inf)
        return one_hot.scatter_(1, logits.argmax(dim=1, keepdim=True), 0.0)
    scores = (logits - logits.amax(dim=1, keepdim=True)) / warp["temperature"]
    if warp["top_k"] > 0:
        least = scores.topk(min(warp["top_k"], scores.shape[1]), dim=1).values[:, -1:]
        scores = scores.masked_fill(scores < least, -torch.inf)
    if warp["top_p"] < 1:
        ordered = scores.sort(dim=1, descending=True).values
        prob = ordered.softmax(dim=1)
        inside = prob.cumsum(dim=1) - prob < warp["top_p"]
        least = ordered.masked_fill(~inside, torch.inf).amin(dim=1, keepdim=True)
        scores = scores.masked_fill(scores < least, -torch.inf)
    if warp["min_p"] > 0:
        scores = scores.masked_fill(scores < np.log(warp["min_p"]), -torch.inf)
    return scores.log_softmax(dim=1)


def entropy(log_prob):
    """In nats, over the probabilities that are not zero; [R]."""
    return -(log_prob.exp() * log_prob.masked_fill(log_prob == -torch.inf, 0.0)).sum(dim=1)


def statistics(logits, log_q, greedy):
    """What rules read of the drafter's distributions: the first five FEATURES, [R, 5]. Greedy: of the raw ones."""
    raw = logits.log_softmax(dim=1)
    seen = raw if greedy else log_q
    two = seen.exp().topk(2, dim=1).values
    columns = entropy(seen), two[:, 0], two[:, 0] - two[:, 1], entropy(raw), raw.exp().amax(dim=1)
    return torch.stack(columns, dim=1)


def pick(values, tokens):
    """values[r, tokens[r]], [R]."""
    return values.gather(1, tokens[:, None])[:, 0]


def draw(weights, uniform):
    """A token of each row [R, V] of weights, which need not be normalised, by its uniform number in [0, 1)."""
    weights = weights.double()
    reached = weights.cumsum(dim=1)
    goal = torch.as_tensor(uniform, device=weights.device).double()[:, None] * reached[:, -1:]
    at = torch.searchsorted(reached, goal, right=True)
    last = weights.shape[1] - 1 - (weights > 0).flip(1).int().argmax(dim=1, keepdim=True)
    return torch.minimum(at, last)[:, 0]


class Model:
    """A language model in float32 logits over `vocab` tokens; a narrower one gives the rest no probability."""

    def __init__(self, source, options):
        self.net = AutoModelForCausalLM.from_pretrained(source, dtype=getattr(torch, options.dtype))
        self.net = self.net.to(options.device).eval()
        self.takes = inspect.signature(self.net.forward).parameters
        self.vocab = self.net.get_output_embeddings().weight.shape[0]

    def __call__(self, tokens, mask, keep, cache=None):
        """Logits [R, keep, V] of the last positions, and the cache."""
        places = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        options = {"position_ids": places, "logits_to_keep": keep}
        options = {name: value for name, value in options.items() if name in self.takes}
        out = self.net(input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **options)
        logits = out.logits[:, -keep:, : self.vocab].float()
        missing = self.vocab - logits.shape[2]
        if missing > 0:
            logits = torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits, out.past_key_values

    def along(self, text, keep):
        """Logits [keep, V] after each of the last tokens of a text."""
        tokens = torch.tensor([text], device=self.net.device)
        return self(tokens, torch.ones_like(tokens), keep)[0][0]

    def grow(self, rows, steps, choose):
        """Continues rows of tokens, padded on the left; `choose(step, logits [R, V])` gives tokens [R], or ends it."""
        longest = max(map(len, rows))
        where = self.net.device
        tokens = torch.tensor([[0] * (longest - len(row)) + row for row in rows], device=where)
        mask = torch.tensor([[0] * (longest - len(row)) + [1] * len(row) for row in rows], device=where)
        cache = None
        for step in range(steps):
            logits, cache = self(tokens, mask, 1, cache)
            chosen = choose(step, logits[:, 0])
            if chosen is None:
                return
            tokens = chosen[:, None]
            mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)


def write_texts(target, prompts, seeds, warp, stop, options):
    """The target's answers to prompts of token ids; the token that ends one is its last."""
    coins = np.stack([uniforms(seed, WRITE, options.max_new_tokens) for seed in seeds])
    answers = [[] for _ in prompts]

    def ended(answer):
        return bool(answer) and answer[-1] in stop

    def choose(step, logits):
        if all(map(ended, answers)):
            return None
        chosen = draw(warped(logits, warp).exp(), coins[:, step])
        for answer, token in zip(answers, chosen.tolist(), strict=True):
            if not ended(answer):
                answer.append(token)
        return chosen

    target.grow(prompts, options.max_new_tokens, choose)
    return answers


def candidates(log_p, log_q, logits, rejected, text, seed, greedy):
    """Which further candidate is the text's token, 1 to 3, or 0: by rank, or drawn without replacement (2402.14160)."""
    if greedy:
        mine, order = pick(logits, text)[:, None], torch.arange(logits.shape[1], device=logits.device)
        before = (logits > mine) | ((logits == mine) & (order[None] < text[:, None]))
        rank = before.sum(dim=1)
        return torch.where(rank < CANDIDATES, rank, 0)
    p, q, last, right = log_p.exp(), log_q.exp(), rejected, torch.zeros_like(text)
    for candidate in range(1, CANDIDATES):
        excess = (p - q).clamp(min=0)
        p = excess / excess.sum(dim=1, keepdim=True).clamp(min=1e-30)
        q = q.scatter(1, last[:, None], 0.0)
        q = q / q.sum(dim=1, keepdim=True).clamp(min=1e-30)
        coin = torch.as_tensor(uniforms(seed, FURTHER, len(text), candidate, 0), device=q.device)
        right = torch.where((right == 0) & (coin * pick(p, text) < pick(q, text)), candidate, right)
        last = draw((q - p).clamp(min=0), uniforms(seed, FURTHER, len(text), candidate, 1))
    return right


def trace_text(target, drafter, prompt, answer, seed, warp, options):
    """All of a trace that belongs to one text, and its tails [R, K, F] in the order of their positions."""
    length, greedy = len(answer), warp["temperature"] == 0
    p_logits, q_logits = (model.along([*prompt, *answer], length + 1) for model in (target, drafter))
    log_p, log_q = warped(p_logits, warp), warped(q_logits, warp)
    p, q = log_p.exp(), log_q.exp()
    seen = statistics(q_logits, log_q, greedy)
    text = torch.tensor([*answer, 0], device=seen.device)  # nothing follows the last position
    over = torch.arange(length + 1, device=seen.device) == length
    coin = torch.as_tensor(uniforms(seed, ACCEPT, length + 1), device=seen.device)
    accepted = (q_logits.argmax(dim=1) == text) if greedy else coin * pick(p, text) < pick(q, text)
    accepted &= ~over
    excess = (q - p).clamp(min=0)
    usable = (excess.sum(dim=1, keepdim=True) > 0) & ~over[:, None] & (not greedy)
    rejected = draw(torch.where(usable, excess, q), uniforms(seed, REJECT, length + 1))
    right = candidates(log_p, log_q, q_logits, rejected, text, seed, greedy)
    at = torch.nonzero(~accepted)[:, 0].tolist()
    tails = np.zeros((len(at), options.max_draft_length, len(FEATURES)), np.float32)
    tails[:, 0, :-1] = seen[at].cpu().numpy()
    tails[:, 0, -1] = pick(log_q, rejected)[at].cpu().numpy()
    rows = [[*prompt, *answer[:place], int(rejected[place])] for place in at]
    for first in range(0, len(rows), options.batch):
        places = at[first : first + options.batch]
        coins = np.stack([uniforms(seed, CONTINUE, options.max_draft_length, place) for place in places])
        part = tails[first : first + options.batch]

        def choose(step, logits, coins=coins, part=part):
            mine = warped(logits, warp)
            token = draw(mine.exp(), coins[:, step])
            part[:, step + 1, :-1] = statistics(logits, mine, greedy).cpu().numpy()
            part[:, step + 1, -1] = pick(mine, token).cpu().numpy()
            return token

        drafter.grow(rows[first : first + options.batch], options.max_draft_length - 1, choose)
    raw_q = q_logits.softmax(dim=1) if greedy else q
    raw_p = p_logits.log_softmax(dim=1)
    columns = {
        "path": torch.cat([seen, pick(log_q, text)[:, None]], dim=1),
        "accepted": accepted,
        "candidate": torch.where(accepted | over, 0, right),
        "overlap": torch.minimum(p, q).sum(dim=1),
        "cross_entropy": -(raw_q * raw_p.masked_fill(raw_q == 0, 0.0)).sum(dim=1),
        "target_entropy": entropy(raw_p if greedy else log_p),
        "raw_target_entropy": entropy(raw_p),
    }
    return {name: value.cpu().numpy() for name, value in columns.items()}, tails


def assembled(texts, tails, prompts, answers, seeds, warp, limit):
    """The arrays of a trace, docs/traces.md, of all texts. What lies beyond the end of a text is 0 or NaN."""
    count, positions = len(texts), limit + 1
    empty = {"path": 0.0, "accepted": False, "candidate": 0}
    arrays = {}
    for name, first in texts[0].items():
        whole = np.full((count, positions, *first.shape[1:]), empty.get(name, np.nan), first.dtype)
        for row, text in zip(whole, texts, strict=True):
            row[: len(text[name])] = text[name]
        arrays[name] = whole
    length = np.array([len(answer) for answer in answers], np.int32)
    rejected = ~arrays["accepted"] & (np.arange(positions)[None] <= length[:, None])
    tail_of = np.zeros((count, positions), np.int32)
    tail_of[rejected] = np.arange(rejected.sum())
    tokens = np.zeros((count, limit), np.int32)
    for row, answer in zip(tokens, answers, strict=True):
        row[: len(answer)] = answer
    kinds = {"accepted": bool, "candidate": np.int8}
    return {name: value.astype(kinds.get(name, np.float32)) for name, value in arrays.items()} | {
        "tail_of": tail_of,
        "tails": np.concatenate(tails),
        "length": length,
        "limit": np.full(count, limit, np.int32),
        "prompt_length": np.array([len(prompt) for prompt in prompts], np.int32),
        "seed": np.array(seeds, np.uint32),
        "temperature": np.full(count, warp["temperature"], np.float32),
        "tokens": tokens,
        "truncation": np.tile(np.array([warp[name] for name in ("top_k", "top_p", "min_p")], np.float32), (count, 1)),
    }


def read_prompts(path, tokenizer, chat):
    """[(id, category, token ids)] of a JSONL file."""
    prompts = []
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            entry = json.loads(line)
            text = entry.get("turns", [entry.get("prompt", entry.get("text"))])[0]
            tokens = entry.get("tokens")
            if tokens is None and chat:
                message = [{"role": "user", "content": text}]
                text = tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
            if tokens is None:
                tokens = tokenizer(text, add_special_tokens=not chat)["input_ids"]
            name = str(entry.get("id", entry.get("question_id", number)))
            prompts.append((name, str(entry.get("category", "none")), [int(token) for token in tokens]))
        except (ValueError, TypeError, AttributeError, IndexError) as error:
            raise SystemExit(f"error: {path}:{number}: no prompt ({type(error).__name__}: {error})") from None
    if not prompts or not all(tokens for *_, tokens in prompts):
        raise SystemExit(f"error: {path} has no prompts, or an empty one")
    return prompts


def record(options):
    """Writes a trace a temperature and returns their paths."""
    paths = [Path(options.out) / f"trace-{temperature:g}.npz" for temperature in options.temperatures]
    for path in paths:
        if path.exists():
            raise SystemExit(f"error: {path} exists already")
    tokenizers = [AutoTokenizer.from_pretrained(source) for source in (options.target, options.drafter)]
    if tokenizers[0].get_vocab() != tokenizers[1].get_vocab():
        raise SystemExit(f"error: the vocabularies of {options.target} and {options.drafter} differ")
    encoded = read_prompts(options.prompts, tokenizers[0], options.chat)[: options.limit]
    target, drafter = (Model(source, options) for source in (options.target, options.drafter))
    drafter.vocab = target.vocab
    ends = [tokenizers[0].eos_token_id, *np.atleast_1d(target.net.generation_config.eos_token_id)]
    stop = set() if options.past_end else {int(token) for token in ends if token is not None}
    seeds = [(options.seed + index) % 2**32 for index in range(len(encoded))]
    prompts = [tokens for *_, tokens in encoded]
    for path, temperature in zip(paths, options.temperatures, strict=True):
        names = ("top_k", "top_p", "min_p")
        warp = {"temperature": temperature, **{name: getattr(options, name) for name in names}}
        answers = []
        for first in range(0, len(prompts), options.batch):
            part = slice(first, first + options.batch)
            answers += write_texts(target, prompts[part], seeds[part], warp, stop, options)
        texts, tails = [], []
        for index, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            text, tail = trace_text(target, drafter, prompt, answer, seeds[index], warp, options)
            texts.append(text)
            tails.append(tail)
            print(f"\r{path}: {index + 1} of {len(prompts)} texts", end="", file=sys.stderr)
        print(file=sys.stderr)
        arrays = assembled(texts, tails, prompts, answers, seeds, warp, options.max_new_tokens)
        versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
        about = {"target": options.target, "drafter": options.drafter, "dtype": options.dtype, "warp": warp}
        about |= {"seed": options.seed, "prompts": Path(options.prompts).name, "versions": versions}
        about |= {"ids": [name for name, *_ in encoded], "tasks": [category for _, category, _ in encoded]}
        manifest = json.dumps({"format": FORMAT, "features": FEATURES, "about": about})
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        with open(temporary, "wb") as file:
            np.savez_compressed(file, manifest=np.array(manifest), **arrays)
        os.replace(temporary, path)
        total = arrays["accepted"].sum() / arrays["length"].sum()
        print(f"{path}: {len(texts)} texts, {arrays['length'].sum()} positions, {total:.3f} accepted")
    return paths


def parsed(arguments=None):
    """The options of the command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    for name in ("target", "drafter", "prompts", "out"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--temperatures", type=float, nargs="+", default=[0.0])
    numbers = {"top_k": 0, "top_p": 1.0, "min_p": 0.0, "max_new_tokens": 128, "max_draft_length": 16, "batch": 16}
    for name, default in {**numbers, "seed": 0}.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--limit", type=int, help="only the first prompts")
    parser.add_argument("--no-chat", dest="chat", action="store_false")
    parser.add_argument("--past-end", action="store_true", help="write on after an end of sequence")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    options = parser.parse_args(arguments)
    for name, low in (("max_new_tokens", 1), ("max_draft_length", 2), ("batch", 1)):
        if getattr(options, name) < low:
            parser.error(f"--{name.replace('_', '-')} must be at least {low}, got {getattr(options, name)}")
    if min(options.temperatures) < 0 or not 0 < options.top_p <= 1 or not 0 <= options.min_p <= 1 or options.top_k < 0:
        parser.error("temperatures and top-k must not be negative, top-p lie in (0, 1], min-p in [0, 1]")
    return options


if __name__ == "__main__":
    with torch.inference_mode():
        record(parsed())
