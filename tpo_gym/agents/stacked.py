"""Many seeds of one training in one process on one device: the networks stacked, everything of a batch at once.

Each seed is an ordinary model with an environment, an optimizer, random numbers and logs of its own, and learns what it
would have learned alone, up to the rounding of sums. They go through the updates together, by means of
:mod:`tpo_gym.agents.stack`: the policies of all seeds act, are evaluated and are differentiated in one vectorized call,
and what an algorithm computes of a rollout batch (``freeze``, ``group_weights``, ``group_losses``, ``diagnostics``) is
called once, vectorized over the seeds, on the first one's model. So these methods must depend on their arguments and on
settings alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, fields, replace
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import MaybeCallback
from torch import Tensor
from torch.func import vmap

from tpo_gym.agents import collectors
from tpo_gym.agents.env_setup import native_env
from tpo_gym.agents.group_algorithm import GroupAlgorithm
from tpo_gym.agents.group_env import Step
from tpo_gym.agents.joint_steps import JointSteps
from tpo_gym.agents.mail import Mail
from tpo_gym.agents.metrics import rollout_metrics
from tpo_gym.agents.resume_state import capture
from tpo_gym.agents.rollouts import GroupRollout, StateCandidates, check_scores
from tpo_gym.agents.sampling_pass import Known
from tpo_gym.agents.stack import JoinedEnv, Networks, SeedNoise, SeedRandom, map_tensors
from tpo_gym.agents.stack_observer import StackObserver
from tpo_gym.agents.stackable import has_one_mode
from tpo_gym.agents.updates import batch_loss

Tensors = tuple[dict[str, Tensor], dict[str, Tensor]]
"""The tensors of a rollout batch and of its candidates, ``(S, ...)``."""


@dataclass(eq=False)
class Run:
    """One seed's model and what belongs to it alone."""

    seed: int
    model: GroupAlgorithm
    random: SeedRandom
    callback: BaseCallback
    watched: bool
    """Whether somebody listens to the callback."""
    stopped: bool = False
    """Whether the callback ended the training."""

    @contextmanager
    def named(self) -> Iterator[None]:
        """Name the seed in errors of its own."""
        try:
            yield
        except (ValueError, FloatingPointError) as error:
            raise type(error)(f"Seed {self.seed}: {error}") from error


class _Logs:
    """A logger that records for all seeds."""

    def __init__(self, runs: Sequence[Run]) -> None:
        self._loggers = [run.model.logger for run in runs]

    def record(self, *args: Any, **kwargs: Any) -> None:
        for logger in self._loggers:
            logger.record(*args, **kwargs)


def _tensors_of(rollout: GroupRollout) -> Tensors:
    def of(part: Any) -> dict[str, Tensor]:
        return {f.name: v for f in fields(part) if f.init and isinstance(v := getattr(part, f.name), Tensor)}

    return of(rollout), of(rollout.candidates)


class Stack:
    """Runs that go through their updates together.

    Args:
        runs: The runs, set up for training.
        observer: Who watches all of them at once.
    """

    def __init__(self, runs: Sequence[Run], observer: StackObserver) -> None:
        self.runs = runs
        self.observer = observer
        models = [run.model for run in runs]
        device = models[0].device
        self.networks = Networks([model.policy for model in models])
        self.env = JoinedEnv([native_env(model.env) for model in models], device)  # type: ignore[misc]
        self._noise = SeedNoise([run.random.generator for run in runs])
        self._steps = JointSteps([model.policy.optimizer for model in models], self.networks)
        self._lead = models[0]
        self._template: GroupRollout | None = None
        self._mail = Mail()
        self._unrecorded: Tensor | None = None
        self._known: Tensor | None = None
        self._watched = any(run.watched for run in runs)
        # A callback may change the policy between sampling and training, and a module what it computes.
        self.networks.keeps_graph = has_one_mode(models[0].policy) and not self._watched and not models[0]._merges
        self._logs = False

    def update(self, log: bool) -> None:
        """Collect a rollout batch of every seed, fit the policies, and write the logs if ``log``."""
        read = log and any(run.model._log_is_read for run in self.runs)
        self._logs = read or self._watched
        self._collect()
        for run in self.runs:
            if not run.stopped:
                run.model._iteration += 1
                run.model._update_current_progress_remaining(run.model.num_timesteps, run.model._total_timesteps)
        if all(run.stopped for run in self.runs):
            return
        self._lead = copy(self._lead_run.model)
        self._lead._logger = _Logs([run for run in self.runs if self._logs and not run.stopped])  # type: ignore
        self._train()
        if log and self._logs:
            self._dump_logs()
        self._mail.deliver()
        for run in self.runs:
            if not run.stopped:
                run.model._updating = False

    def part(self) -> None:
        """Leave every model with what it would have after a single run."""
        self.env.hand_out()
        self.record_episodes()
        self._mail.deliver()
        self._steps.part()
        self.networks.part()

    @property
    def _lead_run(self) -> Run:
        return next(run for run in self.runs if not run.stopped)

    # Collecting.

    def _collect(self) -> None:
        self.networks.set_training_mode(False)
        if self._watched:
            self.env.hand_out([run.watched for run in self.runs])
        for run in self.runs:
            if run.watched:
                with run.random.entered():
                    run.model._boundary = capture(run.model)
                    run.callback.on_rollout_start()
        rewards: list[Tensor] = []

        def on_step(step: Step) -> bool:
            rewards.append(step.rewards)
            for i, run in enumerate(self.runs):
                if not run.stopped:
                    run.model.num_timesteps += step.interactions // len(self.runs)
                    if run.watched:
                        self._call_back(i, step, rewards)
            if not self.observer.goes_on():
                for run in self.runs:
                    run.stopped = True
            return not all(run.stopped for run in self.runs)

        with self._noise:
            rollout = collectors.collect(self._lead, self.env, self.networks, on_step, fused=True, merge=False)
        if rollout is None:
            return
        self._known = self.networks.known(getattr(rollout.candidates, "observations", None))
        self._tensors = self._split(rollout)
        scores = self._tensors[0]["scores"]
        self._mail.post(torch.isfinite(scores).all(), lambda fine: None if fine[0] else self._refuse(scores))
        returns = self._tensors[0]["returns"]
        self._unrecorded = returns[:, -self._lead._stats_window_size :]
        if self._logs or returns.shape[1] < self._lead._stats_window_size:
            self.record_episodes()  # else those of the next batch replace them all
        for i, run in enumerate(self.runs):
            if run.stopped:
                continue
            run.model._last_obs = run.model._last_obs if run.model._last_obs is not None else np.empty(0)
            if run.watched:
                run.model.rollout = self.rollout(i)
                with run.random.entered():
                    run.callback.on_rollout_end()
            run.model._boundary, run.model._updating = None, True
        self.observer.on_rollout_end(self)

    def record_episodes(self) -> None:
        """Put the last episodes where each model keeps them."""
        if self._unrecorded is None:
            return
        count = self._unrecorded.shape[1]

        def record(returns: list[float]) -> None:
            for i, run in enumerate(self.runs):
                if not run.stopped:
                    run.model._record_episodes(returns[i * count : (i + 1) * count])

        self._mail.post(self._unrecorded, record)
        self._unrecorded = None

    def _call_back(self, i: int, step: Step, rewards: list[Tensor]) -> None:
        run, n_rows = self.runs[i], self.env.num_envs // len(self.runs)
        rows = slice(i * n_rows, (i + 1) * n_rows)
        own = Step(lambda: step.observations[rows], step.rewards[rows], step.dones[rows], None, 0)  # type: ignore[index]
        with self._noise.paused(), run.random.entered():
            run.callback.update_locals(run.model._step_locals(own, [values[rows] for values in rewards]))
            run.stopped = not run.callback.on_step()

    def _split(self, rollout: GroupRollout) -> Tensors:
        """The tensors of each seed's part, ``(S, ...)``; what the seeds have in common becomes the template."""
        n, candidates = len(self.runs), rollout.candidates
        tensors: Tensors = map_tensors(lambda value: value.unflatten(0, (n, -1)), _tensors_of(rollout))
        if isinstance(candidates, StateCandidates):
            rollout = replace(rollout, candidates=replace(candidates, n_units=candidates.n_units // n))
        self._template = rollout
        if not (self._lead._merges and self._lead.candidate_set == "all_actions"):
            return tensors
        merged: list[GroupRollout] = []

        def merge(*tensors: Any) -> Tensors:
            merged.append(collectors.merge_contexts(self._rebuild(tensors), lambda values: values.mean(0)))
            return _tensors_of(merged[0])

        tensors = vmap(merge)(*tensors)
        self._template = merged[0]
        return tensors

    def _rebuild(self, tensors: Any) -> GroupRollout:
        """A rollout batch from its tensors."""
        template = self._template
        assert template is not None
        kind: Any = type(template.candidates)
        # Made anew rather than by `replace`, because a batch of sequences remembers what it computed.
        constants = {f.name: getattr(template.candidates, f.name) for f in fields(kind) if not f.name.startswith("_")}
        return replace(template, **tensors[0], candidates=kind(**{**constants, **tensors[1]}))

    def rollout(self, i: int) -> GroupRollout:
        """The last rollout batch of one run."""
        return self._rebuild(map_tensors(itemgetter(i), self._tensors))

    def _refuse(self, scores: Tensor) -> None:
        for run, own in zip(self.runs, scores, strict=True):
            with run.named():
                check_scores(own)

    # Training.

    def _train(self) -> None:
        lead, live = self._lead, [not run.stopped for run in self.runs]
        self.networks.set_training_mode(True)
        follow = self._steps.follow_first
        if follow:
            self._lead_run.model._update_learning_rate(self.runs[0].model.policy.optimizer)
        for i, run in enumerate(self.runs):
            if live[i]:
                if self._logs or not follow:
                    run.model._update_learning_rate(run.model.policy.optimizer)
                if self._logs:
                    run.model.logger.record("train/n_updates", run.model._n_updates, exclude="tensorboard")
                live[i] = not lead.may_skip or run.model.wants_update(self.rollout(i))
        self._frozen = vmap(lambda *tensors: lead.freeze(self._rebuild(tensors)))(*self._tensors)
        for i, run in enumerate(self.runs):
            if run.watched:
                run.model._frozen = map_tensors(itemgetter(i), self._frozen)
        if not any(live):
            return
        weigh = vmap(lambda own, candidates, frozen: lead.group_weights(self._rebuild((own, candidates)), frozen))
        weights = weigh(*self._tensors, self._frozen)
        epochs = [self._epoch(weights, live) for _ in range(lead.n_epochs)]
        means = torch.stack([torch.stack(values).mean(0) for values in zip(*epochs, strict=True)], 1)
        self._mail.post(means, lambda numbers: self._record_training(numbers, live))

    def _record_training(self, means: list[float], live: list[bool]) -> None:
        """Tell each seed that trained its loss, its gradient's norm and its entropy, three numbers per seed."""
        for i, (run, trained) in enumerate(zip(self.runs, live, strict=True)):
            loss, norm, entropy = means[3 * i : 3 * i + 3]
            if trained and (self._logs or not math.isfinite(norm)):
                with run.named():
                    run.model._record_training(loss, norm, entropy)

    def _epoch(self, weights: Tensor, live: list[bool]) -> tuple[Tensor, Tensor, Tensor]:
        """One optimizer step of every seed that is ``live``; returns losses, gradient norms and entropies, ``(S,)``."""
        lead, networks = self._lead, self.networks

        def loss_of(policy: Any, own: Any, candidates: Any, frozen: Any, weights: Tensor) -> tuple[Tensor, Tensor]:
            return batch_loss(lead, policy, self._rebuild((own, candidates)), frozen, weights)

        tensors = (*self._tensors, self._frozen, weights)
        if self._known is None:
            losses, entropies = networks.each(loss_of, *tensors)
        else:  # the pass that sampled serves the first epoch too
            losses, entropies = vmap(lambda p, *own: loss_of(Known(p), *own))(self._known, *tensors)
            self._known = None
        trained = {name: value for name, value in networks.weights.items() if value.requires_grad}
        found = torch.autograd.grad(losses.sum(), list(trained.values()), allow_unused=True)
        # Fused optimizers walk through memory, whatever the strides are, so gradients must lie as their parameters do.
        gradients = {name: value.contiguous() for name, value in zip(trained, found, strict=True) if value is not None}
        norms = torch.stack([value.flatten(1).norm(dim=1) for value in gradients.values()]).norm(dim=0)
        if lead.max_grad_norm is not None:
            scale = (lead.max_grad_norm / (norms + 1e-6)).clamp(max=1)  # as torch.nn.utils.clip_grads_with_norm_
            for value in gradients.values():
                value.mul_(scale.view(-1, *[1] * (value.ndim - 1)))
        if Mail.is_here(norms) and not norms.isfinite().all():  # elsewhere that would wait: checked after the epochs
            for run, norm, trains in zip(self.runs, norms.tolist(), live, strict=True):
                if trains:
                    with run.named():
                        run.model._check_gradient(norm)
        for name, column in networks.columns.items():
            parts = gradients[name].unbind(0) if name in gradients else [None] * len(column)
            for parameter, part, trains in zip(column, parts, live, strict=True):
                parameter.grad = part if trains else None
        self.observer.before_step(self, gradients)
        self._steps.step(gradients, live)
        self.observer.after_step(self)
        for run, trains in zip(self.runs, live, strict=True):
            run.model._n_updates += trains
        return losses.detach(), norms, entropies.detach()

    # Logging.

    @torch.no_grad()
    def _dump_logs(self) -> None:
        live = [run for run in self.runs if not run.stopped]
        if any(run.model._log_is_read for run in live):
            lead, max_return = self._lead, self.env.env.max_return
            names: list[str] = []

            def metrics(policy: Any, own: Any, candidates: Any, frozen: Any) -> Tensor:
                rollout = self._rebuild((own, candidates))
                log_probs = rollout.candidates.evaluate(policy).log_probs
                values = {**rollout_metrics(rollout, max_return), **lead.diagnostics(log_probs, frozen)}
                names[:] = values
                return torch.stack(list(values.values()))

            def record(table: list[float]) -> None:
                for i, run in enumerate(self.runs):
                    if not run.stopped:
                        run.model._record_all(names, table[i * len(names) : (i + 1) * len(names)])

            self._mail.post(self.networks.each(metrics, *self._tensors, self._frozen), record)
        self._mail.deliver()
        for run in live:
            run.model.dump_logs(run.model._iteration)


def train_stacked(
    seeds: Sequence[int],
    models: Sequence[tuple[GroupAlgorithm, SeedRandom]],
    total_timesteps: int,
    callbacks: Sequence[MaybeCallback],
    log_interval: int | None,
    names: Sequence[str],
    progress_bar: bool,
    observer: StackObserver | None = None,
) -> None:
    """Train all models together; see :func:`tpo_gym.agents.seeds.train_seeds`.

    Args:
        seeds: The seeds.
        models: One per seed, with the random state that making it left.
        total_timesteps: Interactions of each.
        callbacks: One per seed, or ``None``.
        log_interval: Rollout batches between logs; ``None``: never.
        names: Names of the TensorBoard runs.
        progress_bar: Show a progress bar, that of the first seed.
        observer: Watches all seeds at once.
    """
    observer = observer or StackObserver()
    runs: list[Run] = []
    stack: Stack | None = None
    try:
        for i, (seed, (model, random)) in enumerate(zip(seeds, models, strict=True)):
            bar = progress_bar and i == 0
            with random.entered():
                total, callback = model._setup_learn(total_timesteps, callbacks[i], True, names[i], bar)
                runs.append(Run(seed, model, random, callback, bar or callbacks[i] is not None))
                callback.on_training_start({"self": model, "total_timesteps": total}, {})
        observer.on_training_start([run.model for run in runs])
        active = runs
        while active:
            stack = Stack(active, observer)
            while (remaining := [run for run in active if _goes_on(run)]) == active:
                iteration = active[0].model._iteration + 1
                stack.update(log_interval is not None and iteration % log_interval == 0)
            stack.part()
            for i, run in enumerate(active):
                if not _goes_on(run):
                    _finish(run, None if run.stopped else stack.rollout(i))
            active = remaining
        observer.on_training_end()
    except KeyboardInterrupt:
        if stack is not None:
            stack.part()
        for run in runs:
            run.model.logger.dump(step=run.model.num_timesteps)
            with run.random.entered():
                run.callback.on_training_end()  # closes the progress bar
        raise


def _goes_on(run: Run) -> bool:
    return not run.stopped and run.model.num_timesteps < run.model._total_timesteps


def _finish(run: Run, rollout: GroupRollout | None) -> None:
    """End a run and leave its model as a loaded one, which goes on by ``learn`` as if it had never stopped."""
    model = run.model
    model.rollout = rollout
    model._update_learning_rate(model.policy.optimizer)
    with run.random.entered():
        run.callback.on_training_end()
        model._pending = model._boundary or capture(model)
    model._boundary, model._reseed = None, True
