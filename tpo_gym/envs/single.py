"""The single-environment face: one sub-environment of a batched task as a plain ``gymnasium.Env`` in numpy."""

from __future__ import annotations

from typing import Any, ClassVar

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import AutoresetMode

from tpo_gym.envs.batched import BatchedEnv
from tpo_gym.envs.checks import as_seed
from tpo_gym.envs.rendering import Window


class SingleEnv(gym.Env[Any, Any]):
    """Runs a batched task with one sub-environment; observations, rewards and flags are numpy and Python values.

    The episode terminates after ``horizon`` steps and is never truncated. Its last info holds ``exact_match``,
    ``token_accuracy`` and ``is_success``.

    Args:
        render_mode: None, "ansi", "rgb_array" or "human" (a window; needs pygame).
        **kwargs: Arguments of the task, see its ``batched_class``; ``device`` is "cpu" by default.

    Raises:
        TypeError: An argument is unknown, or belongs to the batched face.
        ValueError: An argument has a value that cannot be served.

    Example:
        >>> import tpo_gym
        >>> env = gym.make("tpo_gym/TokenCopy-v0", sequence_length=2)
        >>> observation, _ = env.reset(seed=0)
        >>> env.step(observation[0])[1:4]
        (1.0, False, False)
    """

    metadata: dict[str, Any] = {"render_modes": ["ansi", "rgb_array", "human"], "render_fps": 4}
    batched_class: ClassVar[type[BatchedEnv]]

    def __init__(self, *, render_mode: str | None = None, **kwargs: Any) -> None:
        foreign = sorted({"num_envs", "autoreset_mode"} & set(kwargs))
        if foreign:
            raise TypeError(f"{foreign} belong to many environments at once: use gymnasium.make_vec instead of make.")
        if render_mode is not None and render_mode not in self.metadata["render_modes"]:
            raise ValueError(f"render_mode={render_mode!r} is unknown; choose from {self.metadata['render_modes']}.")
        self.batched = self.batched_class(num_envs=1, autoreset_mode=AutoresetMode.DISABLED, **kwargs)
        self.observation_space = self.batched.single_observation_space
        self.action_space = self.batched.single_action_space
        self.render_mode = render_mode
        self._window: Window | None = None

    @property
    def max_return(self) -> float:
        """The highest return of an episode."""
        return self.batched.max_return

    @property
    def horizon(self) -> int:
        """Steps per episode."""
        return self.batched.horizon

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        """Starts an episode with a new context.

        Args:
            seed: Seeds ``np_random``, from which this and all later contexts follow. None goes on with its stream.
            options: As in ``BatchedEnv.reset``.

        Returns:
            The observation and an empty info.

        Raises:
            TypeError: ``seed`` is not an int or None.
            ValueError: ``seed`` is negative, or an option is unknown.
        """
        super().reset(seed=as_seed(seed))
        observation, _ = self.batched.reset(seed=int(self.np_random.integers(2**63)), options=options)
        if self.render_mode == "human":
            self.render()
        return self._first(observation), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Applies one action.

        Args:
            action: An integer of ``action_space`` (a Python or numpy integer, or an array holding one).

        Returns:
            Observation, reward, terminated, truncated (always False) and info.

        Raises:
            ResetNeeded: The episode is over, or ``reset`` was never called.
            TypeError: ``action`` is not an integer.
            ValueError: ``action`` is not in ``action_space``.
        """
        observation, rewards, terminations, _, infos = self.batched.step(self._as_batch(action))
        info = {key: value[0].item() for key, value in infos.items() if not key.startswith("_")}
        if self.render_mode == "human":
            self.render()
        return self._first(observation), float(rewards[0]), bool(terminations[0]), False, info

    def score_actions(self, actions: Any) -> np.ndarray | float:
        """Returns what candidate actions would earn in the current state, without stepping.

        Args:
            actions: One integer, or K of them.

        Returns:
            A float, or float32 (K,).

        Raises:
            ResetNeeded: As in ``step``.
            TypeError: As in ``step``.
            ValueError: As in ``step``.
        """
        values = np.asarray(actions)
        if values.ndim == 0:
            return float(self.batched.score_actions(self._as_batch(actions))[0])
        self._check_range(values)
        return self.batched.score_actions(values[None])[0].cpu().numpy().copy()

    def render(self) -> Any:
        """Returns text ("ansi") or uint8 (height, width, 3) ("rgb_array"); "human" shows a window and returns None."""
        if self.render_mode is None:
            gym.logger.warn("render() needs a render_mode, e.g. gymnasium.make(id, render_mode='rgb_array').")
            return None
        self.batched.observations()  # an error before the first reset
        if self.render_mode == "ansi":
            return self.batched.ansi(0)
        picture = self.batched.picture(0)
        if self.render_mode == "rgb_array":
            return picture
        if self._window is None:
            self._window = Window(type(self).__name__, self.metadata["render_fps"])
        self._window.show(picture)
        return None

    def close(self) -> None:
        """Closes the window, if any."""
        if self._window is not None:
            self._window.close()
            self._window = None

    def _as_batch(self, action: Any) -> np.ndarray:
        values = action.cpu().numpy() if isinstance(action, torch.Tensor) else np.asarray(action)
        if values.size != 1:
            raise ValueError(f"action={action!r} must be one integer of {self.action_space}.")
        self._check_range(values)
        return values.reshape(1)

    def _check_range(self, actions: np.ndarray) -> None:
        """Catches on every device what the batched face catches on a CPU only."""
        count = int(self.action_space.n)  # type: ignore[attr-defined]
        if actions.dtype.kind in "iu" and ((actions < 0) | (actions >= count)).any():
            raise ValueError(f"action={actions.tolist()!r} is not in {self.action_space}: use integers below {count}.")

    def _first(self, observation: torch.Tensor) -> Any:
        array = observation[0].cpu().numpy()
        return np.int64(array) if array.ndim == 0 else array
