"""What must be kept, beside the weights, so that training goes on as if it had never stopped."""

from __future__ import annotations

import importlib
import random
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from copy import copy
from typing import TYPE_CHECKING, Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium.vector import VectorEnv, VectorWrapper
from stable_baselines3.common.running_mean_std import RunningMeanStd
from stable_baselines3.common.vec_env import VecEnv, VecEnvWrapper, VecNormalize

from tpo_gym.agents.serialization import may_import
from tpo_gym.envs.sb3 import SB3VecEnv

if TYPE_CHECKING:
    from tpo_gym.agents.checkpoint import CheckpointMixin

State = dict[str, Any]


def global_random() -> State:
    """The states of the program's random generators: Python's, NumPy's and torch's on every device."""
    return {
        "python": random.getstate(),
        "numpy": np.random.get_state(legacy=False),
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else [],
    }


def set_global_random(state: State) -> None:
    """Restore what :func:`global_random` returned; CUDA devices that are not here are skipped."""
    random.setstate(state["python"])
    np.random.set_state(state["numpy"])
    torch.set_rng_state(state["torch"].cpu())
    for index, device_state in enumerate(state["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(device_state.cpu(), index)


@contextmanager
def preserved_random() -> Iterator[None]:
    """Leave the program's random generators as they were."""
    state = global_random()
    try:
        yield
    finally:
        set_global_random(state)


def capture(model: CheckpointMixin, torch_alone: bool = False) -> State:
    """Everything that changes while a rollout batch is collected: random generators, environment, counters.

    Args:
        model: The model.
        torch_alone: Whether no other numbers than torch's are drawn meanwhile; :func:`completed` adds the others, whose
            states take as long as all the rest.
    """
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    return {
        "started": model._last_obs is not None,
        "num_timesteps": model.num_timesteps,
        "iteration": model._iteration,
        "ep_info_buffer": copy(model.ep_info_buffer),
        "ep_success_buffer": copy(model.ep_success_buffer),
        "random": {"torch": torch.get_rng_state(), "cuda": cuda} if torch_alone else global_random(),
        "generators": {name: g.bit_generator.state for name, g in _generators(model).items()},
        "environment": None if model.env is None else _capture_env(model.env, getattr(model, "_group_env", None)),
    }


def completed(state: State) -> State:
    """What :func:`capture` returned, with the states of all generators."""
    return {**state, "random": {**global_random(), **state["random"]}}


def restore(model: CheckpointMixin, state: State) -> None:
    """Restore what :func:`capture` returned.

    An environment that does not fit the state is left as it is, with a warning.
    """
    model.num_timesteps = state["num_timesteps"]
    model._iteration = state["iteration"]
    model.ep_info_buffer = state["ep_info_buffer"]
    model.ep_success_buffer = state["ep_success_buffer"]
    for name, generator in _generators(model).items():
        if name in state["generators"]:
            generator.bit_generator.state = state["generators"][name]
    try:
        _restore_env(model.env, getattr(model, "_group_env", None), state["environment"])
    except ValueError as error:
        warnings.warn(
            f"Training goes on, but not bit for bit as if it had never stopped: {error}", UserWarning, stacklevel=4
        )
    set_global_random(state["random"])


def _generators(model: CheckpointMixin) -> dict[str, np.random.Generator]:
    """NumPy generators that the model owns, and its action space's."""
    found = {name: value for name, value in vars(model).items() if isinstance(value, np.random.Generator)}
    return {**found, "action_space": model.action_space.np_random}


def _layers(env: VecEnv) -> list[VecEnv]:
    """The environment and what it wraps, outermost first."""
    layers = [env]
    while isinstance(layers[-1], VecEnvWrapper):
        layers.append(layers[-1].venv)
    return layers


def _has_state(value: Any) -> bool:
    # On the class: SB3's wrappers pass unknown attributes on to what they wrap.
    return callable(getattr(type(value), "get_state", None)) and callable(getattr(type(value), "set_state", None))


def _capture_env(env: VecEnv, group_env: Any) -> State:
    layers = [
        {"class": type(layer).__name__, "num_envs": layer.num_envs, "state": _capture_layer(layer)}
        for layer in _layers(env)
    ]
    return {"layers": layers, "groups": group_env.get_state() if _has_state(group_env) else None}


def _restore_env(env: VecEnv | None, group_env: Any, saved: State | None) -> None:
    """Restore an environment's state.

    Raises:
        ValueError: If the state is missing or belongs to another environment.
    """
    if env is None or saved is None:
        raise ValueError("the model was saved without an environment.")
    layers = _layers(env)
    here = [(type(layer).__name__, layer.num_envs) for layer in layers]
    there = [(layer["class"], layer["num_envs"]) for layer in saved["layers"]]
    if here != there:
        raise ValueError(f"the model was saved with the environment {there}, this one is {here}.")
    for layer, entry in zip(layers, saved["layers"], strict=True):
        if entry["state"] is not None:
            _restore_layer(layer, entry["state"])
    if saved["groups"] is not None and _has_state(group_env):
        group_env.set_state(saved["groups"])


def _capture_layer(layer: VecEnv) -> State | None:
    if _has_state(layer):
        return layer.get_state()  # type: ignore[attr-defined]
    if isinstance(layer, SB3VecEnv):
        returns, lengths = layer._returns.copy(), layer._lengths.copy()
        # The seed of the next reset: all sub-environments share the first one.
        seed = layer._seeds[0]
        return {"batched": layer.batched.get_state(), "returns": returns, "lengths": lengths, "seed": seed}
    if isinstance(layer, VecNormalize):
        observations = getattr(layer, "obs_rms", None)
        return {
            "observations": _moments(observations),
            "rewards": _moments(layer.ret_rms),
            "returns": layer.returns.copy(),
        }
    return None


def _restore_layer(layer: VecEnv, state: State) -> None:
    if _has_state(layer):
        layer.set_state(state)  # type: ignore[attr-defined]
    elif isinstance(layer, SB3VecEnv):
        layer.batched.set_state(state["batched"])
        layer._returns[:], layer._lengths[:] = state["returns"], state["lengths"]
        layer._seeds = [state["seed"]] * layer.num_envs
    elif isinstance(layer, VecNormalize):
        _set_moments(getattr(layer, "obs_rms", None), state["observations"])
        _set_moments(layer.ret_rms, state["rewards"])
        layer.returns = state["returns"]


def _moments(rms: RunningMeanStd | dict[str, RunningMeanStd] | None) -> State | None:
    if isinstance(rms, dict):
        return {key: _moments(item) for key, item in rms.items()}
    return None if rms is None else {"mean": copy(rms.mean), "var": copy(rms.var), "count": rms.count}


def _set_moments(rms: RunningMeanStd | dict[str, RunningMeanStd] | None, state: State | None) -> None:
    if rms is None or state is None:
        return
    if isinstance(rms, dict):
        for key, item in rms.items():
            _set_moments(item, state[key])
    else:
        rms.mean, rms.var, rms.count = state["mean"], state["var"], state["count"]


def describe_env(env: Any) -> State | None:
    """How to make this environment again, from its id, or ``None`` where that is not known.

    Wrappers and arguments other than numbers, strings and lists of them are not described: such an environment must be
    given again.
    """
    if isinstance(env, str):
        return {"id": env, "kwargs": {}, "num_envs": None, "max_episode_steps": None}
    if isinstance(env, SB3VecEnv):
        env = env.batched
    if not isinstance(env, (gym.Env, VectorEnv)) or isinstance(env, VectorWrapper):
        return None
    spec = env.spec
    if spec is None or spec.additional_wrappers or spec.id not in gym.registry:
        return None
    kwargs = {key: value for key, value in spec.kwargs.items() if key != "num_envs"}
    if not _is_plain(kwargs):
        return None
    made = {"id": spec.id, "kwargs": kwargs}
    if isinstance(env, VectorEnv):
        return {**made, "num_envs": env.num_envs, "max_episode_steps": None}
    return {**made, "num_envs": None, "max_episode_steps": spec.max_episode_steps}


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(isinstance(key, str) and _is_plain(item) for key, item in value.items())
    if isinstance(value, (list, tuple)):
        return all(map(_is_plain, value))
    return value is None or type(value) in (bool, int, float, str)


def make_env(description: State | None) -> Any:
    """Make the environment that :func:`describe_env` described.

    Raises:
        ValueError: If nothing was described, or the id is not registered.
    """
    if description is None:
        raise ValueError(
            "The checkpoint does not say how to make its environment again: that is known only for one given as "
            "an id, or made by gymnasium.make or make_vec without wrappers and with plain arguments. Pass env=."
        )
    module, _, env_id = description["id"].rpartition(":")
    if env_id not in gym.registry and may_import(module):
        importlib.import_module(module)
    if env_id not in gym.registry:
        raise ValueError(
            f"{env_id!r} is not a registered environment: import the module that registers it, or pass env=."
        )
    kwargs, steps = description["kwargs"], description["max_episode_steps"]
    if description["num_envs"] is not None:
        return gym.make_vec(env_id, num_envs=description["num_envs"], **kwargs)
    return gym.make(env_id, max_episode_steps=steps, **kwargs) if kwargs or steps else env_id
