"""What a run depends on, as data: its digest names the folder where the run is kept."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from tpo_gym.values import read_value

FORMATS = {"TransformerPolicy": 2}
"""By policy (1 where it is not named): raised when the same settings begin to mean something else, so that old runs are
not mixed with new ones. 2: the reference's optimizer in every detail."""

Changes = Mapping[str, Any]
"""Fields of :class:`Settings` to replace; dictionaries are merged into the present ones."""


@dataclass(frozen=True)
class Settings:
    """Everything a run depends on, beside its seed. Plain values only."""

    task: str
    """Environment ``tpo_gym/{task}-v0``."""
    algorithm: str
    """Class of ``tpo_gym.agents``."""
    updates: int
    """Rollout batches, each with its epochs ("episodes" in the paper)."""
    batch: int = 100
    """Contexts per rollout batch."""
    group_size: int = 1
    """Candidates per context, ``K``; 1 for single-sample methods."""
    epochs: int = 1
    candidates: str = "episodes"
    learning_rate: float = 1e-3
    decay: bool = False
    """Let the learning rate fall linearly to 0 over the run."""
    policy: str = "TransformerPolicy"
    record: str = "rollouts"
    """What is measured: see ``tpo_gym.experiments.record``."""
    evaluate_every: int = 1
    """Updates between measurements, where they are not taken from the rollout batches themselves."""
    env: dict[str, Any] = field(default_factory=dict)
    """Arguments of the environment."""
    arguments: dict[str, Any] = field(default_factory=dict)
    """Further arguments of the algorithm."""
    policy_arguments: dict[str, Any] = field(default_factory=dict)
    """Arguments of the policy; ``optimizer_class`` by name."""

    def change(self, changes: Changes) -> Settings:
        """These settings with some of them changed.

        Raises:
            ValueError: For a name that is no field.
        """
        unknown = set(changes) - {item.name for item in fields(self)}
        if unknown:
            raise ValueError(f"No such settings: {sorted(unknown)}.")
        merged: dict[str, Any] = {
            name: {**getattr(self, name), **value} if isinstance(value, Mapping) else value
            for name, value in changes.items()
        }
        return replace(self, **merged)

    @property
    def digest(self) -> str:
        """Ten hexadecimal digits that change with any setting."""
        text = json.dumps([FORMATS.get(self.policy, 1), asdict(self)], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:10]

    @property
    def folder(self) -> str:
        """Name of the folder of these runs: the main settings to read, and the digest."""
        length = self.env.get("sequence_length")
        size = f"H{length}-V{self.env['vocab_size']}-{self.env['reward']}" if length else ""
        group = f"K{self.group_size}" if self.group_size > 1 else ""
        words = [self.task, size, self.algorithm, group, f"B{self.batch}", f"T{self.updates}", self.digest]
        return "-".join(word for word in words if word)


def run_folder(out: Path, settings: Settings, seed: int) -> Path:
    """Where a run is kept."""
    return out / "runs" / settings.folder / f"seed-{seed}"


def is_finished(folder: Path) -> bool:
    """Whether the run ended; a run that was interrupted begins anew."""
    return (folder / "settings.json").exists()


def finished_seeds(out: Path, settings: Settings) -> list[int]:
    """Seeds of all runs with these settings that ended."""
    folders = (out / "runs" / settings.folder).glob("seed-*")
    return sorted(int(folder.name.removeprefix("seed-")) for folder in folders if is_finished(folder))


def parse_override(text: str, settings: Settings) -> Changes:
    """``name=value`` from the command line as changes. ``name`` is a field, or an entry of one of the dictionaries.

    Raises:
        ValueError: If there is no such setting, or the text has another form.
    """
    name, found, value_text = text.partition("=")
    if not found:
        raise ValueError(f"Expected name=value, got {text!r}.")
    value = read_value(value_text)
    group, _, entry = name.rpartition(".")
    dictionaries = ("env", "arguments", "policy_arguments")
    if group in dictionaries:
        return {group: {entry: value}}
    if name in {item.name for item in fields(settings)} - set(dictionaries):
        return {name: value}
    for group in dictionaries:
        if name in getattr(settings, group):
            return {group: {name: value}}
    names = [item.name for item in fields(settings) if item.name not in dictionaries]
    names += [name for group in dictionaries for name in getattr(settings, group)]
    raise ValueError(f"There is no setting {name!r} here. There are: {', '.join(names)}.")
