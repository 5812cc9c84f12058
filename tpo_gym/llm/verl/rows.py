"""From verl's rows to groups of candidates and back: plain tensors, no verl.

verl stores one row per output of a rollout, under the key ``{prompt}_{session}_{index}``, and reorders rows to balance
its processes. The candidates of a prompt are its sessions: most have one output, those of an agent that starts over
may have several, and then the candidate's log-probability is the sum over all of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tpo_gym.llm.weights import WeightOptions, candidate_weights

__all__ = ["RowAdvantages", "row_advantages"]


class RowAdvantages(NamedTuple):
    """The result of :func:`row_advantages`: ``advantages`` ``(N, T)`` and ``metrics``, numbers for a log."""

    advantages: Tensor
    metrics: dict[str, float]


class _Places(NamedTuple):
    """Where rows belong: ``slot`` of each row's candidate, and the row that holds each candidate's score."""

    slot: list[int]
    last: list[int]
    groups: int
    size: int


def row_advantages(
    keys: Sequence[str],
    log_probs: Tensor,
    old_log_probs: Tensor,
    response_mask: Tensor,
    scores: Tensor,
    options: WeightOptions | None = None,
) -> RowAdvantages:
    """What verl multiplies each token's log-probability with, so that its step is that of the objective.

    With a loss that adds up ``-advantage * log π`` over a row's tokens and divides by ``N`` rows, in any split of them,
    the gradient is that of the objective's mean over groups. For ``G`` whole groups of ``K`` candidates with one row
    each, and ``options.method="target_po"``, the advantage is ``K (q - p)``. Source: *Target Policy Optimization*,
    arXiv 2604.06159, section 2, through :func:`~tpo_gym.llm.weights.candidate_weights`.

    Rows without a token of the model's own (verl's padding, failed rollouts) have no weight and no vote; groups may
    miss candidates.

    Args:
        keys: Of each row, ``{prompt}_{session}_{index}``.
        log_probs: ``(N, T)`` log-probabilities of the tokens now.
        old_log_probs: The same at sampling.
        response_mask: ``(N, T)``, not 0 for the tokens that the model generated itself.
        scores: ``(N,)``. A candidate with several rows has the score of its last one, as in verl's GRPO.
        options: The objective; ``None``: ``WeightOptions()``.

    Returns:
        Advantages, constant over a row's tokens and 0 elsewhere, in ``log_probs``' type, and the metrics of
        :func:`~tpo_gym.llm.weights.candidate_weights` as numbers, without ``tv`` where no group is active.

    Raises:
        ValueError: For a key that cannot be read, or a value that is not finite.
    """
    places = _places(keys)
    mask = response_mask.bool()
    slot = torch.tensor(places.slot, device=log_probs.device)
    last = torch.tensor(places.last, device=log_probs.device)

    def by_candidate(rows: Tensor) -> Tensor:
        flat = rows.new_zeros(places.groups * places.size)
        return flat.index_add(0, slot, rows).view(places.groups, places.size)

    def sums(tokens: Tensor) -> Tensor:
        return by_candidate(tokens.double().masked_fill(~mask, 0.0).sum(-1))

    lengths = by_candidate(mask.sum(-1))
    score = torch.zeros(places.groups * places.size, dtype=torch.float64, device=log_probs.device)
    score[slot[last]] = scores[last].double()
    counted = lengths > 0
    whole = counted.any(-1)
    weights = torch.zeros_like(lengths, dtype=torch.float64)
    metrics: dict[str, float] = {}
    if bool(whole.any()):
        result = candidate_weights(
            sums(log_probs)[whole],
            sums(old_log_probs)[whole],
            score.view_as(weights)[whole],
            options,
            lengths=lengths[whole].clamp(min=1),
            mask=counted[whole],
        )
        weights[whole] = result.weights
        metrics = {name: float(value) for name, value in result.metrics.items()}
        if metrics["active_groups"] == 0:
            metrics.pop("tv", None)  # a mean over no groups
    advantages = (len(keys) * weights.flatten()[slot]).to(log_probs.dtype)
    return RowAdvantages(advantages.unsqueeze(-1) * mask, metrics)


def _places(keys: Sequence[str]) -> _Places:
    groups: dict[str, dict[str, list[tuple[int, int]]]] = {}
    for row, key in enumerate(keys):
        prompt, *rest = key.rsplit("_", 2)
        if len(rest) != 2 or not rest[1].isdecimal():
            raise ValueError(f"The key {key!r} of row {row} is not of the form prompt_session_index.")
        groups.setdefault(prompt, {}).setdefault(rest[0], []).append((int(rest[1]), row))
    size = max(2, *(len(sessions) for sessions in groups.values()))  # an objective compares two at least
    slot, last = [0] * len(keys), []
    for group, sessions in enumerate(groups.values()):
        for place, outputs in enumerate(sessions.values()):
            last.append(max(outputs)[1])
            for _, row in outputs:
                slot[row] = group * size + place
    return _Places(slot, last, len(groups), size)
