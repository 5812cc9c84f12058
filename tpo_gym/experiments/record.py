"""What is measured during a run, as callbacks: the keys of ``RECORDERS`` are the values of ``Settings.record``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import HParam
from torch import Tensor

from tpo_gym.agents.env_setup import native_env
from tpo_gym.agents.group_algorithm import GroupAlgorithm
from tpo_gym.experiments.settings import Settings
from tpo_gym.experiments.surplus import surplus_by_concentration

Progress = Callable[[int, Tensor | None], bool]
"""Called with the updates done and the latest error; ``False`` ends the run."""


def log_hparams(settings: Settings, model: GroupAlgorithm) -> None:
    """Write a run's settings where TensorBoard compares runs by them."""
    flat = {name: value for name, value in vars(settings).items() if not isinstance(value, dict)}
    for group in (settings.env, settings.arguments, settings.policy_arguments):
        flat.update(group)
    hparams = {name: value if isinstance(value, (int, float, str)) else str(value) for name, value in flat.items()}
    hparams["seed"] = model.seed if model.seed is not None else -1
    model.logger.record("hparams", HParam(hparams, {"rollout/error": 0.0}), exclude=("stdout", "log", "json", "csv"))


class Recorder(BaseCallback):
    """Counts updates and keeps measurements.

    Measurements stay on the device until the end of the run, so that nothing waits for it.

    Args:
        settings: The run's settings.
        progress: Told after every update.
    """

    model: GroupAlgorithm

    def __init__(self, settings: Settings, progress: Progress) -> None:
        super().__init__()
        self.settings = settings
        self.progress = progress
        self.updates = 0
        """Updates begun so far; complete once the next one begins."""
        self._x: list[int] = []
        self._values: dict[str, list[Tensor]] = {}
        self._first_step = False

    def curves(self) -> dict[str, np.ndarray]:
        """The measurements: ``x``, and ``(points, ...)`` of each metric."""
        values = {name: torch.stack(tensors).float().cpu().numpy() for name, tensors in self._values.items()}
        return {"x": np.array(self._x), **values}

    def note(self, name: str, value: Tensor) -> None:
        """Keep a measurement."""
        self._values.setdefault(name, []).append(value.detach())

    def before_first_step(self) -> None:
        """The gradient of a rollout batch's first epoch is there, the step is not taken yet."""

    def after_step(self) -> None:
        """A step is taken."""

    def _on_training_start(self) -> None:
        log_hparams(self.settings, self.model)
        optimizer = self.model.policy.optimizer
        self._hooks = (
            optimizer.register_step_pre_hook(self._pre_step),
            optimizer.register_step_post_hook(lambda *_: self.after_step()),
        )

    def _pre_step(self, *_: Any) -> None:
        if self._first_step:
            self._first_step = False
            self.before_first_step()

    def _on_rollout_end(self) -> None:
        self._first_step = True
        self.updates += 1

    def _on_training_end(self) -> None:
        for hook in self._hooks:
            hook.remove()

    @property
    def latest_error(self) -> Tensor | None:
        """The last error that was measured."""
        errors = self._values.get("error")
        return errors[-1] if errors else None

    def _on_step(self) -> bool:
        return self.progress(self.updates, self.latest_error)


class Rollouts(Recorder):
    """From each rollout batch, before the update: the error and, for groups of episodes, what drives the update.

    Errors are ``1 - mean return / max_return`` of the sampling policy. Weights are the mean target mass (TPO) or
    advantage magnitude of the candidates that succeed and of those that fail; 0 where there are none.
    """

    def _on_rollout_end(self) -> None:
        super()._on_rollout_end()
        self._x.append(self.updates)
        rollout, env = self.model.rollout, native_env(self.model.env)
        assert rollout is not None and env is not None
        self.note("error", 1 - rollout.returns.mean() / env.max_return)
        if rollout.step_rewards is None or rollout.group_size == 1:
            return
        success = rollout.scores >= env.max_return
        frozen = self.model.freeze(rollout)
        name = next(name for name in ("target", "advantages", "weights") if name in frozen)
        for metric, chosen in (("success_weight", success), ("failure_weight", ~success)):
            self.note(metric, (frozen[name].abs() * chosen).sum() / chosen.sum().clamp(min=1))
        prompts = success.any(1).float().mean()
        self.note("prompts_with_success", prompts)
        self.note("all_fail", 1 - prompts)

    def _on_rollout_start(self) -> None:
        self._fill()

    def _on_training_end(self) -> None:
        super()._on_training_end()
        self._fill()

    def _fill(self) -> None:
        """A batch without any signal, of which some methods take no step, has a gradient of 0."""
        if len(self._values.get("gradient_norm", [])) < self.updates:
            self.note("gradient_norm", torch.zeros((), device=self.model.device))

    def before_first_step(self) -> None:
        gradients = [p.grad for p in self.model.policy.parameters() if p.grad is not None]
        self.note("gradient_norm", torch.nn.utils.get_total_norm(gradients))


def table_error(policy: Tensor, right: Tensor) -> Tensor:
    """Mean probability of wrong actions of tables ``(..., contexts, actions)``; ``right`` is 1 at the right ones."""
    return 1 - (policy * right).sum((-2, -1)) / policy.shape[-2]


def table_misalignment(gradient: Tensor, policy: Tensor, right: Tensor) -> Tensor:
    """``1 - cos`` of the step along ``-gradient`` with the oracle; all tables ``(..., contexts, actions)``.

    The oracle is the policy gradient ``π(y) (e_y - π)`` where there is one context, cross-entropy's ``e_y - π`` summed
    over all contexts else. As in the reference 1e-12 is added under each norm's root, so that it rises again where
    gradients vanish.
    """
    oracle = right - policy
    if policy.shape[-2] == 1:
        oracle = (policy * right).sum((-2, -1), keepdim=True) * oracle
    update = gradient.double() * -policy.shape[-2]  # the loss is a mean over contexts
    norms = (update.square().sum((-2, -1)) + 1e-12) * (oracle.square().sum((-2, -1)) + 1e-12)
    return 1 - (update * oracle).sum((-2, -1)) / norms.sqrt()


def right_actions(env: Any, table: Tensor) -> Tensor:
    """1 at the right action of each context of a task, 0 elsewhere, float64 of the table's shape."""
    answers = env.answers.unsqueeze(1).to(table.device)
    return torch.zeros_like(table, dtype=torch.float64).scatter(1, answers, 1.0)


class Table(Recorder):
    """Of a table of logits, exactly: the error before and after each step, and the update's misalignment."""

    def _on_training_start(self) -> None:
        super()._on_training_start()
        self._table: Tensor = self.model.policy.action_net.weight  # type: ignore[assignment]
        self._right = right_actions(native_env(self.model.env), self._table)
        self._policy = self._table.detach().double().softmax(-1)

    def before_first_step(self) -> None:
        assert self._table.grad is not None
        self._x.append(self.updates)
        self.note("error", table_error(self._policy, self._right))
        self.note("misalignment", table_misalignment(self._table.grad, self._policy, self._right))

    def after_step(self) -> None:
        self._policy = self._table.detach().double().softmax(-1)
        self.note("error_after", table_error(self._policy, self._right))


class Classification(Recorder):
    """Every ``evaluate_every`` updates: the share of test examples whose likeliest action is wrong."""

    def __init__(self, settings: Settings, progress: Progress) -> None:
        super().__init__(settings, progress)
        self._test: Any = gym.make_vec(f"tpo_gym/{settings.task}-v0", num_envs=1, split="test", **settings.env)

    def _on_rollout_start(self) -> None:
        if self.updates and self.updates % self.settings.evaluate_every == 0:
            self.evaluate(self.examples())

    def _on_training_end(self) -> None:
        super()._on_training_end()
        self.finish(self.examples)

    def finish(self, examples: Callable[[], Tensor]) -> None:
        """Evaluate after the last update, if that is one to evaluate after."""
        if self.updates % self.settings.evaluate_every == 0 and self.updates == self.settings.updates:
            self.evaluate(examples())
            self.logger.dump(self.model.num_timesteps)

    def examples(self) -> Tensor:
        """The test examples' features."""
        return self._test.features().to(self.model.device)

    @torch.no_grad()
    def evaluate(self, examples: Tensor) -> None:
        """Measure the present policy on the test examples."""
        self._x.append(self.updates)
        self.measure(self.model.policy.all_log_probs(examples), self._test.dataset.labels.to(self.model.device))

    def measure(self, log_policy: Tensor, labels: Tensor) -> None:
        """Measure log-probabilities of all actions."""
        self.note("error", (log_policy.argmax(1) != labels).float().mean())
        self.logger.record("eval/error", float(self._values["error"][-1]))


class Surplus(Classification):
    """As :class:`Classification`, and the surplus gain on misclassified examples."""

    def measure(self, log_policy: Tensor, labels: Tensor) -> None:
        super().measure(log_policy, labels)
        with torch.enable_grad():
            self.note("surplus", surplus_by_concentration(self.model, log_policy, labels))


RECORDERS: dict[str, type[Recorder]] = {
    "rollouts": Rollouts,
    "table": Table,
    "classification": Classification,
    "surplus": Surplus,
}
