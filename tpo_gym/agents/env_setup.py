"""From whatever the user passes as ``env`` to the vectorized environment that groups are collected in."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
from gymnasium import spaces
from gymnasium.vector import AutoresetMode, VectorEnv
from stable_baselines3.common.monitor import Monitor
from stable_baselines3.common.vec_env import VecEnv

from tpo_gym.agents.copies import snapshot
from tpo_gym.agents.group_vec_env import GroupVecEnv
from tpo_gym.envs.batched import BatchedEnv
from tpo_gym.envs.sb3 import SB3VecEnv
from tpo_gym.envs.single import SingleEnv
from tpo_gym.envs.vector_adapter import VectorEnvAdapter

EnvLike = str | gym.Env | VectorEnv | VecEnv
CANDIDATE_SETS = ("episodes", "actions", "all_actions", "exact")
EXHAUSTIVE_SETS = ("all_actions", "exact")
"""Sets that hold every action of a one-step task."""


def native_env(env: Any) -> BatchedEnv | None:
    """The batched environment behind an unwrapped :class:`SB3VecEnv`, whose tensors can be used directly."""
    return env.batched if isinstance(env, SB3VecEnv) else None


def is_ours(env: Any) -> bool:
    """Whether ``env`` (an id, a single or a vectorized environment, wrapped or not) is a task of this package."""
    if isinstance(env, str):
        entry = _spec(env).vector_entry_point
        return isinstance(entry, str) and entry.startswith("tpo_gym.")
    return isinstance(getattr(env, "unwrapped", env), (BatchedEnv, SB3VecEnv, SingleEnv))


def _spec(env_id: str) -> Any:
    # "module:id" imports the module that registers the id.
    return gym.make(env_id).spec if ":" in env_id else gym.spec(env_id)


def pick_candidates(
    requested: str, env: BatchedEnv | None, action_space: spaces.Space, supported: Sequence[str] = CANDIDATE_SETS
) -> str:
    """The candidate set to use: ``requested``, or for ``"auto"`` the one that fits the environment.

    Args:
        requested: ``"auto"`` or one of :data:`CANDIDATE_SETS`.
        env: The batched environment, where it is one of ours.
        action_space: The action space.
        supported: The sets that the algorithm's objective is defined for.

    Raises:
        ValueError: For an unknown set, or one that the environment or the algorithm cannot serve.
    """
    if requested not in (*CANDIDATE_SETS, "auto"):
        raise ValueError(
            f'Unknown candidates {requested!r}: choose "auto", "episodes", "actions", "all_actions" or "exact".'
        )
    discrete = isinstance(action_space, spaces.Discrete)
    one_step = env is not None and env.horizon == 1
    if requested == "auto":
        if one_step and discrete and "all_actions" in supported:
            return "all_actions"
        dense = env is not None and not one_step and getattr(env, "reward", None) != "terminal"
        return "actions" if dense and "actions" in supported else "episodes"
    if requested not in supported:
        raise ValueError(f"candidates={requested!r} is not defined for this algorithm: use one of {tuple(supported)}.")
    if requested == "exact" and not hasattr(env, "num_contexts"):
        raise ValueError(
            'candidates="exact" needs a task whose contexts and rewards are all known, a bandit or classification task '
            'of tpo_gym: use candidates="all_actions", which samples.'
        )
    if requested in EXHAUSTIVE_SETS and not discrete:
        raise ValueError(f"candidates={requested!r} lists every action: it needs Discrete actions, got {action_space}.")
    if requested in EXHAUSTIVE_SETS and env is not None and not one_step:
        raise ValueError(
            f'candidates={requested!r} is for one-step tasks, but episodes last {env.horizon} steps: use "episodes" '
            'or "actions".'
        )
    return requested


def check_exact(env: BatchedEnv) -> None:
    """Raise a ``ValueError`` where a task for candidates "exact" does not have one sub-environment per context."""
    contexts = env.num_contexts  # type: ignore[attr-defined]
    if env.num_envs != contexts:
        raise ValueError(
            f'candidates="exact" visits all {contexts} contexts in every update, but there are {env.num_envs} '
            f"sub-environments: make {contexts}."
        )


def expand_env(
    env: EnvLike, candidates: str, group_size: int, n_contexts: int, supported: Sequence[str] = CANDIDATE_SETS
) -> EnvLike:
    """Copy an id or a single environment as often as the candidate set needs; leave vectorized ones as they are."""
    if isinstance(env, (VecEnv, VectorEnv)):
        return env
    spec = _spec(env) if isinstance(env, str) else env.spec
    if is_ours(env) and spec is not None and not spec.additional_wrappers:
        probe = gym.make_vec(spec, num_envs=1)
        kind = pick_candidates(candidates, probe, probe.single_action_space, supported)  # type: ignore[arg-type]
        if kind == "exact":
            n_contexts = probe.num_contexts  # type: ignore[attr-defined]
        return gym.make_vec(spec, num_envs=n_contexts * (group_size if kind == "episodes" else 1))
    n_envs = n_contexts * (1 if candidates in ("actions", "all_actions") else group_size)
    if isinstance(env, str):
        return GroupVecEnv([lambda: Monitor(gym.make(spec)) for _ in range(n_envs)])  # type: ignore[arg-type]
    copies = [_monitored(env), *(_monitored(_copy(env)) for _ in range(n_envs - 1))]
    vec_env = GroupVecEnv([_constant(member) for member in copies])
    vec_env.seed()  # the copies of an environment that was seeded before share its stream
    return vec_env


def _monitored(env: gym.Env) -> gym.Env:
    wrapper: Any = env
    while isinstance(wrapper, gym.Wrapper):
        if isinstance(wrapper, Monitor):
            return env
        wrapper = wrapper.env
    return Monitor(env)


def _constant(env: gym.Env) -> Callable[[], gym.Env]:
    return lambda: env


def _copy(env: gym.Env) -> gym.Env:
    """Another environment like this one: copied with all that was set in it, or made again from its spec."""
    if isinstance(env, Monitor):  # its file cannot be shared: what the copies do is recorded in memory
        return Monitor(_copy(env.env), None, env.allow_early_resets, env.reset_keywords, env.info_keywords)
    try:
        return snapshot(env)()
    except Exception as error:
        if env.spec is not None:
            try:
                return gym.make(env.spec)
            except (ValueError, gym.error.Error):
                pass  # a wrapper that does not record its arguments
        raise ValueError(
            f"{env} can be neither copied ({error}) nor made again from its spec, so no group can be formed. Pass its "
            "id, or a vectorized environment with contexts x group_size sub-environments."
        ) from error


def as_vec_env(env: Any) -> Any:
    """Adapt a Gymnasium vector environment to SB3's ``VecEnv``; everything else passes.

    Raises:
        TypeError: For a vector environment that cannot be adapted.
        ValueError: For one whose autoreset mode cannot be served.
    """
    if isinstance(env, BatchedEnv) and env.autoreset_mode is AutoresetMode.SAME_STEP:
        return SB3VecEnv(env)
    return VectorEnvAdapter(env) if isinstance(env, VectorEnv) else env
