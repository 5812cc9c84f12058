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
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.type_aliases import MaybeCallback
from torch import Tensor

from tpo_gym.agents.captured import Captured
from tpo_gym.agents.env_setup import native_env
from tpo_gym.agents.group_algorithm import GroupAlgorithm
from tpo_gym.agents.group_env import Step
from tpo_gym.agents.joint_steps import JointSteps
from tpo_gym.agents.mail import Mail
from tpo_gym.agents.resume_state import capture
from tpo_gym.agents.rollouts import GroupRollout, check_scores
from tpo_gym.agents.stack import JoinedEnv, Networks, SeedRandom, map_tensors
from tpo_gym.agents.stack_batch import Batch, Gradients, StackBatch
from tpo_gym.agents.stack_observer import StackObserver
from tpo_gym.agents.stackable import has_one_mode, repeats

WORTH_RECORDING = 500
"""Updates that remain from which recording one pays: it takes as long as some hundred of them save."""


@dataclass(eq=False)
class Run:
    """One seed's model and what belongs to it alone."""

    seed: int
    model: GroupAlgorithm
    random: SeedRandom
    callback: BaseCallback
    watched: bool
    """Whether somebody listens to the callback."""
    bar: bool = False
    """Whether the callback shows a progress bar."""
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
        self.batch = StackBatch(self.networks, self.env, [run.random.generator for run in runs], models[0])
        self._steps = JointSteps([model.policy.optimizer for model in models], self.networks)
        self._lead = models[0]
        self._mail = Mail()
        self._unrecorded: Tensor | None = None
        self._ready: Batch | None = None
        self._watched = any(run.watched for run in runs)
        # A callback may change the policy between sampling and training, and a module what it computes.
        self.networks.keeps_graph = has_one_mode(models[0].policy) and not self._watched and not models[0]._merges
        self._logs = False
        self._repeats = not self._watched and repeats(models[0], stacked=True)
        self._started = False
        self._whole: Captured | None = None
        self._later = Captured(self.batch.gradients)

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
        self._lead = self.batch.lead = copy(self._lead_run.model)
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
        if self._watched:
            self.env.hand_out([run.watched for run in self.runs])
        for run in self.runs:
            if run.watched:
                with run.random.entered():
                    run.model._boundary = capture(run.model)
                    run.callback.on_rollout_start()
        if self._is_captured():
            assert self._whole is not None
            with self.batch.noise:
                self._ready = self._whole()
            if not all(self._count(self.env.num_envs) for _ in range(self.batch.n_steps)):
                return
            self._tensors = self._ready.tensors
        else:
            self._started = True
            rewards: list[Tensor] = []

            def on_step(step: Step) -> bool:
                rewards.append(step.rewards)
                return self._count(step.interactions, step, rewards)

            tensors = self.batch.collect(on_step)
            if tensors is None:
                return
            self._tensors = tensors
        self._receive()

    def _is_captured(self) -> bool:
        """Whether this update is recorded or replayed, which takes some time to pay; the first one resets."""
        if not (self._repeats and self._started):
            return False
        if self._whole is None:
            model = self._lead_run.model
            options = model._compile_options
            remaining = (model._total_timesteps - model.num_timesteps) * len(self.runs) // self.env.num_envs
            self._repeats = options is not None or remaining >= WORTH_RECORDING
            self._whole = Captured(self.batch.whole, options, self.batch.keep)
            self._later = Captured(self.batch.gradients, options)
        return self._repeats

    def _count(self, interactions: int, step: Step | None = None, rewards: Sequence[Tensor] = ()) -> bool:
        """Tell of a vector step of all seeds; ``False`` if all are to stop."""
        for i, run in enumerate(self.runs):
            if not run.stopped:
                run.model.num_timesteps += interactions // len(self.runs)
                if run.watched and step is not None:
                    self._call_back(i, step, rewards)
                elif run.bar:
                    run.callback.on_step()
        if not self.observer.goes_on():
            for run in self.runs:
                run.stopped = True
        return not all(run.stopped for run in self.runs)

    def _receive(self) -> None:
        """Check a rollout batch and tell of it."""
        scores = self._tensors[0]["scores"]
        self._mail.post(scores.sum(), lambda sums: None if math.isfinite(sums[0]) else self._refuse(scores))
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

    def _call_back(self, i: int, step: Step, rewards: Sequence[Tensor]) -> None:
        run, n_rows = self.runs[i], self.env.num_envs // len(self.runs)
        rows = slice(i * n_rows, (i + 1) * n_rows)
        own = Step(lambda: step.observations[rows], step.rewards[rows], step.dones[rows], None, 0)  # type: ignore[index]
        with self.batch.noise.paused(), run.random.entered():
            run.callback.update_locals(run.model._step_locals(own, [values[rows] for values in rewards]))
            run.stopped = not run.callback.on_step()

    def rollout(self, i: int) -> GroupRollout:
        """The last rollout batch of one run."""
        return self.batch.rollout(self._tensors, i)

    def _refuse(self, scores: Tensor) -> None:
        for run, own in zip(self.runs, scores, strict=True):
            with run.named():
                check_scores(own)

    # Training.

    def _train(self) -> None:
        lead, live = self._lead, [not run.stopped for run in self.runs]
        if self._ready is None:
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
        ready, self._ready = self._ready, None
        self._frozen = self.batch.freeze(self._tensors) if ready is None else ready.frozen
        for i, run in enumerate(self.runs):
            if run.watched:
                run.model._frozen = map_tensors(itemgetter(i), self._frozen)
        if not any(live):
            return
        weights = self.batch.weigh(self._tensors, self._frozen) if ready is None else ready.weights
        epochs = []
        for epoch in range(lead.n_epochs):
            if ready is not None and epoch == 0:
                found = ready.gradients
            else:
                differentiate = self.batch.gradients if ready is None else self._later
                found = differentiate(self._tensors, self._frozen, weights)
            self._step(found, live)
            epochs.append(found[:3])
        means = torch.stack([torch.stack(values).mean(0) for values in zip(*epochs, strict=True)], 1)
        self._mail.post(means, lambda numbers: self._record_training(numbers, live))

    def _record_training(self, means: list[float], live: list[bool]) -> None:
        """Tell each seed that trained its loss, its gradient's norm and its entropy, three numbers per seed."""
        for i, (run, trained) in enumerate(zip(self.runs, live, strict=True)):
            loss, norm, entropy = means[3 * i : 3 * i + 3]
            if trained and (self._logs or not math.isfinite(norm)):
                with run.named():
                    run.model._record_training(loss, norm, entropy)

    def _step(self, found: Gradients, live: list[bool]) -> None:
        """One optimizer step of every seed that is ``live``."""
        norms, gradients = found.norms, found.of
        if Mail.is_here(norms) and not norms.isfinite().all():  # elsewhere that would wait: checked after the epochs
            for run, norm, trains in zip(self.runs, norms.tolist(), live, strict=True):
                if trains:
                    with run.named():
                        run.model._check_gradient(norm)
        for name, column in self.networks.columns.items():
            parts = gradients[name].unbind(0) if name in gradients else [None] * len(column)
            for parameter, part, trains in zip(column, parts, live, strict=True):
                parameter.grad = part if trains else None
        self.observer.before_step(self, gradients)
        self._steps.step(gradients, live)
        self.observer.after_step(self)
        for run, trains in zip(self.runs, live, strict=True):
            run.model._n_updates += trains

    # Logging.

    @torch.no_grad()
    def _dump_logs(self) -> None:
        live = [run for run in self.runs if not run.stopped]
        if any(run.model._log_is_read for run in live):
            names, values = self.batch.metrics(self._tensors, self._frozen, self.env.env.max_return)

            def record(table: list[float]) -> None:
                for i, run in enumerate(self.runs):
                    if not run.stopped:
                        run.model._record_all(names, table[i * len(names) : (i + 1) * len(names)])

            self._mail.post(values, record)
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
                runs.append(Run(seed, model, random, callback, callbacks[i] is not None, bar))
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
