"""The base class of all tasks: many sub-environments stepped at once with torch, on any device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space
from torch import Tensor

from tpo_gym.draws import drawn
from tpo_gym.envs.checks import as_actions, as_autoreset_mode, as_device, as_group_size, as_int, as_rows, as_seed

Rows = slice | Tensor
"""Which sub-environments: ``slice(None)`` for all of them, else an int64 index tensor."""
Step = int | Tensor
"""The step each of those sub-environments is at: one int when they are in lockstep, else an int64 tensor."""


class BatchedEnv(VectorEnv[Tensor, Any, Tensor], ABC):
    """``num_envs`` copies of one task with fixed-length episodes; tensors in, tensors out.

    Everything returned lies on ``device``: observations (num_envs, ...), rewards float32 (num_envs,), terminations and
    truncations bool (num_envs,). Episodes last exactly ``horizon`` steps, so when they end is known on the host and a
    step never waits for the device. They terminate and are never truncated.

    At the end of an episode the info holds ``exact_match`` (bool), ``token_accuracy`` (float32 in [0, 1]) and
    ``is_success`` (bool), with masks ``_exact_match`` and so on; under SAME_STEP they lie in ``final_info``, next to
    ``final_obs``, as in Gymnasium. Rows outside a mask carry no meaning.

    Args:
        observation_space: Space of one sub-environment's observation.
        action_space: Space of one sub-environment's action.
        horizon: Steps per episode.
        num_envs: Number of sub-environments.
        device: Where all tensors live: "cpu", "cuda", "cuda:1", ...
        autoreset_mode: ``AutoresetMode`` or its value, "SameStep" (the default: no step is wasted), "NextStep",
            "Disabled".
        render_mode: None, "ansi" or "rgb_array".
        max_episode_steps: Accepted because ``gym.make_vec`` may pass it; it must equal ``horizon``.

    Raises:
        TypeError: An argument has the wrong type.
        ValueError: An argument has a value that cannot be served.

    Example:
        >>> import gymnasium as gym
        >>> import tpo_gym
        >>> env = gym.make_vec("tpo_gym/ContextualBandit-v0", 4, correct_actions=[7, 3, 5], num_contexts=3)
        >>> contexts, _ = env.reset(seed=0, options={"group_size": 2})
        >>> bool(contexts[0] == contexts[1] and contexts[2] == contexts[3])
        True
        >>> _, rewards, terminations, _, infos = env.step(env.labels)
        >>> rewards
        tensor([1., 1., 1., 1.])
        >>> infos["final_info"]["exact_match"]
        tensor([True, True, True, True])
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array"], "render_fps": 4}

    max_return: float = 1.0
    """The highest return of an episode."""

    _state_fields: ClassVar[tuple[str, ...]] = ()

    def __init__(
        self,
        observation_space: gym.Space[Any],
        action_space: gym.spaces.Discrete,
        horizon: int,
        *,
        num_envs: int = 1,
        device: str | torch.device = "cpu",
        autoreset_mode: str | AutoresetMode = AutoresetMode.SAME_STEP,
        render_mode: str | None = None,
        max_episode_steps: int | None = None,
    ) -> None:
        self.num_envs = as_int("num_envs", num_envs, minimum=1)
        self.device = as_device(device)
        self.horizon = horizon
        if max_episode_steps is not None and max_episode_steps != horizon:
            raise ValueError(
                f"max_episode_steps={max_episode_steps!r} cannot be served: every episode of {type(self).__name__} "
                f"lasts exactly {horizon} step(s). Leave max_episode_steps out."
            )
        self.autoreset_mode = as_autoreset_mode(autoreset_mode)
        self.metadata = {**type(self).metadata, "autoreset_mode": self.autoreset_mode}
        if render_mode not in (None, "ansi", "rgb_array"):
            raise ValueError(
                f"render_mode={render_mode!r} is not available for a batched environment. Choose None, 'ansi' or "
                "'rgb_array'; a window ('human') needs a single environment, from gymnasium.make."
            )
        self.render_mode = render_mode
        self.single_observation_space = observation_space
        self.single_action_space = action_space
        self._num_actions = int(action_space.n)
        self.observation_space = batch_space(observation_space, self.num_envs)
        self.action_space = batch_space(action_space, self.num_envs)
        self.group_size = 1
        # Steps into the episode: one int while the sub-environments are in lockstep (nearly always), else int64 (n,).
        self._elapsed: int | np.ndarray = 0
        self._started = False
        self._generator = torch.Generator(device=self.device)
        self._generator.seed()

    # What a task defines.

    @abstractmethod
    def _draw_contexts(self, count: int) -> Tensor:
        """Draws ``count`` contexts (count, ...) from ``self._generator``."""

    @abstractmethod
    def _begin(self, contexts: Tensor, rows: Rows) -> None:
        """Starts an episode with these contexts in the sub-environments ``rows``."""

    @abstractmethod
    def _observe(self) -> Tensor:
        """Returns the current observations (num_envs, ...) in memory of their own."""

    def _last_observe(self) -> Tensor:
        """Returns what ``_observe`` would, for the last time: most sub-environments are restarted next."""
        return self._observe()

    @abstractmethod
    def _score(self, actions: Tensor, rows: Rows, step: Step) -> Tensor:
        """Returns the float32 rewards (m, K) that ``actions`` (m, K) would earn; changes nothing."""

    @abstractmethod
    def _act(self, actions: Tensor, rows: Rows, step: Step) -> Tensor:
        """Applies ``actions`` (m,) and returns float32 rewards (m,)."""

    @abstractmethod
    def _outcome(self) -> tuple[Tensor, Tensor]:
        """Returns ``exact_match`` bool (num_envs,) and ``token_accuracy`` float32 (num_envs,) of finished episodes."""

    @abstractmethod
    def ansi(self, index: int) -> str:
        """Draws sub-environment ``index`` in characters."""

    @abstractmethod
    def picture(self, index: int) -> np.ndarray:
        """Draws sub-environment ``index`` as uint8 (height, width, 3)."""

    # Gymnasium's interface.

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Tensor, dict[str, Any]]:
        """Starts new episodes.

        Args:
            seed: One seed for all sub-environments, which share a generator; None goes on with the current stream.
            options: ``group_size=K`` gives every K consecutive sub-environments the same context, and keeps doing so in
                later resets and autoresets until another ``group_size`` is given (1 switches groups off).
                ``reset_mask`` bool (num_envs,) restarts only those sub-environments.

        Returns:
            Observations (num_envs, ...) and an empty info.

        Raises:
            TypeError: ``seed`` is not an int, or an option has the wrong type.
            ValueError: ``seed`` is negative, an option is unknown, K does not divide ``num_envs``, or the mask has
                another shape, is empty or splits a group.
            ResetNeeded: ``reset_mask`` was given before a first full reset.
        """
        seed = as_seed(seed)
        options = dict(options or {})
        group_size = options.pop("group_size", None)
        mask = options.pop("reset_mask", None)
        if options:
            raise ValueError(
                f"reset got unknown options {sorted(options)}; the known ones are 'group_size' and 'reset_mask'."
            )
        group_size = self.group_size if group_size is None else as_group_size(group_size, self.num_envs)
        rows = None if mask is None else as_rows(mask, self.num_envs, group_size)
        if rows is not None:
            self._require_start()
            if group_size != self.group_size:
                raise ValueError(
                    f"group_size cannot change from {self.group_size} to {group_size} in a partial reset; reset all "
                    "sub-environments (no reset_mask) to change it."
                )
        super().reset(seed=seed)
        if seed is not None:
            self._generator.manual_seed(seed)
        self.group_size = group_size
        self._start(rows)
        self._started = True
        return self._observe(), {}

    def step(self, actions: Any) -> tuple[Tensor, Tensor, Tensor, Tensor, dict[str, Any]]:
        """Applies one action per sub-environment.

        Args:
            actions: Integers (num_envs,), a tensor or an array. On a CPU an action out of range is an error; on a GPU
                that check would make every step wait for the device: there it earns nothing and is stored as it is.

        Returns:
            Observations, rewards, terminations, truncations and infos, see the class.

        Raises:
            ResetNeeded: ``reset`` was never called, or (autoreset "Disabled") an episode is over.
            TypeError: The actions are not integers.
            ValueError: The actions have another shape, or (CPU) one is out of range.
        """
        rewards, done = self._take_step(actions)
        infos = {} if done is False else self._end_episodes(done)
        return self._observe(), rewards, self._flags(done), self._flags(False), infos

    def render(self) -> tuple[Any, ...] | None:
        """Returns a frame per sub-environment: text ("ansi") or uint8 (height, width, 3) ("rgb_array")."""
        if self.render_mode is None:
            gym.logger.warn("render() needs a render_mode, e.g. gymnasium.make_vec(id, render_mode='rgb_array').")
            return None
        self._require_start()
        draw = self.ansi if self.render_mode == "ansi" else self.picture
        return tuple(draw(index) for index in range(self.num_envs))

    # What agents use beyond Gymnasium's interface.

    @property
    def at_start(self) -> bool:
        """Whether every sub-environment is at the first step of an episode."""
        return self._started and not np.any(self._elapsed)

    def advance(self, actions: Any) -> Tensor:
        """As ``step``, for those who ask for ``observations`` when they need them: returns the rewards alone.

        Making observations and infos may take longer than all the rest of a step.
        """
        if type(self).step is not BatchedEnv.step:  # a subclass that rewards otherwise
            return self.step(actions)[1]
        rewards, done = self._take_step(actions)
        if done is not False and self.autoreset_mode is AutoresetMode.SAME_STEP:
            self._start(None if done is True else np.flatnonzero(done))
        return rewards

    def observations(self, again: bool = True) -> Tensor:
        """Returns the current observations again, in memory of their own.

        Args:
            again: Whether they may be asked for once more; else no copy of them is kept where they took long to make.

        Raises:
            ResetNeeded: ``reset`` was never called.
        """
        self._require_start()
        return self._observe() if again else self._last_observe()

    def score_actions(self, actions: Any) -> Tensor:
        """Returns what candidate actions would earn in the current state, without stepping.

        Args:
            actions: Integers (num_envs,) or (num_envs, K).

        Returns:
            Rewards, float32, of the same shape. Under NEXT_STEP they are 0 where the next step only resets.

        Raises:
            ResetNeeded: As in ``step``.
            TypeError: As in ``step``.
            ValueError: As in ``step``.
        """
        self._require_live()
        actions = as_actions(actions, self.num_envs, self._num_actions, self.device, candidates=True)
        table = actions if actions.ndim == 2 else actions.unsqueeze(1)
        if isinstance(self._elapsed, int) and self._elapsed < self.horizon:
            return self._score(table, slice(None), self._elapsed).reshape(actions.shape)
        scores = torch.zeros(table.shape, dtype=torch.float32, device=self.device)
        acting = np.flatnonzero(self._steps() < self.horizon)
        if acting.size:
            rows, step = self._to_device(acting), self._to_device(self._steps()[acting])
            scores[rows] = self._score(table[rows], rows, step)
        return scores.reshape(actions.shape)

    def get_state(self) -> dict[str, Tensor | int]:
        """Returns the whole state, generator included, as a flat dict of tensors and ints that shares no memory."""
        state: dict[str, Tensor | int] = {
            "generator": self._generator.get_state(),
            "elapsed": torch.from_numpy(self._steps()),
            "started": int(self._started),
            "group_size": self.group_size,
        }
        return state | {name.lstrip("_"): getattr(self, name).clone() for name in self._state_fields}

    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what ``get_state`` returned; the same actions then give the same future.

        Raises:
            ValueError: A key is missing or unknown, a tensor has another shape, or the state comes from another kind of
                device, whose generator works differently.
        """
        current = self.get_state()
        if set(state) != set(current):
            raise ValueError(f"the state has keys {sorted(state)}, but {self} needs {sorted(current)}.")
        for name, value in current.items():
            shape = tuple(getattr(state[name], "shape", ()))
            if isinstance(value, Tensor) and shape != tuple(value.shape):
                raise ValueError(
                    f"state[{name!r}] has shape {shape}, but {self} on {self.device} needs "
                    f"{tuple(value.shape)}. Restore into an environment with the same arguments and kind of device."
                )
        state = {name: torch.as_tensor(value) for name, value in state.items()}
        self._generator.set_state(state["generator"].cpu())
        self._elapsed = _compact(state["elapsed"].cpu().numpy().copy())
        self._started = bool(state["started"])
        self.group_size = int(state["group_size"])
        for name in self._state_fields:
            getattr(self, name).copy_(state[name.lstrip("_")])

    def __getstate__(self) -> dict[str, Any]:
        """Replaces the generator, which cannot be pickled, by its state."""
        return {**self.__dict__, "_generator": self._generator.get_state()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Rebuilds the generator."""
        self.__dict__.update(state)
        self._generator = torch.Generator(device=self.device)
        self._generator.set_state(state["_generator"].cpu())

    # Shared machinery.

    def _steps(self) -> np.ndarray:
        """Returns the steps into the episode as a new array, int64 (num_envs,)."""
        return np.broadcast_to(np.asarray(self._elapsed, dtype=np.int64), (self.num_envs,)).copy()

    def _start(self, rows: np.ndarray | None) -> None:
        """Starts new episodes in ``rows`` (None: all), one context per group."""
        count = self.num_envs if rows is None else len(rows)
        contexts = drawn(lambda: self._draw_contexts(count // self.group_size))
        if self.group_size > 1:
            contexts = contexts.repeat_interleave(self.group_size, dim=0)
        if rows is None:
            self._begin(contexts, slice(None))
            self._elapsed = 0
        else:
            self._begin(contexts, self._to_device(rows))
            steps = self._steps()
            steps[rows] = 0
            self._elapsed = _compact(steps)

    def _take_step(self, actions: Any) -> tuple[Tensor, np.ndarray | bool]:
        """Returns rewards and which episodes end (one flag for all of them); these are not restarted yet."""
        self._require_live()
        actions = as_actions(actions, self.num_envs, self._num_actions, self.device)
        if isinstance(self._elapsed, int):
            return self._step_together(actions, self._elapsed)
        return self._step_apart(actions, self._elapsed)

    def _step_together(self, actions: Tensor, elapsed: int) -> tuple[Tensor, bool]:
        """One step in lockstep; returns rewards and whether the episodes end."""
        if elapsed == self.horizon:  # NEXT_STEP: the step after the last one only resets
            self._start(None)
            return torch.zeros(self.num_envs, dtype=torch.float32, device=self.device), False
        rewards = self._act(actions, slice(None), elapsed)
        self._elapsed = elapsed + 1
        return rewards, self._elapsed == self.horizon

    def _step_apart(self, actions: Tensor, elapsed: np.ndarray) -> tuple[Tensor, np.ndarray | bool]:
        """One step of sub-environments at different steps; returns rewards and which episodes end (False: none)."""
        finished = elapsed == self.horizon
        acting = np.flatnonzero(~finished)
        rows, step = self._to_device(acting), self._to_device(elapsed[acting])
        rewards = torch.zeros(self.num_envs, dtype=torch.float32, device=self.device)
        rewards[rows] = self._act(actions[rows], rows, step)
        self._elapsed = elapsed + ~finished
        done = (self._elapsed == self.horizon) & ~finished
        if finished.any():
            self._start(np.flatnonzero(finished))
        return rewards, done if done.any() else False

    def _end_episodes(self, done: np.ndarray | bool) -> dict[str, Any]:
        """Returns the infos of the episodes that just ended (True: all) and, under SAME_STEP, starts the next ones."""
        mask = self._flags(done)
        exact, accuracy = self._outcome()
        if done is not True:
            exact, accuracy = exact & mask, accuracy * mask
        infos: dict[str, Any] = {"exact_match": exact, "token_accuracy": accuracy, "is_success": exact.clone()}
        infos |= {f"_{key}": mask for key in infos}
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            return infos
        infos = {"final_obs": self._last_observe(), "_final_obs": mask, "final_info": infos, "_final_info": mask}
        self._start(None if done is True else np.flatnonzero(done))
        return infos

    def _to_device(self, values: np.ndarray) -> Tensor:
        return torch.tensor(values, device=self.device)

    def _flags(self, values: np.ndarray | bool) -> Tensor:
        """Returns host flags as a new bool tensor (num_envs,); one flag for all needs no transfer."""
        if isinstance(values, bool):
            return torch.full((self.num_envs,), values, dtype=torch.bool, device=self.device)
        return self._to_device(values)

    def _require_start(self) -> None:
        if not self._started:
            raise ResetNeeded("call reset() before using the environment.")

    def _require_live(self) -> None:
        """Raises an error before the first reset, and where an episode is over and nothing will restart it."""
        self._require_start()
        if self.autoreset_mode is AutoresetMode.DISABLED and np.any(np.equal(self._elapsed, self.horizon)):
            raise ResetNeeded(
                f"{int((self._steps() == self.horizon).sum())} of {self.num_envs} sub-environment(s) have finished and "
                "autoreset is disabled: call reset(options={'reset_mask': terminations}) (or reset()) before going on."
            )


def _compact(steps: np.ndarray) -> int | np.ndarray:
    """Returns one int for an array of equal numbers."""
    return int(steps[0]) if (steps == steps[0]).all() else steps
