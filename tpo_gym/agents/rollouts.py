"""What a rollout batch holds: groups of candidates, frozen from sampling to the last epoch."""

from __future__ import annotations

from dataclasses import dataclass, field, fields, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

Observations = Tensor | dict[str, Tensor]


def index_observations(observations: Observations, rows: Tensor) -> Observations:
    """The given rows of a batch of observations."""
    if isinstance(observations, dict):
        return {key: value[rows] for key, value in observations.items()}
    return observations[rows]


def mask_argument(action_masks: Tensor | None, rows: Tensor | None = None) -> dict[str, Tensor]:
    """The argument ``action_masks`` of a policy's methods, left out where there are none."""
    if action_masks is None:
        return {}
    return {"action_masks": action_masks if rows is None else action_masks[rows]}


def sum_of_steps(step_log_probs: Tensor) -> Tensor:
    """Log-probabilities of candidates ``(B, K)`` from those of their decisions ``(B, K, T)``."""
    return step_log_probs.squeeze(-1) if step_log_probs.shape[-1] == 1 else step_log_probs.sum(-1)


class Evaluation(NamedTuple):
    """The current policy on the candidates of ``b`` groups."""

    step_log_probs: Tensor
    """Log-probability of each decision, ``(b, K, T)``; 0 after a candidate's end."""
    entropy: Tensor
    """Mean entropy of the policy at the visited states, a scalar."""

    @property
    def log_probs(self) -> Tensor:
        """Log-probability of each candidate: the sum over its decisions, ``(b, K)``."""
        return sum_of_steps(self.step_log_probs)


class Candidates(Protocol):
    """Candidates that a policy can evaluate again. A *unit* is what cannot be computed apart: one or several groups."""

    @property
    def n_units(self) -> int: ...

    @property
    def groups_per_unit(self) -> int: ...

    @property
    def group_size(self) -> int: ...

    def evaluate(self, policy: Any, units: Tensor | None = None) -> Evaluation:
        """Evaluate the groups of the given units (all: ``None``), in order."""
        ...


@dataclass(frozen=True)
class EpisodeCandidates:
    """Whole episodes: ``index[b, k, t]`` is the row of ``observations`` and ``actions`` where a decision lies."""

    observations: Observations
    actions: Tensor
    index: Tensor  # (B, K, T) int64
    mask: Tensor | None  # (B, K, T) bool; None when all episodes have T steps
    groups_per_unit: int = 1
    action_masks: Tensor | None = None  # allowed actions of each row of observations

    @property
    def n_units(self) -> int:
        return self.index.shape[0]

    @property
    def group_size(self) -> int:
        return self.index.shape[1]

    def evaluate(self, policy: Any, units: Tensor | None = None) -> Evaluation:
        index = self.index if units is None else self.index[units]
        mask = self.mask if units is None or self.mask is None else self.mask[units]
        rows = index.flatten() if mask is None else index[mask]
        log_probs, entropy = policy.evaluate_actions(
            index_observations(self.observations, rows), self.actions[rows], **mask_argument(self.action_masks, rows)
        )
        if mask is None:
            return Evaluation(log_probs.view(index.shape), entropy.mean())
        filled = torch.zeros(index.shape, dtype=log_probs.dtype, device=log_probs.device)
        return Evaluation(filled.masked_scatter(mask, log_probs), entropy.mean())

    def part(self, start: int, stop: int) -> EpisodeCandidates:
        """The candidates ``start`` to ``stop`` of every group."""
        mask = None if self.mask is None else self.mask[:, start:stop]
        return replace(self, index=self.index[:, start:stop], mask=mask)


@dataclass(frozen=True)
class StateCandidates:
    """Single actions at a state: ``actions`` ``(B, K, ...)``, or ``None`` for every action of a Discrete space."""

    observations: Observations
    actions: Tensor | None
    n_units: int
    group_size: int
    groups_per_unit: int = 1
    action_masks: Tensor | None = None  # allowed actions at each state

    def evaluate(self, policy: Any, units: Tensor | None = None) -> Evaluation:
        observations = self.observations if units is None else index_observations(self.observations, units)
        masks = mask_argument(self.action_masks, units)
        if self.actions is None:
            log_probs = policy.all_log_probs(observations, **masks)
            entropy = _entropy(log_probs)
        else:
            actions = self.actions if units is None else self.actions[units]
            log_probs, entropy = policy.candidate_log_probs(observations, actions, **masks)
        return Evaluation(log_probs.unsqueeze(-1), entropy.mean())


@dataclass(frozen=True)
class SequenceCandidates:
    """Whole completions ``tokens`` ``(B, K, H)`` of ``prompts`` ``(B, H)``."""

    prompts: Tensor
    tokens: Tensor
    groups_per_unit: int = 1
    _shared: list[Any] = field(default_factory=list, repr=False, compare=False)  # made once for all epochs

    @property
    def n_units(self) -> int:
        return self.tokens.shape[0]

    @property
    def group_size(self) -> int:
        return self.tokens.shape[1]

    def evaluate(self, policy: Any, units: Tensor | None = None) -> Evaluation:
        prompts, tokens, shared = self.prompts, self.tokens, None
        if units is None:
            if not self._shared:
                self._shared.append(policy.shared_prefixes(prompts, tokens))
            shared = self._shared[0]
        else:  # in parts, to save memory
            prompts, tokens = prompts[units], tokens[units]
        log_probs = policy.sequence_log_probs(prompts, tokens, shared)
        return Evaluation(log_probs.gather(-1, tokens.unsqueeze(-1)).squeeze(-1), _entropy(log_probs))

    def part(self, start: int, stop: int) -> SequenceCandidates:
        """The candidates ``start`` to ``stop`` of every group."""
        return replace(self, tokens=self.tokens[:, start:stop], _shared=[])


@dataclass(frozen=True)
class TokenCandidates:
    """Next tokens at every state of one completion per prompt: a unit is a prompt, its ``H`` states are groups.

    ``prompts`` ``(B, H)``, executed ``tokens`` ``(B, H)``, ``candidates`` ``(B, H, K)``. One causal pass holds all the
    states of a trajectory.
    """

    prompts: Tensor
    tokens: Tensor
    candidates: Tensor

    @property
    def n_units(self) -> int:
        return self.tokens.shape[0]

    @property
    def groups_per_unit(self) -> int:
        return self.tokens.shape[1]

    @property
    def group_size(self) -> int:
        return self.candidates.shape[2]

    def evaluate(self, policy: Any, units: Tensor | None = None) -> Evaluation:
        prompts, tokens, candidates = self.prompts, self.tokens, self.candidates
        if units is not None:
            prompts, tokens, candidates = prompts[units], tokens[units], candidates[units]
        log_probs = policy.sequence_log_probs(prompts, tokens.unsqueeze(1)).squeeze(1)  # (b, H, V)
        chosen = log_probs.gather(-1, candidates)
        return Evaluation(chosen.flatten(0, 1).unsqueeze(-1), _entropy(log_probs))


def _entropy(log_probs: Tensor) -> Tensor:
    return -(log_probs.exp() * log_probs).sum(-1).mean()


@dataclass(frozen=True)
class GroupRollout:
    """``B`` groups of ``K`` candidates of one rollout batch, on the training device. Training changes nothing here."""

    candidates: Candidates
    old_step_log_probs: Tensor
    """Log-probability of each decision when it was sampled, ``(B, K, T)``; 0 after a candidate's end."""
    scores: Tensor
    """``(B, K)``."""
    returns: Tensor
    """Returns of the episodes that the batch ran, in the environment's own scale, ``(E,)``."""
    step_rewards: Tensor | None = None
    """Reward of each decision, ``(B, K, T)``, where candidates are episodes."""
    mask: Tensor | None = None
    """Which decisions exist, bool ``(B, K, T)``; ``None``: all of them."""
    behaviour: Tensor | None = None
    """The sampled action's index in the group, ``(B,)``, where the group holds every action."""
    probabilities: Tensor | None = None
    """Probability of sampling each candidate, ``(B, K)``, where the batch is an exact expectation over them."""
    labels: Tensor | None = None
    """The right action of each context, ``(B,)``, where the algorithm reads it."""
    share: Tensor | float = 1.0
    """Fraction of the whole batch's decisions that these are, where several processes share it."""
    old_log_probs: Tensor = field(init=False)
    """Log-probability of each candidate when it was sampled, ``(B, K)``."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "old_log_probs", sum_of_steps(self.old_step_log_probs))

    @property
    def lengths(self) -> Tensor:
        """Decisions of each candidate, ``(B, K)``."""
        if self.mask is not None:
            return self.mask.sum(-1)
        return torch.full(self.scores.shape, self.old_step_log_probs.shape[-1], device=self.scores.device)

    @property
    def voters(self) -> Tensor | None:
        """Candidates that count, bool ``(B, K)``: of all actions those that masks allow; ``None``: everyone."""
        candidates = self.candidates
        all_actions = isinstance(candidates, StateCandidates) and candidates.actions is None
        return candidates.action_masks if all_actions else None  # type: ignore[attr-defined]

    @property
    def n_groups(self) -> int:
        """Number of groups ``B``."""
        return self.scores.shape[0]

    @property
    def group_size(self) -> int:
        """Candidates per group ``K``."""
        return self.scores.shape[1]

    def groups_of(self, tensor: Tensor, units: Tensor | None) -> Tensor:
        """Rows of a ``(B, ...)`` tensor that belong to the given units of the candidates."""
        if units is None:
            return tensor
        per_unit = self.candidates.groups_per_unit
        return tensor.unflatten(0, (-1, per_unit))[units].flatten(0, 1)


def tensors_of(rollout: GroupRollout) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a rollout batch and of its candidates, by their names."""

    def of(part: Any) -> dict[str, Tensor]:
        return {f.name: v for f in fields(part) if f.init and isinstance(v := getattr(part, f.name), Tensor)}

    return of(rollout), of(rollout.candidates)


def with_tensors(template: GroupRollout, own: dict[str, Tensor], candidates: dict[str, Tensor]) -> GroupRollout:
    """A rollout batch like ``template`` with these tensors: see :func:`tensors_of`."""
    kind: Any = type(template.candidates)
    # Made anew rather than by `replace`, because a batch of sequences remembers what it computed.
    constants = {f.name: getattr(template.candidates, f.name) for f in fields(kind) if not f.name.startswith("_")}
    return replace(template, **own, candidates=kind(**{**constants, **candidates}))


def check_scores(scores: Tensor) -> None:
    """Refuse scores that are not finite: one of them would spoil its group, and the run would go on.

    Raises:
        ValueError: Naming the first context and candidate.
    """
    finite = torch.isfinite(scores)
    if bool(finite.all()):
        return
    context, candidate = (int(i) for i in (~finite).nonzero()[0])
    raise ValueError(
        f"The score of candidate {candidate} of context {context} is {float(scores[context, candidate])} "
        f"({int((~finite).sum())} of {scores.numel()} scores are not finite). Mend the environment's reward: "
        "a group's scores are standardized together, so one bad score would spoil all of them."
    )
