"""The two sides of the benchmark: a process that does the same work when asked to, ours or the author's artifact.

    python scripts/benchmark_sides.py ours terminal_h10
    python scripts/benchmark_sides.py artifact terminal_h10 PATH      # in the artifact's own environment

Started by `scripts/benchmark.py`. After the set-up a side writes ``ready``; for each line ``N`` that it reads it does
``N`` updates (for the artifact: what it was compiled for) and writes the seconds per update.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

# task, algorithm, group size, H, V, prompts, candidates, seeds
TOKEN_CASES: dict[str, dict[str, Any]] = {
    "terminal_h10": dict(reward="terminal", algorithm="TPO", k=8, h=10, v=2, b=100),
    "terminal_h8": dict(reward="terminal", algorithm="TPO", k=32, h=8, v=2, b=256),
    "tokens_v16": dict(reward="bag_of_tokens", algorithm="TPO", k=8, h=10, v=16, b=100),
    "dg_h10": dict(reward="terminal", algorithm="DG", k=1, h=10, v=2, b=100),
    "ppo_h10": dict(reward="terminal", algorithm="ClippedPG", k=1, h=10, v=2, b=100),
}
MNIST_CASES = {"mnist_1": 1, "mnist_20": 20}
N_CLASSES, N_PIXELS = 10, 784
Side = Callable[[int], float]
"""Does that many updates and returns the seconds per update (and seed)."""


def token_model(case: str, **kwargs: Any) -> Any:
    """Our model for one of the token cases."""
    import gymnasium as gym

    from tpo_gym import agents

    c = TOKEN_CASES[case]
    dense = c["reward"] != "terminal"
    env: Any = gym.make_vec(
        "tpo_gym/TokenReversal-v0",
        num_envs=c["b"] * (1 if dense else c["k"]),
        sequence_length=c["h"],
        vocab_size=c["v"],
        reward=c["reward"],
    )
    if c["k"] > 1:
        kwargs = {"group_size": c["k"], "candidates": "actions" if dense else "episodes", **kwargs}
    return getattr(agents, c["algorithm"])("TransformerPolicy", env, seed=0, **kwargs)


def mnist_model(seed: int = 0, **kwargs: Any) -> Any:
    """Our model for MNIST."""
    import gymnasium as gym

    from tpo_gym.agents import TPO
    from tpo_gym.experiments.build import LecunMlpPolicy

    env: Any = gym.make_vec("tpo_gym/MNISTBandit-v0", num_envs=100)
    return TPO(LecunMlpPolicy, env, n_epochs=1, candidates="all_actions", seed=seed, **kwargs)


def interactions_per_update(model: Any) -> int:
    """What ``learn`` counts for one rollout batch."""
    return int(model.env.num_envs * model._group_env.env.horizon)


def learner(model: Any) -> Side:
    """The public way: ``learn`` with its counters, callbacks and logging to nowhere."""

    def run(n: int) -> float:
        start = time.perf_counter()
        model.learn(n * interactions_per_update(model), reset_num_timesteps=False)
        return (time.perf_counter() - start) / n

    return run


def bare(model: Any) -> Side:
    """Rollout, target, gradients and steps alone."""
    from tpo_gym.agents.sampling_pass import is_kept
    from tpo_gym.agents.updates import accumulate_gradients, batch_loss

    model._keeps_pass = is_kept(model, watched=False)  # as `learn` does

    def run(n: int) -> float:
        start = time.perf_counter()
        for _ in range(n):
            rollout = model._collect(lambda step: True)
            frozen = model.freeze(rollout)
            weights = model.group_weights(rollout, frozen)
            for _ in range(model.n_epochs):
                model.policy.optimizer.zero_grad()
                sampled, model._sampled = model._sampled, None
                if sampled is None:
                    accumulate_gradients(model, rollout, frozen, weights)
                else:
                    batch_loss(model, sampled, rollout, frozen, weights)[0].backward()
                model.policy.optimizer.step()
        return (time.perf_counter() - start) / n

    return run


def ours(case: str, compile: bool = False) -> Side:
    """Our side of a case; ``compile``: with compiled updates, as the artifact's all are."""
    if MNIST_CASES.get(case, 1) > 1:
        return several_seeds(MNIST_CASES[case], compile)
    model = token_model(case) if case in TOKEN_CASES else mnist_model()
    if compile:
        model.compile()
        learner(model)(3)  # the first update is not the compiled one
    return learner(model)


def shortest(case: str) -> Side:
    """MNIST's update as a bare loop of torch operations, without classes or logs: what eager execution takes."""
    import torch
    from torch.nn import functional as F

    assert case == "mnist_1"
    model = mnist_model()
    policy, optimizer, env = model.policy, model.policy.optimizer, model._group_env.env
    labels = env.dataset.labels
    network = torch.nn.Sequential(policy.mlp, policy.action_net)

    def update() -> None:
        rows = torch.randint(len(labels), (100,))
        log_probs = F.log_softmax(network(env.features(rows).flatten(1)), -1)
        with torch.no_grad():
            probabilities = log_probs.exp()
            actions = torch.multinomial(probabilities, 1)
            rewards = (actions.squeeze(1) == labels[rows]).float() - probabilities.square().sum(-1)
            scores = torch.zeros_like(probabilities).scatter(1, actions, rewards.unsqueeze(1))
            spread = scores.std(1, keepdim=True, correction=0).clamp(min=1e-6)
            scores = (scores - scores.mean(1, keepdim=True)) / spread
            target = F.softmax(log_probs + scores, -1)
        optimizer.zero_grad()
        (-(target * log_probs).sum(-1).mean()).backward()
        optimizer.step()

    def run(n: int) -> float:
        start = time.perf_counter()
        for _ in range(n):
            update()
        return (time.perf_counter() - start) / n

    return run


def several_seeds(n_seeds: int, compile: bool) -> Side:
    """MNIST with several seeds at once, stacked in one worker per processor.

    What it takes to start the workers, to make the models and to compile (from the compiler's cache) does not count,
    nor does compiling on the other side: a training of three updates is subtracted.
    """
    from tpo_gym import train_seeds
    from tpo_gym.agents import TPO
    from tpo_gym.experiments.build import LecunMlpPolicy

    def seconds(n: int) -> float:
        start = time.perf_counter()
        train_seeds(
            TPO,
            "tpo_gym/MNISTBandit-v0",
            range(n_seeds),
            total_timesteps=n * 100,
            policy=LecunMlpPolicy,
            n_epochs=1,
            n_contexts=100,
            candidates="all_actions",
            backend="stacked",
            n_workers=len(os.sched_getaffinity(0)),
            compile=compile,
        )
        return time.perf_counter() - start

    def run(n: int) -> float:
        return (seconds(n + 3) - seconds(3)) / n / n_seeds

    return run


def artifact(case: str, path: Path, n: int, data: Path | None) -> Side:
    """The artifact's side: its own compiled function for ``n`` updates."""
    sys.path.insert(0, str(path / "src"))
    import jax
    import numpy as np

    if case in TOKEN_CASES:
        from tpo.experiments import _trial

        c = TOKEN_CASES[case]
        dense = c["reward"] != "terminal"
        name = {"TPO": "tpo_token" if dense else "tpo", "DG": "dg", "ClippedPG": "ppo"}[c["algorithm"]]
        functions = _trial._build_trial_run_fns(
            (name,), c["h"], c["v"], n, c["b"], 1e-4, 1.0, 0.2, 4, c["k"], "reverse_copy", c["reward"]
        )
        argument, n_seeds = jax.numpy.arange(1), 1
    else:
        from tpo.experiments import mnist

        assert data is not None
        with np.load(data) as arrays:
            loaded = tuple(jax.numpy.asarray(arrays[key]) for key in ("x", "y", "test_x", "test_y"))
        mnist._load_mnist = lambda: loaded
        name, n_seeds = "tpo", MNIST_CASES[case]
        functions = mnist._build_mnist_run_fns((name,), n, 100, 1e-3, 1.0, n)
        argument = jax.random.split(jax.random.PRNGKey(0), n_seeds)

    def run(asked: int) -> float:
        assert asked == n, "the artifact's function is compiled for a number of updates"
        start = time.perf_counter()
        jax.block_until_ready(functions[name](argument))
        return (time.perf_counter() - start) / n / n_seeds

    run(n)  # compile
    return run


def main() -> None:
    """Serve one side."""
    which, case, n = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if which == "artifact":
        side = artifact(case, Path(sys.argv[4]), n, Path(sys.argv[5]) if len(sys.argv) > 5 else None)
    else:
        sides = {"ours": ours, "compiled": lambda case: ours(case, compile=True), "shortest": shortest}
        side = sides[which](case)
        side(max(1, n // 10))
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(side(int(line))), flush=True)


if __name__ == "__main__":
    main()
