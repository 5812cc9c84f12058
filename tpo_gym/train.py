"""``python -m tpo_gym.train``: any algorithm on any environment; under ``torchrun`` in several processes."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from tpo_gym import agents
from tpo_gym.agents import GroupAlgorithm, ResumeCallback
from tpo_gym.values import read_value

ALGORITHMS: dict[str, type[GroupAlgorithm]] = {
    name: value
    for name in agents.__all__
    if isinstance(value := getattr(agents, name), type)
    and issubclass(value, GroupAlgorithm)
    and value is not GroupAlgorithm
}
OWN_OPTIONS = ("policy", "env", "seed", "device", "tensorboard_log", "verbose", "policy_kwargs")
"""Arguments of the algorithms that are options of their own here."""


class UsageError(Exception):
    """Something is wrong with what the user asked for; the message says what."""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tpo_gym.train",
        description="Train an algorithm on an environment. Under torchrun all processes train one model together: "
        "torchrun --nproc-per-node 2 -m tpo_gym.train ...",
        epilog="A VALUE is JSON or a Python literal (0.1, true, None, [64, 64]), else text; of --policy-args also "
        "module:Name, for classes. Example: python -m tpo_gym.train tpo_gym/TokenReversal-v0 --policy "
        "TransformerPolicy --timesteps 800_000 --env-args sequence_length=8 reward=terminal --args eta=0.5",
    )
    add = parser.add_argument
    add("env", metavar="ENV", help="id of a Gymnasium environment; module:id imports the module that registers it")
    add("--timesteps", type=_count, required=True, metavar="N", help="interactions with the environment, all counted")
    add("--algorithm", default="TPO", metavar="NAME", help=f"one of {', '.join(ALGORITHMS)} (default: TPO)")
    add("--policy", default="MlpPolicy", metavar="NAME", help="MlpPolicy (default), CnnPolicy, MultiInputPolicy, ...")
    for name, what in (("env-args", "the environment"), ("args", "the algorithm"), ("policy-args", "the policy")):
        add(f"--{name}", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help=f"arguments of {what}")
    add("--seed", type=int, help="seed of all random generators (default: none)")
    add("--device", default="auto", help="cpu, cuda, ... (default: auto, a GPU where there is one)")
    add(
        "--compile",
        action="store_true",
        help="compile the updates (torch.compile): some time at the start, then faster",
    )
    add("--save", type=Path, metavar="FILE", help="write the trained model there")
    add(
        "--checkpoints", type=Path, metavar="FOLDER", help="save there again and again; a folder for this training only"
    )
    add("--checkpoint-every", type=int, default=10, metavar="N", help="updates between checkpoints (default: 10)")
    add("--resume", action="store_true", help="go on from the newest of --checkpoints; begin where there is none")
    add("--tensorboard", type=Path, metavar="FOLDER", help="log TensorBoard runs there")
    add("--run-name", metavar="NAME", help="name of the TensorBoard run (default: the algorithm's)")
    add("--log-interval", type=int, default=10, metavar="N", help="updates between logs (default: 10)")
    add("--progress", action="store_true", help="show a progress bar")
    add("--quiet", action="store_true", help="print no tables")
    options = parser.parse_args(arguments)
    if options.algorithm not in ALGORITHMS:
        parser.error(f"unknown algorithm {options.algorithm!r}; there are: {', '.join(ALGORITHMS)}")
    if options.resume and options.checkpoints is None:
        parser.error("--resume goes on from the newest checkpoint: name their folder with --checkpoints")
    for name in ("timesteps", "checkpoint_every", "log_interval"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    try:
        options.env_args = _named(options.env_args)
        options.args = _named(options.args)
        options.policy_args = {name: _class(value) for name, value in _named(options.policy_args).items()}
        _check_names(ALGORITHMS[options.algorithm], options.args)
    except UsageError as error:
        parser.error(str(error))
    return options


def _count(text: str) -> int:
    value = float(text)
    if value != int(value):
        raise ValueError(text)
    return int(value)


def _named(pairs: Sequence[str]) -> dict[str, Any]:
    """``NAME=VALUE`` words as a dictionary."""
    values: dict[str, Any] = {}
    for pair in pairs:
        name, equals, text = pair.partition("=")
        if not (name and equals):
            raise UsageError(f"expected NAME=VALUE, got {pair!r}")
        values[name] = read_value(text)
    return values


def _class(value: Any) -> Any:
    """The class that ``module:Name`` names; other values as they are."""
    if not (isinstance(value, str) and re.fullmatch(r"\w+(\.\w+)*:\w+", value)):
        return value
    module, _, name = value.partition(":")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{value!r} names nothing: {error}") from error


def _check_names(algorithm: type[GroupAlgorithm], given: dict[str, Any]) -> None:
    known = {
        name
        for cls in algorithm.__mro__
        if issubclass(cls, GroupAlgorithm)
        for name, parameter in inspect.signature(cls.__init__).parameters.items()
        if parameter.kind is parameter.POSITIONAL_OR_KEYWORD and name not in ("self", "_init_setup_model")
    }
    for name in given:
        if name in OWN_OPTIONS:
            option = {"tensorboard_log": "tensorboard", "verbose": "quiet", "policy_kwargs": "policy-args"}
            raise UsageError(
                f"{name} is no argument for --args: use {'' if name == 'env' else '--'}{option.get(name, name)}"
            )
        if name not in known:
            names = ", ".join(sorted(known - set(OWN_OPTIONS)))
            raise UsageError(f"{algorithm.__name__} has no argument {name!r}; it has: {names}")


def make_env(options: argparse.Namespace, device: str) -> Any:
    """The environment, on the training device where it is one of this package's."""
    import gymnasium as gym

    from tpo_gym.agents.env_setup import is_ours

    arguments = dict(options.env_args)
    if device != "cpu" and is_ours(options.env):
        arguments.setdefault("device", device)
    # An id rather than an environment where there is nothing to pass: such copies need not be copyable.
    return gym.make(options.env, **arguments) if arguments else options.env


def make_model(options: argparse.Namespace, device: str, verbose: int) -> tuple[GroupAlgorithm, bool]:
    """The model that the command line describes; whether it is the newest checkpoint rather than a new one.

    Raises:
        UsageError: If that cannot be made.
    """
    import gymnasium as gym
    from stable_baselines3.common.utils import get_device

    algorithm = ALGORITHMS[options.algorithm]
    try:
        env = make_env(options, str(get_device(device)))
        if options.resume and options.checkpoints.is_dir() and any(options.checkpoints.glob("*.zip")):
            model = algorithm.resume(options.checkpoints, env=env, device=device, verbose=verbose)
            _check_same(model, options)
            return model, True
        model = algorithm(
            options.policy,
            env,
            seed=options.seed,
            device=device,
            tensorboard_log=None if options.tensorboard is None else str(options.tensorboard),
            policy_kwargs=options.policy_args or None,
            verbose=verbose,
            **options.args,
        )
        return model, False
    except (ValueError, TypeError, OSError, ImportError, RuntimeError, gym.error.Error) as error:
        raise UsageError(str(error)) from error


def _check_same(model: GroupAlgorithm, options: argparse.Namespace) -> None:
    """A resumed training has the arguments that it began with: refuse others instead of ignoring them."""
    given = {**options.args, **({} if options.seed is None else {"seed": options.seed})}
    for name, value in given.items():
        stored = getattr(model, name, value)
        if value != "auto" and not callable(stored) and stored != value:
            raise UsageError(
                f"the checkpoints in {options.checkpoints} are of a training with {name}={stored!r}, not {value!r}: "
                "repeat its command, or begin anew with another folder"
            )


def train(options: argparse.Namespace) -> GroupAlgorithm:
    """Train as the command line asks, together with other processes where ``torchrun`` started several.

    Raises:
        UsageError: If that cannot be done.
    """
    from tpo_gym.agents.distributed import CannotShare, distribute, join, leave

    device, together = options.device, int(os.environ.get("WORLD_SIZE", "1")) > 1
    first = os.environ.get("RANK", "0") == "0"
    if together:
        device = join(device)
    model, resumed = make_model(options, device, 0 if options.quiet or not first else 1)
    if options.compile:
        model.compile()
    if together:
        distribute(model)
    callback = None
    if options.checkpoints is not None:
        callback = ResumeCallback(options.checkpoints, every=options.checkpoint_every)
    remaining = options.timesteps - model.num_timesteps
    if remaining > 0:
        try:
            model.learn(
                remaining,
                callback=callback,
                log_interval=options.log_interval,
                tb_log_name=options.run_name,
                reset_num_timesteps=not resumed,
                progress_bar=options.progress and first,
            )
        except CannotShare as error:
            raise UsageError(str(error)) from error
    if options.save is not None:
        model.save(options.save)
    if together:
        leave()
    return model


def main(arguments: Sequence[str] | None = None) -> int:
    """Train; returns the exit status."""
    options = parse(arguments)
    first = os.environ.get("RANK", "0") == "0"
    try:
        model = train(options)
    except UsageError as error:
        if first:
            print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        if first:
            again = "" if options.checkpoints is None else " The same command with --resume goes on."
            print(f"Stopped.{again}", file=sys.stderr)
        return 130
    if first:
        print(_summary(model, options))
    return 0


def _summary(model: GroupAlgorithm, options: argparse.Namespace) -> str:
    words = [
        f"{options.algorithm} on {options.env}: {model.num_timesteps:,} interactions, {model._n_updates:,} updates"
    ]
    if model.ep_info_buffer:
        returns = [info["r"] for info in model.ep_info_buffer]
        words.append(f"mean return of the last {len(returns)} episodes {sum(returns) / len(returns):.3g}")
    if options.save is not None:
        words.append(f"saved to {options.save}")
    return "; ".join(words) + "."


if __name__ == "__main__":
    sys.exit(main())
