"""The Stable-Baselines3 face: a batched environment as an SB3 ``VecEnv``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from importlib import import_module
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.envs.registration import load_env_creator
from gymnasium.vector import AutoresetMode
from stable_baselines3.common import env_util
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from tpo_gym.envs.batched import BatchedEnv
from tpo_gym.envs.checks import as_int

OUTCOMES = ("exact_match", "token_accuracy", "is_success")


class SB3VecEnv(VecEnv):
    """Runs a batched environment under SB3's algorithms: numpy in, numpy out, whatever device it lives on.

    The infos follow SB3: at the end of an episode ``terminal_observation``, ``TimeLimit.truncated`` (False),
    ``episode`` = {"r": return, "l": length, "t": seconds since the start} and the environment's own outcome.

    Args:
        batched: The environment, in autoreset mode SAME_STEP (the only one SB3 knows). It stays at hand as ``batched``.

    Raises:
        TypeError: ``batched`` is not a ``BatchedEnv``.
        ValueError: Its autoreset mode is another one.
    """

    actions: np.ndarray

    def __init__(self, batched: BatchedEnv) -> None:
        if not isinstance(batched, BatchedEnv):
            raise TypeError(f"SB3VecEnv takes a BatchedEnv, not {type(batched).__name__}; see make_vec_env.")
        if batched.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise ValueError(
                f"SB3 restarts an episode in the step that ends it: use autoreset_mode='SameStep' "
                f"instead of {batched.autoreset_mode.value!r}."
            )
        self.batched = batched
        super().__init__(batched.num_envs, batched.single_observation_space, batched.single_action_space)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)
        self._start_time = time.time()

    def reset(self) -> np.ndarray:
        """Starts new episodes everywhere, with the seed and options given before; observations (n_envs, ...)."""
        if any(options != self._options[0] for options in self._options):
            raise ValueError("the sub-environments live in one batch: give all of them the same options.")
        # Groups last one reset, or whoever evaluates on the training environment would see each context several times.
        observations, _ = self.batched.reset(seed=self._seeds[0], options={"group_size": 1, **self._options[0]})
        self._reset_seeds()
        self._reset_options()
        self.reset_infos = [{} for _ in range(self.num_envs)]
        self._returns[:] = 0
        self._lengths[:] = 0
        return self._to_numpy(observations)

    def step_async(self, actions: np.ndarray) -> None:
        """Keeps the actions (n_envs,) for ``step_wait``."""
        self.actions = actions

    def step_wait(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, list[dict[str, Any]]]:
        """Applies the actions; returns observations, rewards float32 (n_envs,), dones bool (n_envs,) and infos."""
        observations, rewards, terminations, truncations, infos = self.batched.step(self.actions)
        numpy_rewards = self._to_numpy(rewards)
        dones = self._to_numpy(terminations | truncations)
        self._returns += numpy_rewards
        self._lengths += 1
        info_list: list[dict[str, Any]] = [{"TimeLimit.truncated": False} for _ in range(self.num_envs)]
        if "final_info" in infos:
            self._end_episodes(dones, infos, info_list)
        return self._to_numpy(observations), numpy_rewards, dones, info_list

    def _end_episodes(self, dones: np.ndarray, infos: dict[str, Any], info_list: list[dict[str, Any]]) -> None:
        seconds = round(time.time() - self._start_time, 6)
        final = self._to_numpy(infos["final_obs"])
        outcomes = {key: infos["final_info"][key].tolist() for key in OUTCOMES}
        returns, lengths = self._returns.tolist(), self._lengths.tolist()
        for index in np.flatnonzero(dones).tolist():
            info = info_list[index]
            info["terminal_observation"] = final[index]
            info["episode"] = {"r": round(returns[index], 6), "l": lengths[index], "t": seconds}
            for key, values in outcomes.items():
                info[key] = values[index]
        self._returns[dones] = 0
        self._lengths[dones] = 0

    def close(self) -> None:
        """Closes the environment."""
        self.batched.close()

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """Returns an attribute, once per selected sub-environment; the spaces are those of one sub-environment."""
        name = f"single_{attr_name}" if attr_name in ("observation_space", "action_space") else attr_name
        value = getattr(self.batched, name)
        return [value for _ in self._selected(indices)]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Sets an attribute of the batched environment, so of all sub-environments at once.

        Raises:
            ValueError: ``indices`` selects only some of them.
        """
        if len(set(self._selected(indices))) != self.num_envs:
            raise ValueError("the sub-environments live in one batch: an attribute can only be set for all of them.")
        setattr(self.batched, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Calls a method of the batched environment once and returns the selected sub-environments' share.

        A tuple, list, array or tensor with ``num_envs`` entries is dealt out; anything else is given to everyone.
        """
        result = getattr(self.batched, method_name)(*method_args, **method_kwargs)
        dealt = isinstance(result, (tuple, list, np.ndarray, torch.Tensor)) and len(result) == self.num_envs
        return [result[index] if dealt else result for index in self._selected(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: Any = None) -> list[bool]:
        """Says per sub-environment whether it is wrapped in ``wrapper_class``."""
        # The infos hold "episode" just as under a Monitor; without this SB3 would warn that it cannot see them.
        return [wrapper_class is Monitor for _ in self._selected(indices)]

    def get_images(self) -> list[np.ndarray | None]:
        """Returns one picture per sub-environment, or None where the render mode is not "rgb_array"."""
        if self.render_mode != "rgb_array":
            gym.logger.warn(f"get_images() needs render_mode='rgb_array', but it is {self.render_mode!r}.")
            return [None for _ in range(self.num_envs)]
        return list(self.batched.render() or ())

    def _selected(self, indices: Any) -> list[int]:
        chosen: Iterable[int] = self._get_indices(indices)
        return list(chosen)

    @staticmethod
    def _to_numpy(tensor: torch.Tensor) -> np.ndarray:
        return tensor.cpu().numpy()


def make_vec_env(
    env_id: str | Callable[..., gym.Env[Any, Any]],
    n_envs: int = 1,
    seed: int | None = None,
    device: str | torch.device = "cpu",
    **env_kwargs: Any,
) -> VecEnv:
    """Makes an SB3 ``VecEnv``: a batched one for our environments, SB3's own for any other.

    Args:
        env_id: A registered id, also with a module to import first ("module:id"), or a function that makes an
            environment.
        n_envs: Number of sub-environments.
        seed: Seed of the first reset; None for a random one.
        device: Where a batched environment lives. Others live on the CPU.
        **env_kwargs: Arguments of the environment.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that cannot be served.

    Example:
        >>> env = make_vec_env("tpo_gym:tpo_gym/Bandit-v0", n_envs=3, seed=0, num_actions=5)
        >>> env.reset()
        array([0, 0, 0])
        >>> env.step(np.array([0, 1, 2]))[1]
        array([1., 0., 0.], dtype=float32)
    """
    n_envs = as_int("n_envs", n_envs, minimum=1)
    if isinstance(env_id, str) and ":" in env_id:
        module, env_id = env_id.split(":", 1)
        import_module(module)
    if isinstance(env_id, str) and _is_batched(env_id):
        made = gym.make_vec(env_id, n_envs, "vector_entry_point", device=device, **env_kwargs)
        vec_env = SB3VecEnv(made)  # type: ignore[arg-type]
        if seed is not None:
            vec_env.seed(seed)
        return vec_env
    if torch.device(device).type != "cpu":
        raise ValueError(f"device={device!r}: {env_id!r} is not a batched environment and runs on the CPU only.")
    return env_util.make_vec_env(env_id, n_envs=n_envs, seed=seed, env_kwargs=env_kwargs)


def _is_batched(env_id: str) -> bool:
    spec = gym.registry.get(env_id)
    if spec is None or spec.vector_entry_point is None:
        return False
    entry_point = spec.vector_entry_point
    try:
        creator = load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    except ImportError:
        # Someone else's vector environment with a dependency that is missing; SB3 uses the single one.
        return False
    return isinstance(creator, type) and issubclass(creator, BatchedEnv)
