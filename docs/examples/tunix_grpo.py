"""GRPO by tunix's learner, with its own sampler and with ours as the rollout engine, on CPU.

Question:  does training learn alike, what does a step cost, and how long do the drafts of a frozen drafter hold?
Command:   python docs/examples/tunix_grpo.py FOLDER [--steps 60] [--seeds 3], where google-tunix is installed
Hardware:  two cores of an Intel Xeon
Time:      about two minutes of processor time a seed, and one to compile
Expected:  docs/training.md, "With tunix"; no compilations after step 2, log-probabilities within 1e-5 of tunix's scorer

A tiny Qwen3 of tunix answers random letters; the reward of an answer is its share of digits. Copy `SpecRollout`:
`ClusterConfig(rollout_engine=functools.partial(SpecRollout, sample=..., drafter=...))`.
"""

import argparse
import copy
import functools
import json
import string
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax_libraries import from_tunix
from scipy import stats
from tunix.models.qwen3 import model as qwen3
from tunix.rl import common, rl_cluster
from tunix.rl.grpo import grpo_learner
from tunix.rl.rollout import base_rollout

import specdec_jax as sd
from experiments.lib.plots import COLOURS, panels

PAD, BOS, EOS = 0, 1, 2
SYMBOLS = string.ascii_letters + string.digits[:9]
VOCAB, WIDTH, NEW = 3 + len(SYMBOLS), 8, 24  # tokens; the longest prompt and answer
PROMPTS, ANSWERS = 8, 8  # prompts a step, and answers to each
MESH = jax.sharding.Mesh(np.array(jax.devices()[:1])[:, None], ("fsdp", "tp"))
LEARNT = 20  # steps of answers that the drafter has learnt from before the training
RUNS = {  # rollout engine, learning rate, and the steps after which the drafter is refreshed
    "tunix's sampler": ("tunix", 1e-3, 0),
    "frozen drafter": ("specdec", 1e-3, 0),
    "refreshed drafter": ("specdec", 1e-3, 5),
    "frozen, slow policy": ("specdec", 3e-5, 0),
}


class Letters:
    """A tokenizer of single characters with the methods that tunix calls."""

    def encode(self, text, **options):
        return [3 + SYMBOLS.index(letter) for letter in text]

    def decode(self, ids, **options):
        return "".join(SYMBOLS[token - 3] for token in ids if token >= 3)

    def pad_id(self):
        return PAD

    def bos_id(self):
        return BOS

    def eos_id(self):
        return EOS


class Policy(qwen3.Qwen3):
    """Its answers contain no padding: tunix finds out by the token what is padding."""

    def __call__(self, *arguments, **options):
        logits, cache = super().__call__(*arguments, **options)
        return logits.at[..., PAD].set(-1e9), cache


def tiny(layers, width, seed):
    sizes = {"num_layers": layers, "vocab_size": VOCAB, "embed_dim": width, "hidden_dim": 2 * width, "num_heads": 4}
    config = qwen3.ModelConfig(**sizes, head_dim=width // 4, num_kv_heads=2, rope_theta=10_000, norm_eps=1e-6)
    module = Policy(config, rngs=nnx.Rngs(seed))
    state = jax.tree.map(lambda leaf: 3 * leaf if leaf.ndim > 1 else leaf, nnx.state(module))  # prefers some tokens
    nnx.update(module, jax.device_put(state, jax.sharding.NamedSharding(MESH, jax.sharding.PartitionSpec())))
    return module


class Drafter:
    """A smaller module that learns from a policy on its answers, by Adam on the Kullback-Leibler divergence."""

    def __init__(self, module):
        self.model, self.params = from_tunix(module, context=64)
        graph, optimiser = nnx.graphdef(module), optax.adam(3e-3)
        self.moments = optimiser.init(self.params)

        @functools.partial(jax.jit, static_argnames="steps")
        def learn(policy, weights, params, moments, prompts, answers, steps):
            tokens, positions, visible, _ = common.process_ids(prompts, answers, PAD, EOS)
            is_token = answers != PAD

            def log_probs(graph, params):
                logits, _ = nnx.merge(graph, params)(tokens, positions, None, visible)
                return jax.nn.log_softmax(logits[:, prompts.shape[1] - 1 : -1])

            log_p = log_probs(policy, weights)

            def distance(params):
                terms = jnp.sum(jnp.exp(log_p) * (log_p - log_probs(graph, params)), axis=-1)
                return jnp.sum(terms * is_token) / jnp.sum(is_token)

            def step(carry, _):
                update, moments = optimiser.update(jax.grad(distance)(carry[0]), carry[1])
                return (optax.apply_updates(carry[0], update), moments), None

            return jax.lax.scan(step, (params, moments), length=steps)[0]

        self._learn = learn

    def learn(self, policy, weights, prompts, answers, steps=10):
        arguments = policy, weights, self.params, self.moments, jnp.asarray(prompts), jnp.asarray(answers)
        self.params, self.moments = self._learn(*arguments, steps=steps)


class SpecRollout(base_rollout.BaseRollout):
    """Rollouts by `sample`, a sampler of specdec_jax whose target is the actor; `every`: steps between refreshes, or 0.

    As those of tunix's own sampler, answers end before the end of sequence, and log-probabilities are those at the
    temperature, without truncation. Add to the configuration's seed in every step: tunix leaves it as it is.
    """

    def __init__(self, rollout_actor, tokenizer, mesh, rollout_config, *, sample, drafter, every=0):
        self.actor, self.tokenizer, self.temperature = rollout_actor, tokenizer, rollout_config.temperature
        self.sample, self.drafter, self.every = sample, drafter, every
        self.statistics = []

    def generate(self, prompts, rollout_config, **options):
        rows = [[self.tokenizer.bos_id(), *self.tokenizer.encode(prompt)] for prompt in prompts]
        width, lengths = rollout_config.max_prompt_length, np.array([len(row) for row in rows])
        padded = np.stack([np.pad(row, (0, width - len(row)), constant_values=self.pad_id()) for row in rows])
        policy, params = nnx.split(self.actor)  # at every call: weights that tunix shares change without an update
        samples = self.sample(params, self.drafter.params, padded, rollout_config.seed, lengths)
        self.statistics.append(sd.summarise(samples.statistics))
        answers, log_probs = jax.device_get((samples.tokens, samples.log_probs.tempered))
        is_token = jax.device_get(samples.mask) & (answers != self.eos_id())
        prompts = np.stack([np.roll(row, width - length) for row, length in zip(padded, lengths, strict=True)])
        if self.every and len(self.statistics) % self.every == 0:
            self.drafter.learn(policy, params, prompts, np.where(is_token, answers, self.pad_id()))
        tokens = [row[mask] for row, mask in zip(answers, is_token, strict=True)]
        return base_rollout.RolloutOutput(
            text=[self.tokenizer.decode(row.tolist()) for row in tokens],
            logits=None,
            tokens=tokens,
            left_padded_prompt_tokens=prompts,
            logprobs=[row[mask] for row, mask in zip(log_probs, is_token, strict=True)],
        )

    def get_per_token_logps(self, prompt_tokens, completion_tokens):
        texts = prompt_tokens, completion_tokens, self.pad_id(), self.eos_id()
        return common.compute_per_token_logps(*nnx.split(self.actor), *texts, temperature=self.temperature)

    def update_params(self, params, filter_types=None):
        nnx.update(self.actor, params)

    def pad_id(self):
        return self.tokenizer.pad_id()

    def eos_id(self):
        return self.tokenizer.eos_id()

    def model(self):
        return self.actor


def reward(prompts, completions, **options):
    return [sum(letter in string.digits for letter in text) / max(len(text), 1) for text in completions]


def batches(seed):
    rng = np.random.default_rng(seed)
    while True:
        lengths = rng.integers(1, WIDTH, PROMPTS)  # with BOS at most WIDTH
        yield {"prompts": np.array(["".join(rng.choice(list(SYMBOLS), length)) for length in lengths])}


COMPILED = [0]


def count_compilations(event, seconds, **options):
    COMPILED[0] += event.endswith("jaxpr_to_mlir_module_duration")  # also of programs from the disk cache


def train(engine, start, learning_rate, steps, seed):
    """A dict for each step: processor seconds, programs compiled, reward, and how far tunix's own scores are off."""
    rollout = base_rollout.RolloutConfig(
        max_tokens_to_generate=NEW, max_prompt_length=WIDTH, kv_cache_size=64, temperature=1.0, return_logprobs=True
    )
    rollout.seed = 10**6 * seed
    training = rl_cluster.RLTrainingConfig(
        actor_optimizer=optax.adam(learning_rate), eval_every_n_steps=steps + 1, max_steps=steps
    )
    roles = rl_cluster.Role.ACTOR, rl_cluster.Role.REFERENCE, rl_cluster.Role.ROLLOUT
    config = rl_cluster.ClusterConfig(
        role_to_mesh=dict.fromkeys(roles, MESH), rollout_engine=engine, training_config=training, rollout_config=rollout
    )
    cluster = rl_cluster.RLCluster(actor=nnx.clone(start), tokenizer=Letters(), cluster_config=config)
    graph, first = nnx.split(nnx.clone(start))
    generate, lines = cluster.generate, []

    def watched(**request):
        begin, compiled = time.process_time(), COMPILED[0]
        output = generate(**request)
        end, compilations = time.process_time(), COMPILED[0] - compiled
        rollout.seed += len(output.tokens)
        answers = np.stack([np.pad(row, (0, NEW - len(row)), constant_values=PAD) for row in output.tokens])
        sampled = np.stack([np.pad(row, (0, NEW - len(row))) for row in output.logprobs])
        prompts, answers = jnp.asarray(output.left_padded_prompt_tokens), jnp.asarray(answers)
        scores = np.asarray(cluster.rollout.get_per_token_logps(prompts, answers))
        before = np.asarray(common.compute_per_token_logps(graph, first, prompts, answers, pad_id=PAD, eos_id=EOS))
        is_token = np.asarray(answers) != PAD
        line = {"reward": float(np.mean(reward(None, output.text))), "tokens": int(is_token.sum())}
        line["off"] = float(np.abs(sampled - scores)[is_token].max())
        line["drift"] = float((scores - before)[is_token].mean())  # an estimate of KL(policy, first policy) a token
        line |= {"begin": begin, "rollout": end - begin, "check": time.process_time() - end}
        lines.append(line | {"rollout_compilations": compilations, "compiled": compiled})
        return output

    cluster.generate = watched
    algorithm = grpo_learner.GRPOConfig(num_generations=ANSWERS, beta=0.0)
    learner = grpo_learner.GRPOLearner(rl_cluster=cluster, algo_config=algorithm, reward_fns=[reward])
    learner.train(batches(seed))
    ends = [*lines[1:], {"begin": time.process_time(), "compiled": COMPILED[0]}]
    for line, end in zip(lines, ends, strict=True):
        line["step"] = end["begin"] - line.pop("begin") - line.pop("check")
        line["compilations"] = end["compiled"] - line.pop("compiled")
    for line, counts in zip(lines, getattr(cluster.rollout, "statistics", []), strict=False):
        line |= {"acceptance": counts["draft_acceptance_rate"], "per_pass": counts["tokens_per_round"]}
    return lines


def over_seeds(values):
    """Means over seeds, the first axis, and half the width of their intervals: 95 %, by Student's t; 0 for one seed."""
    values = np.asarray(values, float)
    several = len(values) > 1
    half = stats.t.ppf(0.975, max(len(values) - 1, 1)) * values.std(axis=0, ddof=several) / len(values) ** 0.5
    return values.mean(axis=0), half


def report(results, folder):
    """Prints a table of the runs and one of their steps, mean ± half an interval, and draws the curves."""
    titles = {"reward": "reward: share of digits", "acceptance": "share of drafts accepted"}
    titles |= {"drift": "nats a token from the first policy"}
    figure, grid = panels([*titles.values()])
    for colour, (run, seeds) in zip(COLOURS[1:], results.items(), strict=False):
        curves = {
            name: np.array([[line.get(name, np.nan) for line in lines] for lines in seeds]) for name in seeds[0][0]
        }
        step, rollout = (1e3 * np.median(curves[name][:, 2:]) for name in ("step", "rollout"))
        compiled, by_rollouts = (curves[name][:, 2:].sum() for name in ("compilations", "rollout_compilations"))
        print(f"\n{run}: {step:.0f} ms of processor time a step, {rollout:.0f} of them in rollouts (medians)")
        print(f"  after step 2 {compiled:.0f} compilations, {by_rollouts:.0f} of them in rollouts")
        print(f"  log-probabilities within {curves['off'].max():.1e} of tunix's scorer")
        for axes, name in zip(grid[0], titles, strict=True):
            if name in curves:
                mean, half = over_seeds(curves[name])
                axes.plot(mean, color=colour, label=run, lw=1.2)
                axes.fill_between(range(len(mean)), mean - half, mean + half, color=colour, alpha=0.15, lw=0)
                shown = [
                    f"{m:.3f} ± {h:.3f}" if len(seeds) > 1 else f"{m:.3f}" for m, h in zip(mean, half, strict=True)
                ]
                print(f"  {name} from step 1 on, every fifth and the last: {', '.join([*shown[::5], shown[-1]])}")
    grid[0][0].legend(fontsize=8)
    figure.supxlabel("step", fontsize=9)
    figure.savefig(folder / "grpo.png")


def main(folder, steps, seeds):
    """Trains with every engine and seed; writes a line for each step into results.json."""
    folder.mkdir(parents=True, exist_ok=True)
    jax.monitoring.register_event_duration_secs_listener(count_compilations)
    start, drafter = tiny(2, 64, seed=0), Drafter(tiny(1, 32, seed=1))
    target, _ = from_tunix(start, context=64)
    strategies = {"policy": sd.stopping.static(draft_length=4)}
    sampling = sd.SamplingParams(max_new_tokens=NEW, temperature=1.0, stop_ids=(EOS,))
    sample = sd.sampler(target, sd.drafters.model(drafter.model, max_draft_length=4), sampling, **strategies)
    config = base_rollout.RolloutConfig(max_prompt_length=WIDTH, seed=10**9)
    engine = SpecRollout(start, Letters(), None, config, sample=sample, drafter=drafter, every=1)
    for _, batch in zip(range(LEARNT), batches(seed=10**9), strict=False):  # the drafter learns the first policy
        engine.generate(np.repeat(batch["prompts"], ANSWERS), config)
        config.seed += PROMPTS * ANSWERS
    results = {name: [] for name in RUNS}
    for seed in range(seeds):
        for name, (kind, learning_rate, every) in RUNS.items():
            options = {"sample": sample, "drafter": copy.copy(drafter), "every": every}
            engine = "vanilla" if kind == "tunix" else functools.partial(SpecRollout, **options)
            results[name].append(train(engine, start, learning_rate, steps, seed))
            print(f"seed {seed}, {name}: {json.dumps(results[name][-1][-1])}", flush=True)
            (folder / "results.json").write_text(json.dumps(results))
    report(results, folder)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--seeds", type=int, default=3)
    main(**vars(parser.parse_args()))
