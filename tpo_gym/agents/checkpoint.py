"""Saving, loading and resuming: files without code in them, and training that goes on to the last bit."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import TensorBoardOutputFormat, configure
from stable_baselines3.common.save_util import recursive_getattr, recursive_setattr
from stable_baselines3.common.type_aliases import MaybeCallback, TensorDict
from stable_baselines3.common.utils import check_for_correct_spaces, get_device, get_system_info
from stable_baselines3.common.vec_env import unwrap_vec_normalize

from tpo_gym.agents.checkpoint_file import (
    FORMAT,
    PathLike,
    document_of,
    load_tensors,
    newest_members,
    read_members,
    write_checkpoint,
)
from tpo_gym.agents.distributed import OneProcess
from tpo_gym.agents.resume_state import State, capture, completed, describe_env, make_env, preserved_random, restore
from tpo_gym.agents.serialization import Reader, Writer

Self = TypeVar("Self", bound="CheckpointMixin")


class CheckpointMixin(BaseAlgorithm):
    """``save``, ``load`` and ``resume`` with SB3's contract.

    A file holds what the model is (its attributes and weights) and, apart from that, the state at the last update
    boundary: random generators, environment, counters. The latter is applied when training goes on, by
    ``learn(reset_num_timesteps=False)``, so that loading a model for prediction touches no random generator.
    """

    # Class attributes, because the constructor of an algorithm expands its environment before that of its bases runs.
    _processes: OneProcess
    _iteration: int = 0
    """Rollout batches since the count of interactions began."""
    _boundary: State | None = None
    """The state before the rollout batch that is being collected."""
    _updating: bool = False
    """Whether a rollout batch is collected but its update is not complete: what is saved now cannot go on exactly."""
    _pending: State | None = None
    """What a loaded file holds, until training goes on."""
    _reseed: bool = False
    """Whether training anew begins with the model's seed, since loading left all generators alone."""
    _run: dict[str, str] | None = None
    """The TensorBoard run that a continued training belongs to."""
    _env_source: State | None = None
    """How to make the environment again."""

    @property
    def remaining_timesteps(self) -> int:
        """Interactions left of the budget that the last ``learn`` was given."""
        return max(0, self._total_timesteps - self.num_timesteps)

    def save(
        self,
        path: PathLike,
        exclude: Iterable[str] | None = None,
        include: Iterable[str] | None = None,
        allow_pickle: bool = False,
    ) -> None:
        """Write the model to a file, atomically: a reader sees the old file or the whole new one.

        Where several processes train the model, the first one writes.

        Args:
            path: Where to; ``.zip`` is added where there is no suffix. Or an open binary file.
            exclude: Attributes to leave out in addition to the default ones.
            include: Attributes to store though they would be left out.
            allow_pickle: Pickle what cannot be stored as data (a lambda, a local class). Such a file can run any code
                when it is read, so ``load`` wants ``trust=True`` for it.

        Raises:
            TypeError: If an attribute can only be pickled, and that is not allowed.
        """
        if not self._processes.writes:
            return
        writer = Writer(allow_pickle)
        excluded = {*(exclude or ()), *self._excluded_save_params()} - set(include or ())
        names, variables = self._get_torch_save_params()
        excluded |= {name.split(".")[0] for name in (*names, *variables)}
        attributes = {name: value for name, value in vars(self).items() if name not in excluded}
        for name in attributes:
            if _shadows(type(self), name):
                raise TypeError(f"The model's {name} was replaced, which cannot be stored: save(exclude=[{name!r}]).")
        document = {
            "format": FORMAT,
            "saved_at": time.time_ns(),
            "class": f"{type(self).__module__}:{type(self).__qualname__}",
            "system": get_system_info(print_info=False)[0],
            "environment": self._env_source,
            "attributes": {name: writer.encode(value, name) for name, value in attributes.items()},
            "variables": {name: writer.encode(recursive_getattr(self, name).data, name) for name in variables},
            "resume": writer.encode(completed(self._pending or self._boundary or capture(self)), "resume"),
        }
        write_checkpoint(path, document, {**self.get_parameters(), "tensors": writer.tensors})

    @classmethod
    def load(
        cls: type[Self],
        path: PathLike,
        env: Any = None,
        device: torch.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        print_system_info: bool = False,
        force_reset: bool = True,
        trust: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Make a model from a file. Nothing in the file is executed.

        Args:
            path: The file, with or without ``.zip``, or an open binary file.
            env: Environment to train on; not needed for prediction.
            device: Where the model goes.
            custom_objects: Attributes to use instead of the stored ones, which are then not even read.
            print_system_info: Print versions, now and when the file was written.
            force_reset: As in SB3's signature; without effect, since every rollout batch starts its own episodes.
            trust: Read pickled attributes and import any module that the file names. Only for files whose origin you
                trust: both can run any code.
            **kwargs: Attributes to change.

        Raises:
            ValueError: If the file is incomplete, of another class, would have to be trusted, or does not fit ``env``.
        """
        return cls._from_members(read_members(path), env, device, custom_objects, print_system_info, trust, kwargs)

    @classmethod
    def resume(
        cls: type[Self],
        path: str | Path,
        env: Any = None,
        device: torch.device | str = "auto",
        custom_objects: dict[str, Any] | None = None,
        trust: bool = False,
        **kwargs: Any,
    ) -> Self:
        """Load the newest complete checkpoint, with its environment, ready to go on.

        ``model.learn(model.remaining_timesteps, reset_num_timesteps=False)`` then ends where the interrupted training
        would have ended.

        Args:
            path: A checkpoint, or a folder of them.
            env: The environment; made again where it was given as an id or by ``gymnasium.make`` or ``make_vec``.
            device: See :meth:`load`.
            custom_objects: See :meth:`load`.
            trust: See :meth:`load`.
            **kwargs: See :meth:`load`.

        Raises:
            FileNotFoundError: If there is no checkpoint.
            ValueError: If there is no complete one, or the environment is not known.
        """
        members = newest_members(Path(path)) if Path(path).is_dir() else read_members(path)
        if env is None:
            env = make_env(document_of(members)["environment"])
        return cls._from_members(members, env, device, custom_objects, False, trust, kwargs)

    def set_parameters(
        self,
        load_path_or_dict: str | TensorDict,
        exact_match: bool = True,
        device: torch.device | str = "auto",
    ) -> None:
        """Set weights and optimizer state from a file or from what ``get_parameters`` returned (SB3's contract)."""
        if not isinstance(load_path_or_dict, dict):
            load_path_or_dict = _state_dicts(self, read_members(load_path_or_dict), get_device(device))
        super().set_parameters(load_path_or_dict, exact_match, device)

    def set_env(self, env: Any, force_reset: bool = True) -> None:
        """Train on another environment from now on (SB3's contract)."""
        if self.env is not None and env is not self.env:
            self._pending = None  # the stored state is that of the environment before
        self._boundary = None
        super().set_env(env, force_reset)

    @classmethod
    def _from_members(
        cls: type[Self],
        members: dict[str, bytes],
        env: Any,
        device: torch.device | str,
        custom_objects: dict[str, Any] | None,
        print_system_info: bool,
        trust: bool,
        kwargs: dict[str, Any],
    ) -> Self:
        document = document_of(members)
        _check_class(cls, document["class"])
        if print_system_info:
            _print_system_info(document["system"])
        reader = Reader(load_tensors(members, "tensors", torch.device("cpu")), get_device(device), trust)
        data = _attributes(cls, document["attributes"], reader, custom_objects or {})
        if "policy_kwargs" in kwargs and kwargs["policy_kwargs"] != data.get("policy_kwargs"):
            raise ValueError(
                "The specified policy kwargs do not equal the stored policy kwargs. "
                f"Stored kwargs: {data.get('policy_kwargs')}, specified kwargs: {kwargs['policy_kwargs']}"
            )
        if "observation_space" not in data or "action_space" not in data:
            raise KeyError("The observation_space and action_space were not given, can't verify new environments")
        stored_env = data.pop("env", None)
        with preserved_random():
            model = cls(policy=data["policy_class"], env=None, device=device, _init_setup_model=False)  # type: ignore[call-arg]
            model.__dict__.update(data)
            model.__dict__.update(kwargs)
            model._env_source = document["environment"]
            model._attach_env(env if env is not None else stored_env)
            model._setup_model()
            model.set_parameters(_state_dicts(model, members, model.device), device=device)
            for name, node in document["variables"].items():
                if name not in model._get_torch_save_params()[1]:
                    raise ValueError(f"The checkpoint holds {name}, which is not a variable of {cls.__name__}.")
                recursive_setattr(model, f"{name}.data", reader.decode(node, name).to(model.device))
        model._pending = pending = reader.decode(document["resume"], "resume")
        if "num_timesteps" in {**kwargs, **(custom_objects or {})}:
            pending["num_timesteps"] = model.num_timesteps
        model._reseed = True
        return model

    def _attach_env(self, env: Any) -> None:
        """Put an environment in a model whose attributes are loaded, if it fits."""
        if env is None:
            return
        env = self._wrap_env(self._expand_env(env), self.verbose)
        check_for_correct_spaces(env, self.observation_space, self.action_space)
        self.env, self.n_envs = env, env.num_envs
        self._vec_normalize_env = unwrap_vec_normalize(env)

    def _expand_env(self, env: Any) -> Any:
        """Copy an id or a single environment as often as the algorithm needs, and note how to make it again."""
        self._env_source = describe_env(env)
        return env

    def _excluded_save_params(self) -> list[str]:
        own = ["_boundary", "_updating", "_pending", "_reseed", "_env_source"]
        # Every rollout batch starts its own episodes, so the last observation is of no use; a schedule is made from
        # `learning_rate`.
        return [
            *super()._excluded_save_params(),
            *own,
            "_last_obs",
            "_last_original_obs",
            "_last_episode_starts",
            "lr_schedule",
        ]

    def _setup_learn(
        self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        reset_num_timesteps: bool = True,
        tb_log_name: str | None = None,
        progress_bar: bool = False,
    ) -> tuple[int, BaseCallback]:
        """Where training goes on after a load, restore what it needs to be as if never stopped."""
        if self.env is None:
            raise ValueError("This model has no environment to train in: call set_env(), or load it with env=.")
        pending = None if reset_num_timesteps else self._pending
        if reset_num_timesteps:
            self._iteration = 0
            if self._reseed:
                self.set_random_seed(self.seed)
        self._pending, self._reseed = None, False
        self._boundary, self._updating = None, False
        if pending is not None and pending["started"]:
            self._last_obs = np.empty(0)  # no reset: it would draw from the generators
        elif pending is not None:
            restore(self, pending)
        name = tb_log_name or (self._run["name"] if self._run and not reset_num_timesteps else type(self).__name__)
        continued = not reset_num_timesteps and self._open_run(name, pending)
        try:
            result = super()._setup_learn(total_timesteps, callback, reset_num_timesteps, name, progress_bar)
        finally:
            if continued:
                self._custom_logger = False
        if not self._custom_logger and self.tensorboard_log is not None and self.logger.dir is not None:
            self._run = {"root": str(self.tensorboard_log), "name": name, "folder": Path(self.logger.dir).name}
        if pending is not None and pending["started"]:
            restore(self, pending)
            self._num_timesteps_at_start = self.num_timesteps
        return result

    def _open_run(self, name: str, pending: State | None) -> bool:
        """Log to the run of this training's first part, whatever other runs have appeared since."""
        run = self._run
        if self._custom_logger or run is None or (run["root"], run["name"]) != (str(self.tensorboard_log), name):
            return False
        formats = ["stdout", "tensorboard"] if self.verbose >= 1 else ["tensorboard"]
        self._logger = configure(os.path.join(run["root"], Path(run["folder"]).name), formats)
        self._custom_logger = True
        _hide_later_events(self._logger, pending["num_timesteps"] if pending is not None else self.num_timesteps)
        return True


def _hide_later_events(logger: Any, step: int) -> None:
    """Tell TensorBoard that what a killed process logged after ``step`` is superseded."""
    from tensorboard.compat.proto.event_pb2 import Event, SessionLog

    for output in logger.output_formats:
        if isinstance(output, TensorBoardOutputFormat):
            start = Event(step=step + 1, session_log=SessionLog(status=SessionLog.START))
            output.writer._get_file_writer().add_event(start)


def _shadows(cls: type, name: str) -> bool:
    """Whether an instance attribute of this name would replace a method or property."""
    return name.startswith("__") or callable(getattr(cls, name, None)) or isinstance(getattr(cls, name, None), property)


def _attributes(cls: type, nodes: dict[str, Any], reader: Reader, custom_objects: dict[str, Any]) -> dict[str, Any]:
    values = {}
    for name, node in nodes.items():
        if _shadows(cls, name):
            raise ValueError(f"The file is not to be trusted: it would replace {cls.__name__}.{name}.")
        values[name] = custom_objects[name] if name in custom_objects else reader.decode(node, name)
    return values


def _check_class(cls: type, stored: str) -> None:
    name = stored.partition(":")[2]
    if name not in [base.__qualname__ for base in cls.__mro__]:
        raise ValueError(f"The file holds a {name}: read it with {name}.load instead of {cls.__name__}.load.")


def _print_system_info(stored: dict[str, str]) -> None:
    print("== CURRENT SYSTEM INFO ==")
    get_system_info()
    print("== SAVED MODEL SYSTEM INFO ==")
    print("\n".join(f"- {key}: {value}" for key, value in stored.items()))


def _state_dicts(model: BaseAlgorithm, members: dict[str, bytes], device: torch.device) -> dict[str, Any]:
    names = model._get_torch_save_params()[0]
    return {name: load_tensors(members, name, device) for name in names if f"{name}.pth" in members}
