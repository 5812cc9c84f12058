"""Any Gymnasium ``VectorEnv`` as an SB3 ``VecEnv``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv
from stable_baselines3.common.vec_env.base_vec_env import VecEnvObs, VecEnvStepReturn

from tpo_gym.envs.batched import BatchedEnv


class VectorEnvAdapter(VecEnv):
    """Gives a Gymnasium vector environment SB3's interface, whatever its autoreset mode.

    Infos become one dictionary per sub-environment, with SB3's ``terminal_observation``, ``TimeLimit.truncated`` and
    ``episode`` = {"r": return, "l": length, "t": seconds since the start}.

    * SAME_STEP: as SB3.
    * DISABLED: a sub-environment is reset, by ``reset_mask``, in the step that ends its episode: as SB3.
    * NEXT_STEP: the step after an episode's end only restarts it. It is no interaction, earns nothing, belongs to no
      episode and is marked ``info["reset_step"]``; until then the last observation stands.

    Args:
        vector: The environment.

    Raises:
        TypeError: If its observations are of a kind that SB3 does not know.
        ValueError: If its autoreset mode is unknown, or cannot be served.
    """

    actions: np.ndarray

    def __init__(self, vector: VectorEnv) -> None:
        self.vector = vector
        if isinstance(vector.single_observation_space, gym.spaces.Tuple):
            raise TypeError(
                f"SB3 knows no Tuple observations, but {vector} has {vector.single_observation_space}: use a Dict."
            )
        mode = vector.metadata.get("autoreset_mode", AutoresetMode.NEXT_STEP)
        try:
            self.autoreset_mode = AutoresetMode(mode)
        except ValueError:
            raise ValueError(
                f"{vector} has the unknown autoreset mode {mode!r}: set metadata['autoreset_mode'] to one of "
                f"{list(AutoresetMode)}."
            ) from None
        base = vector.unwrapped
        next_step = self.autoreset_mode is AutoresetMode.NEXT_STEP
        if isinstance(base, AsyncVectorEnv) and next_step and not base.shared_memory:
            raise ValueError(
                "AsyncVectorEnv(shared_memory=False) under NEXT_STEP forgets a reset between two episodes: use "
                "shared_memory=True, or autoreset_mode=AutoresetMode.SAME_STEP."
            )
        super().__init__(vector.num_envs, vector.single_observation_space, vector.single_action_space)
        self.n_interactions = 0
        """Sub-environments that the last step moved."""
        self._restarting = np.zeros(self.num_envs, dtype=bool)
        self._returns = np.zeros(self.num_envs)
        self._lengths = np.zeros(self.num_envs, dtype=np.int64)
        self._start_time = time.time()

    def reset(self) -> VecEnvObs:
        """Start new episodes everywhere, with the seeds and options given before.

        Raises:
            ValueError: If sub-environments were given different options, or the same seed where that cannot be done.
        """
        if any(options != self._options[0] for options in self._options):
            raise ValueError("A Gymnasium vector environment takes the same options for all sub-environments.")
        observations, infos = self._reset_seeded(self._options[0] or None)
        self.reset_infos = self._split(infos)
        self._reset_seeds()
        self._reset_options()
        self._restarting[:] = False
        self._returns[:], self._lengths[:] = 0, 0
        return _to_numpy(observations)

    def _reset_seeded(self, options: dict[str, Any] | None) -> tuple[Any, dict[str, Any]]:
        seeds = self._seeds
        if any(seed is None for seed in seeds):
            return self.vector.reset(options=options)
        if isinstance(self.vector.unwrapped, BatchedEnv):
            return self.vector.reset(seed=seeds[0], options=options)  # its contexts are shared by options
        try:
            return self.vector.reset(seed=seeds, options=options)  # type: ignore[arg-type]  # Sync and Async take a list
        except (TypeError, ValueError, gym.error.Error) as error:
            if isinstance(self.vector.unwrapped, (SyncVectorEnv, AsyncVectorEnv)):
                raise
            if len(set(seeds)) < len(seeds):
                raise ValueError(
                    f"{self.vector} takes one seed for all its sub-environments (a list of seeds was answered: "
                    f"{error}), so several of them cannot start from the same state, as a group's candidates must. "
                    'Use gym.make_vec(id, num_envs, vectorization_mode="sync"), pass the id itself, or, for a '
                    'one-step task, candidates="all_actions".'
                ) from error
            return self.vector.reset(seed=seeds[0], options=options)

    def step_async(self, actions: np.ndarray) -> None:
        """Keep the actions (n_envs, ...) for ``step_wait``."""
        self.actions = actions

    def step_wait(self) -> VecEnvStepReturn:
        """Apply the actions; observations, rewards float32 (n_envs,), dones bool (n_envs,) and infos."""
        observations, rewards, terminations, truncations, infos = self.vector.step(self.actions)
        obs, rewards = _to_numpy(observations), _to_numpy(rewards).astype(np.float32)
        terminations, truncations = _to_numpy(terminations), _to_numpy(truncations)
        restarted = self._restarting
        dones = (terminations | truncations) & ~restarted
        info_list = self._split(infos)
        self.n_interactions = int(np.count_nonzero(~restarted))
        rewards = np.where(restarted, np.float32(0), rewards)
        self._returns += rewards
        self._lengths += ~restarted
        for index in np.flatnonzero(restarted).tolist():
            info_list[index]["reset_step"] = True
        for index, info in enumerate(info_list):
            info["TimeLimit.truncated"] = bool(truncations[index] and not terminations[index] and dones[index])
        if dones.any():
            self._end_episodes(dones, obs, info_list)
            if self.autoreset_mode is AutoresetMode.DISABLED:
                obs = _to_numpy(self.vector.reset(options={"reset_mask": dones.copy()})[0])
        self._restarting = dones & (self.autoreset_mode is AutoresetMode.NEXT_STEP)
        return obs, rewards, dones, info_list

    def _end_episodes(self, dones: np.ndarray, obs: VecEnvObs, info_list: list[dict[str, Any]]) -> None:
        seconds = round(time.time() - self._start_time, 6)
        for index in np.flatnonzero(dones).tolist():
            info = info_list[index]
            if self.autoreset_mode is AutoresetMode.SAME_STEP:
                if "final_obs" not in info:
                    raise ValueError(
                        f"{self.vector} restarts episodes in their last step (SAME_STEP) but gave no 'final_obs' for "
                        f"sub-environment {index}: Gymnasium's interface asks for it."
                    )
                final = info.pop("final_obs")
                info.update(info.pop("final_info", {}))
            else:
                final = _row(obs, index)
            info["terminal_observation"] = final
            info["episode"] = {"r": round(float(self._returns[index]), 6), "l": int(self._lengths[index]), "t": seconds}
        self._returns[dones], self._lengths[dones] = 0, 0

    def _split(self, infos: dict[str, Any]) -> list[dict[str, Any]]:
        """Gymnasium's dictionary of arrays as one dictionary per sub-environment, masks applied."""
        split: list[dict[str, Any]] = [{} for _ in range(self.num_envs)]
        for key, value in infos.items():
            if key.startswith("_") and key[1:] in infos:
                continue
            mask = _to_numpy(infos.get(f"_{key}", np.ones(self.num_envs, dtype=bool)))
            if isinstance(value, dict) and key != "final_obs":
                rows: Sequence[Any] = self._split(value)
            else:
                value = _to_numpy(value)
                dealt = isinstance(value, (dict, list, tuple)) or np.shape(value)[:1] == (self.num_envs,)
                rows = [_row(value, index) if dealt else value for index in range(self.num_envs)]
            for index in np.flatnonzero(mask).tolist():
                split[index][key] = rows[index]
        return split

    def close(self) -> None:
        """Close the environment."""
        self.vector.close()

    def has_attr(self, attr_name: str) -> bool:
        """Whether every sub-environment has an attribute."""
        base = self.vector.unwrapped
        if isinstance(base, (SyncVectorEnv, AsyncVectorEnv)):
            # Asking an AsyncVectorEnv for an attribute that it lacks would end its processes.
            return all(base.call("has_wrapper_attr", attr_name))
        return hasattr(base, attr_name)

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        """An attribute of the selected sub-environments."""
        chosen = [int(index) for index in self._get_indices(indices)]
        if attr_name in ("observation_space", "action_space", "render_mode"):
            name = attr_name if attr_name == "render_mode" else f"single_{attr_name}"
            return [getattr(self.vector, name) for _ in chosen]
        if not self.has_attr(attr_name):
            raise AttributeError(f"{self.vector} has no attribute {attr_name!r}.")
        base = self.vector.unwrapped
        if isinstance(base, (SyncVectorEnv, AsyncVectorEnv)):
            values = base.get_attr(attr_name)
            return [values[index] for index in chosen]
        return [getattr(base, attr_name) for _ in chosen]

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        """Set an attribute of all sub-environments.

        Raises:
            ValueError: ``indices`` selects only some of them.
        """
        if {int(index) for index in self._get_indices(indices)} != set(range(self.num_envs)):
            raise ValueError("A Gymnasium vector environment sets attributes for all sub-environments only.")
        base = self.vector.unwrapped
        if isinstance(base, (SyncVectorEnv, AsyncVectorEnv)):
            base.set_attr(attr_name, [value] * self.num_envs)
        else:
            setattr(base, attr_name, value)

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        """Call a method of every sub-environment and return the selected ones' results."""
        base = self.vector.unwrapped
        if isinstance(base, (SyncVectorEnv, AsyncVectorEnv)):
            results: Any = base.call(method_name, *method_args, **method_kwargs)
        else:
            results = getattr(base, method_name)(*method_args, **method_kwargs)
        dealt = isinstance(results, (tuple, list, np.ndarray, torch.Tensor)) and len(results) == self.num_envs
        return [results[index] if dealt else results for index in self._get_indices(indices)]

    def env_is_wrapped(self, wrapper_class: type[gym.Wrapper], indices: Any = None) -> list[bool]:
        """Whether the sub-environments are wrapped; ``Monitor`` always, since the infos hold what it adds."""
        return [wrapper_class is Monitor for _ in self._get_indices(indices)]

    def get_images(self) -> Sequence[np.ndarray | None]:
        """One picture per sub-environment, or ``None`` where the render mode is not "rgb_array"."""
        if self.render_mode != "rgb_array":
            return [None for _ in range(self.num_envs)]
        frames: Any = self.vector.render()
        return list(frames or ())


def _to_numpy(values: Any) -> Any:
    """Tensors and arrays (also in dictionaries) as arrays of their own; anything else as it is."""
    if isinstance(values, dict):
        return {key: _to_numpy(value) for key, value in values.items()}
    if isinstance(values, torch.Tensor):
        return values.detach().cpu().numpy().copy()
    return values.copy() if isinstance(values, np.ndarray) else values


def _row(values: Any, index: int) -> Any:
    """One sub-environment's share of a batch."""
    if isinstance(values, dict):
        return {key: _row(value, index) for key, value in values.items()}
    return values[index]
