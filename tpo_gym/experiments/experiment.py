"""What an experiment is: settings that vary, the paper's numbers, figures."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from tpo_gym.experiments.settings import Changes, Settings, parse_override


@dataclass(frozen=True)
class Method:
    """One of the compared methods."""

    label: str
    changes: Changes


@dataclass(frozen=True)
class Panel:
    """One of the tasks or sizes that the methods are compared on."""

    label: str
    changes: Changes = field(default_factory=dict)
    single_sample: Changes = field(default_factory=dict)
    """Changes for methods without groups (interaction matching)."""
    methods: tuple[str, ...] | None = None
    """Labels of the methods that take part; ``None``: all."""


@dataclass(frozen=True)
class Claim:
    """A number of the paper, about a curve's mean over seeds."""

    panel: str
    method: str
    statistic: Literal["final", "steps", "at"]
    """The last value, the updates to a value, or the value at an update."""
    value: float
    """Paper's value: errors as fractions; ``inf``: not reached within the run."""
    relation: Literal["=", "<", ">"] = "="
    """``"<"`` and ``">"``: the paper gives only a bound."""
    metric: str = "error"
    where: float = 0.01
    """``steps``: the value to reach; ``at``: the update."""


@dataclass(frozen=True)
class Figure:
    """A figure of the paper, drawn from the same data."""

    number: str
    kind: Literal["panels", "metrics", "sweep", "bars", "profile"]
    """``panels``: one per panel of the experiment, a curve per method; ``metrics``: one per metric; ``sweep``: curves
    of each method over the panels, and the final values; ``bars``: final values; ``profile``: the last row of a vector
    metric."""
    metrics: tuple[str, ...] = ("error",)
    panels: tuple[str, ...] | None = None
    methods: tuple[str, ...] | None = None
    log: bool = False
    columns: int = 4
    smooth: int = 1
    """Width of a running mean over updates."""
    caption: str = ""
    floor: float = 1e-4
    """Where a log axis ends: with finitely many rollouts smaller errors are mostly zeros."""


@dataclass(frozen=True)
class Experiment:
    """One experiment: all methods on all panels."""

    name: str
    title: str
    section: str
    """Section of the paper; empty for our own."""
    base: Settings
    """What does not vary."""
    methods: tuple[Method, ...]
    seeds: int
    panels: tuple[Panel, ...] = (Panel(""),)
    claims: tuple[Claim, ...] = ()
    figures: tuple[Figure, ...] = ()
    notes: tuple[str, ...] = ()
    """What a reader of the report should know."""
    quick: dict[str, Any] = field(default_factory=dict)
    """Fields of this class to replace at the scale "quick"; ``changes``: changes of all settings."""
    changes: Changes = field(default_factory=dict)
    """Changes that come last."""
    metric_labels: dict[str, str] = field(default_factory=lambda: {"error": "error"})

    def cells(self) -> list[Cell]:
        """Every method on every panel, with its settings."""
        found = []
        for panel in self.panels:
            for method in self.methods:
                if panel.methods is not None and method.label not in panel.methods:
                    continue
                settings = self.base.change(panel.changes).change(method.changes)
                changes = dict(self.changes)
                if settings.group_size == 1:
                    settings = settings.change(panel.single_sample)
                    changes.pop("group_size", None)  # of the methods with groups
                found.append(Cell(panel.label, method.label, settings.change(changes)))
        return found

    def at_quick_scale(self) -> Experiment:
        """The same at a size that takes seconds per run."""
        return replace(self, **self.quick)

    def override(self, texts: Sequence[str]) -> Experiment:
        """With ``name=value`` texts from the command line.

        Panels that give the same setting another value are left out.

        Raises:
            ValueError: For an unknown setting, or where no panel has the value.
        """
        experiment = self
        for text in texts:
            change = parse_override(text, experiment.cells()[0].settings)
            kept = tuple(panel for panel in experiment.panels if not _contradicts(panel.changes, change))
            if not kept:
                raise ValueError(f"{text} leaves no part of {self.name}: {', '.join(p.label for p in self.panels)}.")
            changes = dict(experiment.changes)
            for name, value in change.items():
                changes[name] = {**changes.get(name, {}), **value} if isinstance(value, dict) else value
            experiment = replace(experiment, panels=kept, changes=changes)
        return experiment

    def only(self, methods: Sequence[str] | None = None, panels: Sequence[str] | None = None) -> Experiment:
        """The part with these methods and panels, by label.

        Raises:
            ValueError: Where none is left.
        """
        chosen = tuple(m for m in self.methods if methods is None or m.label in methods)
        kept = tuple(p for p in self.panels if panels is None or p.label in panels)
        if not chosen or not kept:
            raise ValueError(
                f"{self.name} has the methods {', '.join(m.label for m in self.methods)} and the panels "
                f"{', '.join(repr(p.label) for p in self.panels)}."
            )
        return replace(self, methods=chosen, panels=kept)


@dataclass(frozen=True)
class Cell:
    """One method on one panel."""

    panel: str
    method: str
    settings: Settings


def _contradicts(changes: Changes, other: Changes) -> bool:
    for name, value in other.items():
        if isinstance(value, dict):
            if _contradicts(changes.get(name, {}), value):
                return True
        elif name in changes and changes[name] != value:
            return True
    return False


def table(
    panels: Sequence[str], statistic: Literal["final", "steps"], rows: dict[str, Sequence[float | str]], unit: float = 1
) -> tuple[Claim, ...]:
    """Claims of one of the paper's tables.

    Args:
        panels: The columns.
        statistic: See :class:`Claim`.
        rows: Numbers of each method. Texts: ``">95"`` and ``"<2.3"`` are bounds, ``"-"`` is never, ``""`` is nothing.
        unit: What the numbers are multiplied with.
    """
    claims = []
    for method, values in rows.items():
        for panel, value in zip(panels, values, strict=True):
            text = str(value)
            if text == "":
                continue
            relation: Any = text[0] if text[0] in "<>" else "="
            number = float("inf") if text == "-" else float(text.lstrip("<>")) * unit
            claims.append(Claim(panel, method, statistic, number, relation))
    return tuple(claims)
