"""One process's part of an environment's groups, and of the random numbers that they are sampled with.

Which numbers a candidate is sampled with must not depend on how many processes there are. So every process draws all
random numbers of the whole batch, in the same order, and uses those of its own rows; all generators are then in the
same state everywhere, at any time, as they would be in one process. Drawing is cheap beside a network's forward pass.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import Any

import numpy as np
import torch
from gymnasium.vector.utils import batch_space
from stable_baselines3.common.vec_env import VecNormalize, VecTransposeImage
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from tpo_gym.agents.actor import ActorPolicy
from tpo_gym.agents.exchange import Exchange
from tpo_gym.agents.group_env import BatchedGroupEnv, Step, VecGroupEnv
from tpo_gym.agents.group_vec_env import GroupVecEnv
from tpo_gym.agents.rollouts import Observations
from tpo_gym.agents.trials import PASSIVE_WRAPPERS, Lookahead, wrappers_of
from tpo_gym.envs.batched import BatchedEnv


class CannotShare(ValueError):
    """Several processes cannot train what they were given; the message says why, and what to do."""


REPORTED = ("episode", "is_success", "TimeLimit.truncated")
"""What other processes hear of a step's infos."""


_FUNCTIONS = (
    *("bernoulli", "binomial", "multinomial", "normal", "poisson", "rand", "rand_like", "randint", "randint_like"),
    *("randn", "randn_like", "_standard_gamma", "_sample_dirichlet"),
)
_METHODS = (
    *("bernoulli", "bernoulli_", "cauchy_", "exponential_", "geometric_", "log_normal_", "multinomial", "normal_"),
    *("random_", "uniform_"),
)
RANDOM = frozenset([getattr(torch, name) for name in _FUNCTIONS] + [getattr(Tensor, name) for name in _METHODS])
"""What torch draws random numbers with."""


class SharedNoise(TorchFunctionMode):
    """While entered, whatever torch draws for the rows of this process is drawn for all rows and cut out.

    Rows are the first dimension. No policy and no distribution has to know about it.

    Args:
        exchange: The processes.
    """

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._draw = _WholeDraws(exchange)
        self._active = True

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if self._active and func in RANDOM:
            with self._draw:
                return func(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave alone what is drawn meanwhile."""
        self._active, before = False, self._active
        try:
            yield
        finally:
            self._active = before


class _WholeDraws(TorchDispatchMode):
    """The operations that such a function comes down to, on all rows instead of this process's."""

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self._exchange = exchange

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        drawn = func(*(self._grown(value) for value in args), **kwargs)
        rows = self._exchange.part(len(drawn))
        own = drawn[rows.start : rows.stop]
        return args[0].copy_(own) if func._schema.is_mutable else own.clone()

    def _grown(self, value: Any) -> Any:
        """A tensor with as many rows, or a shape of as many rows, as all processes have together."""
        size = self._exchange.size
        if isinstance(value, Tensor) and value.ndim:
            return value.repeat(size, *[1] * (value.ndim - 1))
        return [value[0] * size, *value[1:]] if isinstance(value, (list, tuple)) else value


class BatchedPart(BatchedGroupEnv):
    """This process's groups of a batched environment of ours.

    The whole environment draws all contexts, here as everywhere; a smaller one with this process's contexts plays them.
    So the whole environment is always in the state that it would have in one process.

    Args:
        whole: The whole environment.
        exchange: The processes.
        noise: Paused while the contexts are drawn.
    """

    def __init__(self, whole: BatchedGroupEnv, exchange: Exchange, noise: SharedNoise) -> None:
        self._exchange = exchange
        self._noise = noise
        self._whole = whole
        self._rows = exchange.part(whole.num_envs)
        super().__init__(_part_of(whole.env, self._rows), whole.device)

    def start(self, group_size: int) -> Tensor:
        with self._noise.paused():
            self._whole.start(group_size)
        return self._follow()

    def start_all(self) -> Tensor:
        with self._noise.paused():
            self._whole.start_all()
        return self._follow()

    def _follow(self) -> Tensor:
        state = self._whole.env.get_state()
        for name, value in state.items():
            if isinstance(value, Tensor) and name != "generator":
                state[name] = value[self._rows.start : self._rows.stop]
        self.env.set_state(state)
        return self.env.observations().to(self.device)

    def finish(self) -> None:
        """Draw the next contexts, as the end of the episodes does in one process."""
        self._whole.env.reset(options={"group_size": self._whole.env.group_size})

    def everywhere(self, step: Step) -> Step:
        """A step as one process would see it, but for the observations, which are those of this process."""
        size = self._exchange.size
        return step._replace(
            rewards=self._exchange.rows(step.rewards),
            dones=np.tile(step.dones, size),  # all episodes have one length
            interactions=step.interactions * size,
        )

    def mean(self, values: Tensor) -> Tensor:
        return self._exchange.rows(values).mean(0)


class VecPart:
    """This process's groups of copies of an environment of another package.

    Only these are reset and stepped here. After each step the processes tell each other what happened, so that all of
    them go on until the last episode ends.

    Args:
        whole: The whole environment.
        exchange: The processes.
        noise: Paused while the environment acts.

    Raises:
        CannotShare: If the environment cannot be shared.
    """

    def __init__(self, whole: VecGroupEnv, exchange: Exchange, noise: SharedNoise) -> None:
        base: Any = whole.env.unwrapped
        if not isinstance(base, GroupVecEnv):
            raise CannotShare(
                f"Several processes cannot share a {type(base).__name__}: pass the environment's id or one gym.Env, of "
                "which each process then runs its own copies."
            )
        for wrapper in wrappers_of(whole.env):
            if not isinstance(wrapper, (VecTransposeImage, *PASSIVE_WRAPPERS)):
                reason = " Its statistics would be those of one process." if isinstance(wrapper, VecNormalize) else ""
                raise CannotShare(
                    f"Several processes cannot share an environment in {type(wrapper).__name__}.{reason} Wrap the "
                    "single environment instead."
                )
        self._exchange = exchange
        self._noise = noise
        self._whole = whole
        self._base: GroupVecEnv = base
        self._rows = base.owned = exchange.part(whole.num_envs)
        self._last: Step | None = None
        self.num_envs = len(self._rows)

    def _own(self, values: Observations) -> Observations:
        if isinstance(values, dict):
            return {key: value[self._rows.start : self._rows.stop] for key, value in values.items()}
        return values[self._rows.start : self._rows.stop]

    def start(self, group_size: int) -> Observations:
        self._last = None
        with self._noise.paused():
            return self._own(self._whole.start(group_size))

    def step(self, actions: Tensor) -> Step:
        every = actions.new_zeros((self._whole.num_envs, *actions.shape[1:]))
        rows = slice(self._rows.start, self._rows.stop)
        every[rows] = actions
        with self._noise.paused():
            step = self._whole.step(every)
        assert step.infos is not None
        dones, infos = step.dones[rows], step.infos[rows]
        told = [{key: info[key] for key in REPORTED if key in info} for info in infos]
        running = not self._base.idle[rows].all()
        heard = self._exchange.objects((step.rewards[rows].tolist(), dones, told, step.interactions, running))
        self._running = any(entry[4] for entry in heard)
        self._last = Step(
            lambda: self._own(step.observations),
            step.rewards.new_tensor([reward for entry in heard for reward in entry[0]]),
            np.concatenate([entry[1] for entry in heard]),
            [info for entry in heard for info in entry[2]],
            sum(entry[3] for entry in heard),
        )
        self._last.infos[rows] = infos  # type: ignore[index]
        return Step(self._last.observe, step.rewards[rows], dones, infos, step.interactions)

    def everywhere(self, step: Step) -> Step:
        """As :meth:`BatchedPart.everywhere`; of other processes' infos only :data:`REPORTED`."""
        assert self._last is not None
        return self._last

    def go_on(self, running: np.ndarray) -> bool:
        return self._last is None or self._running

    def mean(self, values: Tensor) -> Tensor:
        return self._exchange.rows(values).mean(0)

    def action_masks(self) -> Tensor | None:
        if self._whole._mask_entries and self._base.idle.all():  # waiting for other processes
            shape = (self.num_envs, self._whole._mask_entries)
            return torch.ones(shape, dtype=torch.bool, device=self._whole.device)
        masks = self._whole.action_masks()
        return None if masks is None else masks[self._rows.start : self._rows.stop]

    def score_actions(self, actions: Tensor, rows: np.ndarray, policy: ActorPolicy, lookahead: Lookahead) -> Tensor:
        with self._noise.paused():
            return self._whole.score_actions(actions, rows + self._rows.start, policy, lookahead)

    def check_scorable(self, lookahead: Lookahead) -> None:
        self._whole.check_scorable(lookahead)

    def finish(self) -> None:
        """Nothing is left to do: every rollout batch resets the environment."""


def _part_of(env: BatchedEnv, rows: range) -> BatchedEnv:
    """An environment of the same task, data and arguments with these sub-environments only."""
    part = copy(env)
    part.num_envs = len(rows)
    part.observation_space = batch_space(env.single_observation_space, part.num_envs)
    part.action_space = batch_space(env.single_action_space, part.num_envs)
    for name in env._state_fields:
        setattr(part, name, getattr(env, name)[rows.start : rows.stop].clone())
    return part
