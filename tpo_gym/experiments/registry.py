"""All experiments by name, in the paper's order."""

from __future__ import annotations

from tpo_gym.experiments import analysis, bandits, tokens
from tpo_gym.experiments.experiment import Experiment

_ORDER = (*bandits.EXPERIMENTS, *tokens.EXPERIMENTS[:-1], *analysis.EXPERIMENTS, tokens.ANCHOR)
EXPERIMENTS: dict[str, Experiment] = {experiment.name: experiment for experiment in _ORDER}
