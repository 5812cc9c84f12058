"""One run: carried out once, kept in a folder of its own with everything that is needed to judge it."""

from __future__ import annotations

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback, CallbackList

from tpo_gym import __version__
from tpo_gym.agents import train_seeds
from tpo_gym.experiments.build import algorithm_arguments, algorithm_class, interactions, make_env, make_model
from tpo_gym.experiments.events import events_logger
from tpo_gym.experiments.record import RECORDERS, Progress, Recorder
from tpo_gym.experiments.record_stacked import AT_ONCE, Together
from tpo_gym.experiments.settings import Settings

LOG_ENTRIES = 100
TABLE_LOG_ENTRIES = 25
"""TensorBoard entries per run, and per run of a table: there are many, and an update takes less time than an entry."""


class Stopped(Exception):
    """The run was asked to end early; nothing is kept of it."""


def carry_out(settings: Settings, seed: int, folder: Path, device: str, progress: Progress) -> float:
    """Train, and write ``curves.npz``, ``settings.json`` and TensorBoard events.

    Returns:
        Seconds that it took.

    Raises:
        Stopped: If ``progress`` ended it.
    """
    started = time.perf_counter()
    _clear(folder)
    model = make_model(settings, seed, device)
    model.set_logger(events_logger(folder))
    recorder = RECORDERS[settings.record](settings, progress)
    model.learn(interactions(settings, model), callback=recorder, log_interval=log_interval(settings))
    model.logger.close()
    seconds = time.perf_counter() - started
    keep(settings, recorder.updates, recorder.curves(), recorder.num_timesteps, seed, folder, device, seconds)
    return seconds


def carry_out_together(
    settings: Settings, seeds: Sequence[int], folders: Sequence[Path], device: str, progress: Sequence[Progress]
) -> float:
    """As :func:`carry_out`, for several seeds at once, whose networks are stacked.

    Returns:
        Seconds per seed.

    Raises:
        ValueError: If this training cannot be stacked.
        Stopped: If ``progress`` ended a seed.
    """
    started = time.perf_counter()
    for folder in folders:
        _clear(folder)
    observer: Together | None = None
    recorders: list[Recorder] = []
    watched: dict[str, Any] = {}
    if settings.record in AT_ONCE:
        observer = AT_ONCE[settings.record](settings, folders, progress)
        watched["observer"] = observer
    else:
        recorders = [RECORDERS[settings.record](settings, told) for told in progress]
        lists = [CallbackList([LogTo(folder), own]) for folder, own in zip(folders, recorders, strict=True)]
        watched["callback"] = dict(zip(seeds, lists, strict=True)).get
    models = train_seeds(
        algorithm_class(settings),
        lambda: make_env(settings, device),
        seeds,
        total_timesteps=interactions(settings, make_model(settings, seeds[0], device)),
        log_interval=log_interval(settings),
        backend="stacked",
        **watched,
        **algorithm_arguments(settings, device),
    )
    seconds = (time.perf_counter() - started) / len(seeds)
    for i, (seed, model) in enumerate(zip(seeds, models, strict=True)):
        model.logger.close()
        updates = (observer or recorders[i]).updates
        curves = observer.curves(i) if observer else recorders[i].curves()
        keep(settings, updates, curves, model.num_timesteps, seed, folders[i], device, seconds)
    return seconds


class LogTo(BaseCallback):
    """Sends the logs of a training to TensorBoard events in a folder."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder = folder

    def _init_callback(self) -> None:
        self.model.set_logger(events_logger(self.folder))

    def _on_step(self) -> bool:
        return True


def log_interval(settings: Settings) -> int:
    """Updates between TensorBoard entries."""
    return max(1, settings.updates // (TABLE_LOG_ENTRIES if settings.record == "table" else LOG_ENTRIES))


def _clear(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("events.out.tfevents.*"):
        old.unlink()  # of an interrupted run: TensorBoard would draw both as one


def keep(
    settings: Settings,
    updates: int,
    curves: Mapping[str, np.ndarray],
    interactions: int,
    seed: int,
    folder: Path,
    device: str,
    seconds: float,
) -> None:
    """Write what a complete run leaves.

    Raises:
        Stopped: If it is not complete.
    """
    if updates < settings.updates:
        raise Stopped
    np.savez_compressed(folder / "curves.npz", **curves)  # type: ignore[arg-type]
    facts: dict[str, Any] = {
        "settings": asdict(settings),
        "seed": seed,
        "device": device,
        "wall_seconds": round(seconds, 1),
        "interactions": interactions,
        "versions": versions(),
    }
    partial = folder / "settings.json.partial"
    partial.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, folder / "settings.json")  # its presence says that the run is complete


@cache
def versions() -> dict[str, str]:
    """Versions that a result may depend on."""
    packages = ("torch", "stable-baselines3", "gymnasium", "numpy")
    return {"tpo-gym": __version__, "python": platform.python_version(), **{name: version(name) for name in packages}}


def load(folder: Path) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Curves and facts of a finished run."""
    with np.load(folder / "curves.npz") as curves:
        return dict(curves), json.loads((folder / "settings.json").read_text(encoding="utf-8"))
