"""Trainings that the processes of `torchrun` share; what they end with goes to files that the test compares.

Use: `torchrun ... distributed_worker.py FOLDER`; the test also runs the cases in one process of its own.
"""

import sys
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import KVWriter, Logger
from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

import tpo_gym
from tpo_gym.agents import DG, GRPO, REINFORCE, TPO, CrossEntropy, GroupAlgorithm, ResumeCallback
from tpo_gym.agents.distributed import distribute, join, leave

# Plain gradient steps: the keys' biases have no gradient but rounding, which Adam would take for one.
SMALL = {"d_model": 16, "n_layers": 1, "optimizer_class": torch.optim.SGD}
MLP = {"net_arch": [8]}


class Masked(gym.Env):
    """Episodes of 2 to 4 steps; of 5 actions those up to the step's number are forbidden."""

    observation_space = gym.spaces.Box(0, 4, (2,))
    action_space = gym.spaces.Discrete(5)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t, self.length = 0, int(self.np_random.integers(2, 5))
        return self._observe(), {}

    def step(self, action):
        assert action >= self.t
        self.t += 1
        return self._observe(), float(action == self.t), self.t == self.length, False, {}

    def _observe(self):
        return np.array([self.t, self.length], dtype=np.float32)

    def action_masks(self):
        return np.arange(5) >= self.t


gym.register("Masked-v0", Masked)


def tokens(n_envs: int, **kwargs: Any) -> Any:
    return gym.make_vec("tpo_gym/TokenReversal-v0", num_envs=n_envs, sequence_length=3, **kwargs)


def terminal(n_envs: int = 24) -> Any:
    return tokens(n_envs, reward="terminal")


def contextual(n_envs: int) -> Any:
    return gym.make_vec("tpo_gym/ContextualBandit-v0", num_envs=n_envs, num_contexts=10)


def pendulum() -> gym.Env:
    return gym.make("Pendulum-v1", max_episode_steps=5)


CASES = {
    # Candidates by fused generation, step by step, in chunks; with what is taken over the whole batch.
    "tpo": lambda: TPO("TransformerPolicy", terminal(), 0.5, group_size=4, policy_kwargs=SMALL, seed=1),
    "muon": lambda: TPO("TransformerPolicy", terminal(), group_size=4, policy_kwargs={"d_model": 16}, seed=1),
    "chunks": lambda: TPO("MlpPolicy", terminal(), group_size=4, batch_size=3, policy_kwargs=MLP, seed=1),
    "skip_neutral": lambda: TPO(
        "MlpPolicy", tokens(4, reward="terminal"), 0.1, group_size=2, anchor="ratio", policy_kwargs=MLP, seed=2
    ),
    "clipping": lambda: TPO(
        "MlpPolicy", terminal(), group_size=4, max_grad_norm=0.01, ent_coef=0.1, policy_kwargs=MLP, seed=1
    ),
    "mask_zero_variance": lambda: GRPO(
        "MlpPolicy", terminal(), 0.01, group_size=4, mask_zero_variance=True, ratio="step", policy_kwargs=MLP, seed=1
    ),
    "tokens": lambda: TPO("TransformerPolicy", tokens(6), 0.5, group_size=4, policy_kwargs=SMALL, seed=1),
    "actions": lambda: TPO("MlpPolicy", tokens(6), 0.01, group_size=4, policy_kwargs=MLP, seed=1),
    "dg": lambda: DG("MlpPolicy", tokens(20), 0.01, policy_kwargs=MLP, seed=1),
    # One step: the candidates are all actions.
    "merged": lambda: TPO("TabularPolicy", "tpo_gym/Bandit-v0", 0.1, n_contexts=20, seed=1),
    "batch_baseline": lambda: REINFORCE("TabularPolicy", contextual(20), 0.1, baseline="batch", seed=1),
    "grpo_bandit": lambda: GRPO("TabularPolicy", contextual(20), 0.1, seed=1),
    "exact": lambda: TPO("TabularPolicy", contextual(10), 0.1, candidates="exact", baseline="batch", seed=1),
    "cross_entropy": lambda: CrossEntropy("TabularPolicy", contextual(20), 0.1, seed=1),
    # Environments of other packages: episodes of different lengths, copies, Gaussians, masks.
    "cartpole": lambda: TPO(
        "MlpPolicy", "CartPole-v1", group_size=2, n_contexts=4, ent_coef=0.01, policy_kwargs=MLP, seed=1
    ),
    "lookahead": lambda: TPO(
        "MlpPolicy",
        pendulum(),
        group_size=2,
        n_contexts=4,
        candidates="actions",
        lookahead=1,
        policy_kwargs=MLP,
        seed=1,
    ),
    "masked_actions": lambda: TPO(
        "MlpPolicy", "Masked-v0", 0.01, group_size=3, n_contexts=4, candidates="actions", policy_kwargs=MLP, seed=1
    ),
    "box": lambda: TPO("MlpPolicy", pendulum(), group_size=2, n_contexts=4, policy_kwargs=MLP, seed=1),
    "masked": lambda: TPO("MlpPolicy", "Masked-v0", 0.01, group_size=3, n_contexts=4, policy_kwargs=MLP, seed=1),
}
NOT_SHARED = {
    "contexts": lambda: TPO("MlpPolicy", terminal(12), group_size=4, policy_kwargs=MLP),
    "vec_env": lambda: TPO("MlpPolicy", DummyVecEnv([lambda: gym.make("CartPole-v1")] * 4), group_size=2),
    "normalize": lambda: TPO("MlpPolicy", VecNormalize(normalizable()), group_size=2, policy_kwargs=MLP),
    "lookahead": lambda: TPO(
        "MlpPolicy", "CartPole-v1", group_size=2, candidates="actions", lookahead=1, lookahead_deterministic=False
    ),
}


def normalizable() -> Any:
    return TPO("MlpPolicy", "CartPole-v1", group_size=2, n_contexts=2).env


class Batches(BaseCallback):
    """Ends training after some rollout batches, where asked in one process only; counts what it sees."""

    def __init__(self, batches: int, ends: bool = True) -> None:
        super().__init__()
        self.batches, self.ends = batches, ends
        self.steps = self.episodes = 0

    def _on_rollout_start(self) -> None:
        self.batches -= 1

    def _on_step(self) -> bool:
        self.steps += 1
        self.episodes += int(self.locals["dones"].sum())
        assert len(self.locals["rewards"]) == len(self.locals["dones"]) == self.training_env.num_envs
        return self.batches >= 0 or not self.ends


class Rows(KVWriter):
    """Keeps every logged value except the times."""

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []

    def write(self, key_values: dict[str, Any], key_excluded: Any, step: int = 0) -> None:
        self.rows.append({k: v for k, v in key_values.items() if k not in ("time/fps", "time/time_elapsed")})

    def close(self) -> None:
        pass


def train(model: GroupAlgorithm, batches: int = 3, **kwargs: Any) -> dict[str, Any]:
    """Train for some rollout batches; what must not depend on the number of processes."""
    rows, callback = Rows(), Batches(batches)
    model.set_logger(Logger(folder=None, output_formats=[rows]))
    model.learn(10**9, callback=callback, **kwargs)
    return {
        "parameters": [p.detach().clone() for p in model.policy.parameters()],
        "logs": rows.rows,
        "counters": [model.num_timesteps, model._n_updates, model._iteration, callback.steps, callback.episodes],
        "random": [torch.get_rng_state(), torch.from_numpy(model._seed_rng.random(4))],
        "episodes": [info["r"] for info in model.ep_info_buffer or ()],
    }


def refusal(model: GroupAlgorithm, total_timesteps: int = 10) -> str:
    try:
        distribute(model).learn(total_timesteps)
    except ValueError as error:
        return str(error)
    return "it was not refused"


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    join("cpu")
    rank = torch.distributed.get_rank()
    results: dict[str, Any] = {name: train(distribute(make())) for name, make in CASES.items()}
    # Saved in the middle, by the first process; loaded by both; compared with never having stopped.
    for name in ("tpo", "cartpole", "masked"):
        model = distribute(CASES[name]())
        train(model, 1)
        model.save(folder / name)
        torch.distributed.barrier()
        env = "Masked-v0" if name == "masked" else "CartPole-v1" if name == "cartpole" else terminal()
        results[f"{name} resumed"] = train(distribute(TPO.load(folder / name, env=env)), 2, reset_num_timesteps=False)
    # Different weights and generators, because of no seed: the first process's count.
    results["unseeded"] = train(distribute(TPO("MlpPolicy", terminal(), group_size=4, policy_kwargs=MLP)))
    results["refused"] = {name: refusal(make()) for name, make in NOT_SHARED.items()}
    results["refused"]["disagreement"] = refusal(CASES["tpo"](), 10 + rank)
    # A callback that ends training in the second process only ends it in both.
    model = distribute(CASES["dg"]())
    model.learn(10**9, callback=Batches(2, ends=rank == 1))
    results["ended by one"] = model._iteration
    model = distribute(CASES["dg"]())
    model.tensorboard_log = str(folder / "runs")
    if rank == 0:
        model._custom_logger = False
    model.learn(120, callback=ResumeCallback(folder / "checkpoints", every=1))
    torch.save(results, folder / f"results-{rank}.pt")
    leave()


if __name__ == "__main__":
    assert tpo_gym.__version__
    main(Path(sys.argv[1]))
