"""Collectors: run the policy in an environment and return a :class:`GroupRollout`.

``on_step(step)`` is called once per vector step, as SB3's callbacks expect; collection ends early, with ``None``, where
it returns ``False``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import Tensor

from tpo_gym.agents.actor import log_prob_many, sample_many
from tpo_gym.agents.categorical import sample
from tpo_gym.agents.group_env import BatchedGroupEnv, GroupEnv, Step
from tpo_gym.agents.objectives import one_hot_scores
from tpo_gym.agents.policies import ActorPolicy, TransformerPolicy
from tpo_gym.agents.rollouts import (
    EpisodeCandidates,
    GroupRollout,
    Observations,
    SequenceCandidates,
    StateCandidates,
    TokenCandidates,
    index_observations,
    mask_argument,
)
from tpo_gym.agents.trials import NO_LOOKAHEAD, Lookahead
from tpo_gym.envs.tokens import BatchedTokens

if TYPE_CHECKING:
    from tpo_gym.agents.group_algorithm import GroupAlgorithm

OnStep = Callable[[Step], bool]
Baseline = float | Literal["auto", "expected", "batch"] | None


def collect(
    model: GroupAlgorithm, env: GroupEnv, policy: Any, on_step: OnStep, fused: bool, merge: bool
) -> GroupRollout | None:
    """A rollout batch of the candidates that ``model`` forms its groups of.

    Args:
        model: Whose settings count.
        env: Where to act.
        policy: Who acts.
        on_step: See the module.
        fused: Whether this is a token task and a transformer, which complete whole sequences.
        merge: Whether one constant context's bandit feedback becomes a single group.
    """
    kind, size = model.candidate_set, model.group_size
    if kind == "all_actions":
        return collect_all_actions(env, policy, model.baseline, merge, on_step, model.reads_labels)
    if kind == "exact":
        return collect_exact(env, policy, model.baseline, on_step, model.reads_labels)  # type: ignore[arg-type]
    if kind == "actions":
        if fused:
            return collect_tokens(env, policy, size, on_step)  # type: ignore[arg-type]
        return collect_actions(env, policy, size, on_step, model._lookahead)
    if fused:
        return collect_sequences(env, policy, size, on_step, model.batch_size)  # type: ignore[arg-type]
    return collect_episodes(env, policy, size, on_step)


def _rows(values: Observations, rows: np.ndarray) -> Observations:
    """The rows of the given sub-environments; the values themselves where that is all of them."""
    first = next(iter(values.values())) if isinstance(values, dict) else values
    if len(rows) == len(first):
        return values
    return index_observations(values, torch.as_tensor(rows, device=first.device))


def _stack(observations: Sequence[Observations]) -> Observations:
    """Observations of ``T`` vector steps as rows ``t * n_envs + i``."""
    first = observations[0]
    if isinstance(first, dict):
        return {key: torch.cat([obs[key] for obs in observations]) for key in first}  # type: ignore[index]
    return torch.cat(observations)  # type: ignore[arg-type]


def _by_candidate(steps: list[Tensor], group_size: int) -> Tensor:
    """Per-step values of all sub-environments, each ``(n_envs,)``, as ``(B, K, T)``."""
    return torch.stack(steps, 1).unflatten(0, (-1, group_size))


@torch.no_grad()
def collect_episodes(env: GroupEnv, policy: ActorPolicy, group_size: int, on_step: OnStep) -> GroupRollout | None:
    """``group_size`` full episodes per context, each scored by its return (candidate set "episodes"; TPO, section 2).

    A sub-environment whose episode is over idles until the longest one ends; what it does meanwhile is not scored.
    """
    obs = env.start(group_size)
    running = np.ones(env.num_envs, dtype=bool)
    observations, actions, log_probs, rewards, masks, allowed = [], [], [], [], [], []
    while env.go_on(running):
        action_masks = env.action_masks()
        action, log_prob = policy(obs, **mask_argument(action_masks))
        step = env.step(action)
        rows = np.flatnonzero(running)
        observations.append(_rows(obs, rows))
        actions.append(_rows(action, rows))
        allowed.append(None if action_masks is None else _rows(action_masks, rows))
        log_probs.append(log_prob)
        rewards.append(step.rewards)
        masks.append(running.copy())
        running &= ~step.dones
        obs = step.observations
        if not on_step(step):
            return None
    step_rewards, step_log_probs = _by_candidate(rewards, group_size), _by_candidate(log_probs, group_size)
    kept = np.stack(masks)
    index = torch.as_tensor((kept.cumsum() - 1).reshape(kept.shape).clip(min=0).T, device=step_rewards.device)
    mask = None
    if not kept.all():
        mask = torch.as_tensor(kept.T, device=index.device).unflatten(0, (-1, group_size))
        step_rewards, step_log_probs = step_rewards * mask, step_log_probs * mask
    scores = step_rewards.sum(-1)
    return GroupRollout(
        EpisodeCandidates(
            _stack(observations),
            torch.cat(actions),  # type: ignore[arg-type]
            index.unflatten(0, (-1, group_size)),
            mask,
            action_masks=None if allowed[0] is None else _stack(allowed),  # type: ignore[arg-type]
        ),
        step_log_probs,
        scores,
        returns=scores.flatten(),
        step_rewards=step_rewards,
        mask=mask,
    )


@torch.no_grad()
def collect_sequences(
    env: BatchedGroupEnv, policy: TransformerPolicy, group_size: int, on_step: OnStep, limit: int | None = None
) -> GroupRollout | None:
    """As :func:`collect_episodes`, for token tasks and a transformer: all completions in one cached pass.

    ``limit``: largest number of completions computed at once.
    """
    prompts = env.start(group_size)[::group_size, : policy.layout.sequence_length]
    tokens, log_probs = policy.generate(prompts, group_size, limit=limit)
    tasks = env.env
    assert isinstance(tasks, BatchedTokens)
    rewards, _ = tasks.step_sequences(tokens.flatten(0, 1).to(tasks.device))
    rewards = rewards.to(tokens.device)
    observe = cache(tasks.observations)
    n_steps = rewards.shape[1]
    for t in range(n_steps):
        dones = np.full(env.num_envs, t + 1 == n_steps)
        if not on_step(Step(observe, rewards[:, t], dones, None, env.num_envs)):
            return None
    step_rewards = rewards.unflatten(0, (-1, group_size))
    scores = step_rewards.sum(-1)
    return GroupRollout(
        SequenceCandidates(prompts, tokens), log_probs, scores, returns=scores.flatten(), step_rewards=step_rewards
    )


@torch.no_grad()
def collect_actions(
    env: GroupEnv, policy: ActorPolicy, group_size: int, on_step: OnStep, lookahead: Lookahead = NO_LOOKAHEAD
) -> GroupRollout | None:
    """``group_size`` next actions at every state of one episode per context (candidate set "actions").

    Each is scored at its state without stepping, or on a copy of it; the first one is executed. Groups are ordered by
    step, then context.
    """
    obs: Observations = env.start(1)
    running = np.ones(env.num_envs, dtype=bool)
    returns: Tensor | float = 0.0
    observations, actions, log_probs, scores, allowed = [], [], [], [], []
    while env.go_on(running):
        action_masks = env.action_masks()
        candidates, log_prob = policy.sample_candidates(obs, group_size, **mask_argument(action_masks))
        rows = np.flatnonzero(running)
        observations.append(_rows(obs, rows))
        actions.append(_rows(candidates, rows))
        log_probs.append(_rows(log_prob, rows))
        allowed.append(None if action_masks is None else _rows(action_masks, rows))
        scores.append(env.score_actions(actions[-1], rows, policy, lookahead))  # type: ignore[arg-type]
        step = env.step(candidates[:, 0])
        alive = None if running.all() else torch.as_tensor(running, device=step.rewards.device)
        returns = returns + (step.rewards if alive is None else step.rewards * alive)
        running &= ~step.dones
        obs = step.observations
        if not on_step(step):
            return None
    all_log_probs = torch.cat(log_probs)  # type: ignore[arg-type]
    return GroupRollout(
        StateCandidates(
            _stack(observations),
            torch.cat(actions),  # type: ignore[arg-type]
            len(all_log_probs),
            group_size,
            action_masks=None if allowed[0] is None else _stack(allowed),  # type: ignore[arg-type]
        ),
        all_log_probs.unsqueeze(-1),
        torch.cat(scores),
        returns=returns,  # type: ignore[arg-type]
    )


@torch.no_grad()
def collect_tokens(
    env: BatchedGroupEnv, policy: TransformerPolicy, group_size: int, on_step: OnStep
) -> GroupRollout | None:
    """As :func:`collect_actions`, for token tasks and a transformer: one cached pass along the executed tokens.

    Groups are ordered by prompt, then step.
    """
    prompts = env.start(1)[:, : policy.layout.sequence_length]
    decoder = policy.decoder(prompts)
    candidates, log_probs, scores, rewards = [], [], [], []
    for _ in range(policy.layout.sequence_length):
        distribution = decoder.distribution()
        sampled = sample_many(distribution, group_size)
        candidates.append(sampled)
        log_probs.append(log_prob_many(distribution, sampled))
        scores.append(env.env.score_actions(sampled.to(env.env.device)).to(prompts.device))
        step = env.step(sampled[:, 0])
        rewards.append(step.rewards)
        decoder.append(sampled[:, 0])
        if not on_step(step):
            return None
    chosen = torch.stack(candidates, 1)
    return GroupRollout(
        TokenCandidates(prompts, chosen[:, :, 0], chosen),
        torch.stack(log_probs, 1).flatten(0, 1).unsqueeze(-1),
        torch.stack(scores, 1).flatten(0, 1),
        returns=torch.stack(rewards, 1).sum(1),
    )


def baseline_value(
    baseline: Baseline, probabilities: Tensor, rewards: Tensor, mean: Callable[[Tensor], Tensor] = torch.mean
) -> Tensor:
    """The baseline's value: for every context ``(B,)``, or one for all."""
    if baseline in ("auto", "expected"):
        return probabilities.square().sum(-1)
    return mean(rewards) if baseline == "batch" else rewards.new_tensor(baseline or 0.0)


@torch.no_grad()
def collect_all_actions(
    env: GroupEnv, policy: ActorPolicy, baseline: Baseline, merge: bool, on_step: OnStep, with_labels: bool = False
) -> GroupRollout | None:
    """Bandit feedback: one sampled action per context, every action a candidate (candidate set "all actions").

    The score is the sampled action's advantage ``reward - baseline`` and 0 elsewhere.

    Args:
        env: One-step environment with Discrete actions.
        policy: The policy.
        baseline: A constant; ``"expected"`` (also ``"auto"``): ``Σ_a π(a)²`` (TPO, section 3.3); ``"batch"``: the mean
            reward of the batch; ``None``: nothing.
        merge: All sub-environments share one constant context: average their score vectors into one group
            (TPO, section 3.1).
        on_step: See the module.
        with_labels: Ask the task for the right actions.

    Raises:
        ValueError: If an episode goes on after its first step.
    """
    obs = env.start(1)
    labels = _labels(env) if with_labels else None
    action_masks = env.action_masks()
    log_policy = policy.all_log_probs(obs, **mask_argument(action_masks))
    probabilities = log_policy.exp()
    index = sample(probabilities)
    step = env.step(index + policy.action_start)
    if not step.dones.all():
        raise ValueError(
            'candidates="all_actions" learns from one-step environments (bandits), but episodes went on after the '
            'first step: use candidates="episodes".'
        )
    subtracted = baseline_value(baseline, probabilities, step.rewards, env.mean)
    scores = one_hot_scores(index, step.rewards - subtracted, log_policy.shape[1])
    if not on_step(step):
        return None
    rollout = GroupRollout(
        StateCandidates(obs, None, len(scores), scores.shape[1], action_masks=action_masks),
        log_policy.unsqueeze(-1),
        scores,
        returns=step.rewards,
        behaviour=index,
        labels=labels,
    )
    return merge_contexts(rollout, env.mean) if merge and action_masks is None else rollout


def _labels(env: GroupEnv) -> Tensor:
    assert isinstance(env, BatchedGroupEnv)
    return env.env.labels.to(env.device)  # type: ignore[attr-defined]


def merge_contexts(rollout: GroupRollout, mean: Callable[[Tensor], Tensor]) -> GroupRollout:
    """One group of all groups of a rollout batch of one context: ``mean`` averages their score vectors."""
    states = rollout.candidates
    assert isinstance(states, StateCandidates)
    first = replace(states, observations=states.observations[:1], n_units=1)  # type: ignore[index]
    return replace(
        rollout,
        candidates=first,
        old_step_log_probs=rollout.old_step_log_probs[:1],
        scores=mean(rollout.scores).unsqueeze(0),
        behaviour=None,
    )


@torch.no_grad()
def collect_exact(
    env: BatchedGroupEnv, policy: ActorPolicy, baseline: Baseline, on_step: OnStep, with_labels: bool = False
) -> GroupRollout | None:
    """All contexts of a task and every action with its reward: what sampling would give on average (TPO, section 3.2).

    Objectives of single samples are weighted with ``probabilities``. One action is executed in each context all the
    same, so that interactions are counted as for the other candidate sets.

    Args:
        env: One-step environment with one sub-environment per context.
        policy: The policy.
        baseline: See :func:`collect_all_actions`; ``"batch"``: the mean of the expected rewards.
        on_step: See the module.
        with_labels: Ask the task for the right actions.
    """
    obs = env.start_all()
    labels = _labels(env) if with_labels else None
    log_policy = policy.all_log_probs(obs)
    probabilities = log_policy.exp()
    n_contexts, n_actions = log_policy.shape
    every_action = torch.arange(n_actions, device=env.env.device).expand(n_contexts, -1) + policy.action_start
    rewards = env.env.score_actions(every_action).to(log_policy.device)
    step = env.step(sample(probabilities) + policy.action_start)
    if not on_step(step):
        return None
    returns = (probabilities * rewards).sum(-1)
    return GroupRollout(
        StateCandidates(obs, None, n_contexts, n_actions),
        log_policy.unsqueeze(-1),
        rewards - baseline_value(baseline, probabilities, returns, env.mean).unsqueeze(-1),
        returns=returns,
        probabilities=probabilities,
        labels=labels,
    )
