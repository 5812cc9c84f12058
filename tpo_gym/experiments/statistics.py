"""Curves of several seeds, and what is compared with the paper's numbers: estimates, intervals, verdicts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tpo_gym.experiments.experiment import Cell, Claim
from tpo_gym.experiments.run import load
from tpo_gym.experiments.settings import finished_seeds, run_folder

RESAMPLES = 2000
LEVEL = 0.95
Array = NDArray[np.float64]


@dataclass(frozen=True)
class Curves:
    """The finished runs of a cell."""

    x: Array
    """Updates at which the metrics were measured, ``(points,)``."""
    metrics: dict[str, Array]
    """``(seeds, points)``, or with a further dimension."""
    seeds: list[int]
    seconds: list[float]

    def mean_and_error(self, metric: str) -> tuple[Array, Array]:
        """Mean over seeds and its standard error (0 for one seed)."""
        values = self.metrics[metric]
        error = values.std(0, ddof=1) / np.sqrt(len(values)) if len(values) > 1 else np.zeros_like(values[0])
        return values.mean(0), error


@dataclass(frozen=True)
class Estimate:
    """A number about the mean over seeds."""

    value: float
    low: float
    high: float
    """Ends of the 95 % percentile-bootstrap interval over seeds; NaN with a single seed."""
    n_seeds: int
    robust: float = float("nan")
    """Interquartile mean over seeds, of values that each seed has by itself."""


def load_cell(out: Path, cell: Cell) -> Curves | None:
    """All finished runs with the cell's settings; ``None`` if there is none."""
    seeds = finished_seeds(out, cell.settings)
    if not seeds:
        return None
    runs = [load(run_folder(out, cell.settings, seed)) for seed in seeds]
    names = [name for name in runs[0][0] if name != "x"]
    metrics = {name: np.stack([curves[name] for curves, _ in runs]).astype(np.float64) for name in names}
    return Curves(runs[0][0]["x"], metrics, seeds, [facts["wall_seconds"] for _, facts in runs])


def first_at_most(x: Array, curve: Array, limit: float) -> float:
    """First ``x`` at which the curve is at most ``limit``; infinity if it never is."""
    reached = np.flatnonzero(curve <= limit)
    return float(x[reached[0]]) if reached.size else float("inf")


def estimate(curves: Curves, claim: Claim) -> Estimate:
    """What our runs give for a claim of the paper.

    Raises:
        KeyError: If the metric was not recorded.
    """
    from scipy import stats  # type: ignore[import-untyped]

    values = curves.metrics[claim.metric]
    if values.ndim == 3:
        values = values[:, :, -1]
    n_seeds = len(values)
    never = float(curves.x[-1]) * 2  # the bootstrap cannot count with infinity

    def statistic(rows: NDArray[np.integer]) -> float:
        chosen = values[rows]
        if claim.statistic == "steps":
            return min(first_at_most(curves.x, chosen.mean(0), claim.where), never)
        return float(chosen[:, _point(curves.x, claim)].mean())

    rows = np.arange(n_seeds)
    value, low, high, robust = statistic(rows), float("nan"), float("nan"), float("nan")
    if n_seeds > 1:
        interval = stats.bootstrap(
            (rows,), statistic, vectorized=False, n_resamples=RESAMPLES, confidence_level=LEVEL, method="percentile",
            rng=np.random.default_rng(0),
        ).confidence_interval  # fmt: skip
        low, high = float(interval.low), float(interval.high)
    if claim.statistic != "steps":
        robust = float(stats.trim_mean(values[:, _point(curves.x, claim)], 0.25))
    value, low, high = (float("inf") if number >= never else number for number in (value, low, high))
    return Estimate(value, low, high, n_seeds, robust)


def _point(x: Array, claim: Claim) -> int:
    return -1 if claim.statistic == "final" else int(np.abs(x - claim.where).argmin())


def is_inside(claim: Claim, ours: Estimate) -> bool:
    """Whether the paper's number lies in our interval, or our interval reaches the side that its bound allows."""
    if ours.n_seeds < 2:
        return False
    if claim.relation == "=":
        return bool(ours.low <= claim.value <= ours.high)
    return bool(ours.low <= claim.value if claim.relation == "<" else ours.high >= claim.value)


def rivals(claim: Claim, claims: Sequence[Claim]) -> list[Claim]:
    """Claims to keep an order with: of other methods on the same panel, or of the same method on other panels."""
    same = [c for c in claims if (c.statistic, c.metric, c.where) == (claim.statistic, claim.metric, claim.where)]
    others = [c for c in same if c.panel == claim.panel and c.method != claim.method]
    return others or [c for c in same if c.method == claim.method and c.panel != claim.panel]


def keeps_order(claim: Claim, estimates: Mapping[Claim, Estimate], claims: Sequence[Claim]) -> bool | None:
    """Whether our values stand on the same side of each rival's as the paper's; ``None`` where there is none."""
    verdicts = []
    for rival in rivals(claim, claims):
        if rival not in estimates or rival.value == claim.value:
            continue
        ours, other = estimates[claim].value, estimates[rival].value
        verdicts.append(ours <= other if claim.value < rival.value else ours >= other)
    return all(verdicts) if verdicts else None


def verdict(claim: Claim, estimates: Mapping[Claim, Estimate], claims: Sequence[Claim], same_size: bool) -> str:
    """``inside``, ``ordering kept`` or ``not``.

    Args:
        claim: The paper's number.
        estimates: Ours, by claim.
        claims: All claims of the experiment.
        same_size: Whether our runs have the paper's size; else only the ordering is judged.
    """
    if same_size and is_inside(claim, estimates[claim]):
        return "inside"
    kept = keeps_order(claim, estimates, claims)
    if kept is None:
        return "not" if same_size and estimates[claim].n_seeds > 1 else "-"
    return "ordering kept" if kept else "not"
