"""The base of all group algorithms: SB3's contract around grouped rollouts and a frozen objective."""

from __future__ import annotations

import logging
import math
import warnings
from abc import abstractmethod
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.base_class import BaseAlgorithm
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.type_aliases import MaybeCallback, Schedule
from stable_baselines3.common.vec_env import VecEnv
from torch import Tensor

from tpo_gym.agents import collectors
from tpo_gym.agents.arguments import check_common_arguments
from tpo_gym.agents.callbacks import listens
from tpo_gym.agents.captured_pass import CapturedPass, captured_pass
from tpo_gym.agents.checkpoint import CheckpointMixin
from tpo_gym.agents.compiled import CompiledLoss
from tpo_gym.agents.distributed import OneProcess
from tpo_gym.agents.env_setup import (
    CANDIDATE_SETS,
    EnvLike,
    as_vec_env,
    check_exact,
    expand_env,
    is_ours,
    native_env,
    pick_candidates,
)
from tpo_gym.agents.group_env import BatchedGroupEnv, GroupEnv, Step, VecGroupEnv
from tpo_gym.agents.mail import Mail
from tpo_gym.agents.policies import (
    ActorPolicy,
    CnnPolicy,
    MultiInputPolicy,
    TabularPolicy,
    TransformerPolicy,
)
from tpo_gym.agents.reporting import ReportingMixin
from tpo_gym.agents.resume_state import capture
from tpo_gym.agents.rollouts import Evaluation, GroupRollout, check_scores
from tpo_gym.agents.sampling_pass import Known, SamplingPass, is_kept
from tpo_gym.agents.trials import Lookahead
from tpo_gym.agents.updates import batch_loss, fit

logger = logging.getLogger("tpo_gym")
Self = TypeVar("Self", bound="GroupAlgorithm")
MADE_ANEW = (
    "rollout",
    "_group_env",
    "_frozen",
    "_unlogged",
    "_mail",
    "_processes",
    "_compiled_loss",
    "_compile_options",
    "_captured",
    "_recorded",
    "_sampled",
    "_keeps_pass",
)
"""Attributes that no file holds."""
LONG_EPISODE = 10_000
"""Steps of one rollout batch after which a warning asks whether episodes end at all."""


class GroupAlgorithm(ReportingMixin, CheckpointMixin, BaseAlgorithm):
    """Collect groups of candidates, freeze an objective on them, fit the policy for some epochs, repeat.

    A subclass names its objective: :meth:`freeze` computes, once per rollout batch, what the loss needs; and
    :meth:`group_losses` is the loss of each group under the current policy.

    Args:
        policy: Alias (``MlpPolicy``, ``CnnPolicy``, ``MultiInputPolicy``, ``TabularPolicy``, ``TransformerPolicy``) or
            a subclass of :class:`~tpo_gym.agents.policies.ActorPolicy`.
        env: An id, an environment, or a vectorized environment (SB3's or Gymnasium's). With candidates ``"episodes"``
            its sub-environments are contexts x ``group_size``; with ``"actions"`` and ``"all_actions"`` each is one
            context. An id or a single environment is copied: ``n_contexts`` (x ``group_size``) times.
        learning_rate: A float or a schedule of the remaining progress.
        group_size: Candidates per context, ``K``.
        n_contexts: Contexts per rollout batch where ``env`` is an id or a single environment. ``None``: 100 for tasks
            of this package (the paper's batch), else as many as make 32 episodes.
        n_epochs: Optimizer steps per rollout batch, each over the whole batch.
        batch_size: Largest number of candidates computed at once. Bounds memory; the gradient is that of the whole
            batch whatever it is, also where it splits a group. ``None``: all at once.
        candidates: ``"episodes"``, ``"actions"``, ``"all_actions"``, or ``"auto"``: all actions for one-step tasks,
            actions where each one can be scored and every step pays, else episodes. ``"exact"``: no sampling, the
            expectation over all contexts and actions of a bandit (with ``n_epochs=1`` the population gradient).
        baseline: For ``"all_actions"`` and ``"exact"``: what is subtracted from the reward: a constant, ``"expected"``
            (``Σ π²``), ``"batch"`` (the batch's mean) or nothing (``None``).
        ent_coef: Weight of an entropy bonus in the loss.
        max_grad_norm: Clip the gradient's norm to this; ``None``: no clipping.
        lookahead: For ``"actions"`` on environments that are copied to try an action: further steps of the copy, with
            the policy's actions, whose rewards count for the action's score. All steps of copies are interactions.
        lookahead_deterministic: Take the most likely action in these steps; else sample.
        stats_window_size: Episodes that the rollout statistics average.
        tensorboard_log: Folder of TensorBoard runs; ``None``: no logging.
        policy_kwargs: Arguments of the policy.
        verbose: 0: silent, 1: information, 2: debugging.
        seed: Seed of all random generators.
        device: Device of the policy and of training.
        _init_setup_model: Build the networks now.

    Raises:
        ValueError: For arguments that cannot work together, saying what to change.
    """

    policy_aliases: ClassVar[dict[str, type[BasePolicy]]] = {
        "MlpPolicy": ActorPolicy,
        "CnnPolicy": CnnPolicy,
        "MultiInputPolicy": MultiInputPolicy,
        "TabularPolicy": TabularPolicy,
        "TransformerPolicy": TransformerPolicy,
    }
    min_group_size: ClassVar[int] = 2
    candidate_sets: ClassVar[tuple[str, ...]] = CANDIDATE_SETS
    merges_contexts: ClassVar[bool] = False
    """Whether bandit feedback of one constant context is averaged into a single group."""
    reads_labels: ClassVar[bool] = False
    """Whether rollout batches hold the right actions, which the task must know."""
    policy: ActorPolicy
    _processes: OneProcess = OneProcess()
    """Who trains this model: see :func:`tpo_gym.agents.distributed.distribute`."""
    _keeps_pass: bool = False
    """Whether :meth:`learn` differentiates the pass that sampled: see :mod:`tpo_gym.agents.sampling_pass`."""

    def __init__(
        self,
        policy: str | type[ActorPolicy],
        env: EnvLike | None,
        learning_rate: float | Schedule = 1e-3,
        group_size: int = 8,
        n_contexts: int | None = None,
        n_epochs: int = 4,
        batch_size: int | None = None,
        candidates: str = "auto",
        baseline: collectors.Baseline = "expected",
        ent_coef: float = 0.0,
        max_grad_norm: float | None = None,
        lookahead: int = 0,
        lookahead_deterministic: bool = True,
        stats_window_size: int = 100,
        tensorboard_log: str | None = None,
        policy_kwargs: dict[str, Any] | None = None,
        verbose: int = 0,
        seed: int | None = None,
        device: torch.device | str = "auto",
        _init_setup_model: bool = True,
    ) -> None:
        self.group_size = group_size
        if n_contexts is None:
            n_contexts = 100 if env is None or is_ours(env) else max(1, 32 // max(1, group_size))
        self.n_contexts = n_contexts
        self.n_epochs = n_epochs
        self.batch_size = batch_size
        self.candidates = candidates
        self.baseline = baseline
        self.ent_coef = ent_coef
        self.max_grad_norm = max_grad_norm
        self.lookahead = lookahead
        self.lookahead_deterministic = lookahead_deterministic
        self._check_arguments()
        if env is not None:
            env = self._expand_env(env)
        super().__init__(
            policy,
            env,  # type: ignore[arg-type]  # _wrap_env adapts Gymnasium's vector environments
            learning_rate,
            policy_kwargs=policy_kwargs,
            stats_window_size=stats_window_size,
            tensorboard_log=tensorboard_log,
            verbose=verbose,
            device=device,
            support_multi_env=True,
            seed=seed,
            supported_action_spaces=(spaces.Box, spaces.Discrete, spaces.MultiDiscrete, spaces.MultiBinary),
        )
        self.rollout: GroupRollout | None = None
        self._unlogged: GroupRollout | None = None  # the rollout batch whose update has not been logged yet
        self._mail = Mail()
        self._compiled_loss: CompiledLoss | None = None
        self._compile_options: dict[str, Any] | None = None
        self._captured: CapturedPass | None = None  # while learning
        self._recorded: CapturedPass | None = None
        self._sampled: Known | None = None
        self._seed_rng = np.random.default_rng(seed)
        if _init_setup_model:
            self._setup_model()

    def _check_arguments(self) -> None:
        check_common_arguments(self)

    def _setup_model(self) -> None:
        self._setup_lr_schedule()
        self.set_random_seed(self.seed)
        if not (isinstance(self.policy_class, type) and issubclass(self.policy_class, ActorPolicy)):
            raise TypeError(
                f"{type(self).__name__} needs a critic-free policy, a subclass of tpo_gym.agents.ActorPolicy, got "
                f"{self.policy_class}. Pass an alias such as 'MlpPolicy', or derive from ActorPolicy."
            )
        self.policy = self.policy_class(
            self.observation_space, self.action_space, self.lr_schedule, **self.policy_kwargs
        )
        self.policy = self.policy.to(self.device)
        if self.env is not None:
            self._setup_groups()

    def _setup_groups(self) -> None:
        """Decide what a candidate is and check that the environment can be split in groups."""
        assert self.env is not None
        native = native_env(self.env)
        self.candidate_set = pick_candidates(self.candidates, native, self.action_space, self.candidate_sets)
        if self.candidates == "auto":
            logger.info("candidates='auto': %s forms groups of %s", type(self).__name__, self.candidate_set)
            if self.verbose >= 1:
                print(f"Groups are formed of {self.candidate_set!r} (candidates='auto')")
        if self.candidate_set == "episodes" and self.env.num_envs % self.group_size:
            n_envs, size = self.env.num_envs, self.group_size
            raise ValueError(
                f"{n_envs} sub-environments cannot be split into groups of group_size={size}: the remainder is "
                f"{n_envs % size}. Make {max(1, n_envs // size) * size} or {(n_envs // size + 1) * size} "
                "sub-environments, or change group_size."
            )
        self._group_env: GroupEnv = (
            BatchedGroupEnv(native, self.device)
            if native is not None
            else VecGroupEnv(self.env, self.device, self._seed_rng)
        )
        if self.candidate_set == "exact":
            assert native is not None
            check_exact(native)
        if self.candidate_set == "actions":
            self._group_env.check_scorable(self._lookahead)
        elif self.lookahead:
            raise ValueError(
                f"lookahead={self.lookahead} is for candidates='actions', but groups are formed of "
                f"{self.candidate_set!r}: leave it out, or choose candidates='actions'."
            )

    @property
    def _merges(self) -> bool:
        """Whether the bandit feedback of a rollout batch becomes a single group."""
        constant = isinstance(self.observation_space, spaces.Discrete) and self.observation_space.n == 1
        return constant and self.merges_contexts

    @property
    def _lookahead(self) -> Lookahead:
        return Lookahead(self.lookahead, self.lookahead_deterministic)

    @abstractmethod
    def freeze(self, rollout: GroupRollout) -> dict[str, Tensor]:
        """What the loss needs of a rollout batch, computed once and kept for all epochs: tensors ``(B, ...)``."""

    @abstractmethod
    def group_losses(self, evaluation: Evaluation, frozen: dict[str, Tensor]) -> Tensor:
        """Loss of each group under the current policy, ``(b,)``; ``frozen`` holds the rows of these groups."""

    def group_weights(self, rollout: GroupRollout, frozen: dict[str, Tensor]) -> Tensor:
        """Weight of each group in the batch's loss, ``(B,)``: the mean over groups."""
        return torch.full((rollout.n_groups,), 1.0 / rollout.n_groups, device=rollout.scores.device)

    @property
    def may_skip(self) -> bool:
        """Whether :meth:`wants_update` may refuse a rollout batch; it is not asked where not."""
        return type(self).wants_update is not GroupAlgorithm.wants_update

    def wants_update(self, rollout: GroupRollout) -> bool:
        """Whether to take optimizer steps on this rollout batch."""
        return True

    @property
    def is_constant(self) -> bool:
        """Whether the objective's settings are the same in all updates of a training."""
        return True

    def collect_rollouts(self, callback: BaseCallback) -> bool:
        """Collect one rollout batch into :attr:`rollout`; ``False`` if a callback ended the training."""
        if not self._keeps_pass:
            self.policy.set_training_mode(False)
        # What a file saved within this rollout batch goes on from.
        self._boundary = capture(self, torch_alone=self._keeps_pass or self._captured is not None)
        callback.on_rollout_start()
        rewards: list[Tensor] = []
        watched = listens(callback)

        def on_step(step: Step) -> bool:
            self.num_timesteps += step.interactions
            rewards.append(step.rewards)
            if step.infos is not None:
                self._update_info_buffer(step.infos, step.dones)
            if len(rewards) == LONG_EPISODE:
                _warn_of_long_episodes()
            if watched:
                callback.update_locals(self._step_locals(step, rewards))
            return callback.on_step()

        rollout = self._processes.collect(self, on_step)
        if rollout is None:
            return False
        total = rollout.scores.sum()  # finite only if all are, and one operation
        self._mail.post(total, lambda sums: None if math.isfinite(sums[0]) else check_scores(rollout.scores))
        self.rollout = rollout
        self._last_obs = self._last_obs if self._last_obs is not None else np.empty(0)
        if isinstance(self._group_env, BatchedGroupEnv):
            self._mail.post(rollout.returns[-self._stats_window_size :], self._record_episodes)
        callback.on_rollout_end()
        self._boundary, self._updating = None, True
        return True

    def _collect(self, on_step: collectors.OnStep) -> GroupRollout | None:
        env, policy = self._group_env, self.policy
        if self._captured is not None:
            if self._captured.started:
                return self._captured.collect(on_step)
            self._captured.started = True
        if self._keeps_pass:
            sampler = SamplingPass(policy)
            rollout = collectors.collect(self, env, sampler, on_step, fused=False, merge=False)
            self._sampled = sampler.known
            return rollout
        sequences = isinstance(env, BatchedGroupEnv) and hasattr(env.env, "score_sequences")
        fused = sequences and isinstance(policy, TransformerPolicy)
        return collectors.collect(self, env, policy, on_step, fused, self._merges)

    def train(self) -> None:
        """Fit the policy to the frozen objective for ``n_epochs`` steps on the last rollout batch."""
        assert self.rollout is not None, "Call collect_rollouts() first"
        rollout = self.rollout
        prepared = None if self._captured is None else self._captured.prepared
        if (self._sampled is None and prepared is None) or not self.policy.training:
            self.policy.set_training_mode(True)
        self._update_learning_rate(self.policy.optimizer)
        frozen = self._frozen = self.freeze(rollout) if prepared is None else prepared.frozen
        self._unlogged = rollout
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")
        if self.may_skip and not self.wants_update(rollout):
            return
        weights = self.group_weights(rollout, frozen) if prepared is None else prepared.weights
        means = fit(self, rollout, frozen, weights)
        self._mail.post(means, lambda numbers: self._record_training(*numbers))

    def _record_training(self, loss: float, norm: float, entropy: float) -> None:
        """Log the means over the epochs."""
        self._check_gradient(norm)
        self.logger.record("train/loss", loss)
        self.logger.record("train/grad_norm", norm)
        self.logger.record("train/entropy", entropy)
        self.logger.record("train/n_updates", self._n_updates, exclude="tensorboard")

    def _check_gradient(self, norm: float) -> None:
        if not math.isfinite(norm):
            raise FloatingPointError(
                f"The gradient's norm is {norm} after {self._n_updates} updates. Lower learning_rate "
                f"(now {self.lr_schedule(self._current_progress_remaining)}), or set max_grad_norm."
            )

    def learn(
        self: Self,
        total_timesteps: int,
        callback: MaybeCallback = None,
        log_interval: int | None = 1,
        tb_log_name: str | None = None,
        reset_num_timesteps: bool = True,
        progress_bar: bool = False,
    ) -> Self:
        """Train until at least ``total_timesteps`` environment interactions (every group member counts).

        Args:
            total_timesteps: A lower bound; added to the interactions so far when ``reset_num_timesteps`` is false.
            callback: SB3 callbacks, called once per vector step.
            log_interval: Rollout batches between logs, written after the update; ``None``: never.
            tb_log_name: Name of the TensorBoard run; by default that of the run which is continued, else the class's.
            reset_num_timesteps: Count interactions from zero.
            progress_bar: Show SB3's progress bar.

        Returns:
            The trained model itself.
        """
        total_timesteps, callback = self._setup_learn(
            total_timesteps, callback, reset_num_timesteps, tb_log_name, progress_bar and self._processes.writes
        )
        self._processes.begin(self, total_timesteps)
        callback.on_training_start({"self": self, "total_timesteps": total_timesteps}, {})
        watched = listens(callback)
        self._keeps_pass, self._captured = is_kept(self, watched), captured_pass(self, watched)
        try:
            while self.num_timesteps < total_timesteps:
                if not self.collect_rollouts(callback):
                    break
                self._iteration += 1
                self._update_current_progress_remaining(self.num_timesteps, total_timesteps)
                self.train()
                if log_interval is not None and self._iteration % log_interval == 0:
                    self.dump_logs(self._iteration)
                self._mail.deliver()
                self._updating = False
        except KeyboardInterrupt:
            self.logger.dump(step=self.num_timesteps)
            callback.on_training_end()  # closes the progress bar
            raise
        finally:
            self._keeps_pass, self._sampled = False, None
            self._captured = None
        callback.on_training_end()
        return self

    def compile(self, **options: Any) -> None:
        """Compile the updates (``torch.compile``), for the rest of this object's life.

        On one-step tasks of this package all that an update computes before its optimizer steps is recorded and
        compiled as one function, and a step of ``MuonAdamW`` as another, unless a callback listens or something of
        somebody else's takes part; elsewhere the loss of a batch is compiled, whose shapes must not change from batch
        to batch. Takes some seconds and pays in long trainings, and where a GPU waits for launches. Where it fails
        training goes on without, with a warning.

        Args:
            options: Arguments of ``torch.compile``. Without ``mode``, ``options`` and ``backend``:
                ``mode="reduce-overhead"``, which replays CUDA graphs on a GPU.
        """
        if not options.keys() & {"mode", "backend", "options"}:
            options = {"mode": "reduce-overhead", **options}
        if isinstance(self.policy, TransformerPolicy):
            self.policy.fixed_shapes = True
        self._compile_options = options
        self._compiled_loss = CompiledLoss(batch_loss, options)

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """As SB3, with sb3-contrib's ``action_masks``: see :meth:`ActorPolicy.predict`."""
        if action_masks is None:
            return self.policy.predict(observation, state, episode_start, deterministic)
        return self.policy.predict(observation, state, episode_start, deterministic, action_masks)

    def set_env(self, env: EnvLike, force_reset: bool = True) -> None:
        """Train on another environment from now on.

        Args:
            env: As in the constructor; it must have as many sub-environments as the present one.
            force_reset: Reset it before training.
        """
        super().set_env(self._expand_env(env), force_reset)
        self._setup_groups()

    def _expand_env(self, env: EnvLike) -> EnvLike:
        env = super()._expand_env(env)
        return expand_env(env, self.candidates, self.group_size, self.n_contexts, self.candidate_sets)

    def _get_torch_save_params(self) -> tuple[list[str], list[str]]:
        return ["policy", "policy.optimizer"], []

    def _excluded_save_params(self) -> list[str]:
        return [*super()._excluded_save_params(), *MADE_ANEW]

    @staticmethod
    def _wrap_env(env: Any, verbose: int = 0, monitor_wrapper: bool = True) -> VecEnv:
        return BaseAlgorithm._wrap_env(as_vec_env(env), verbose, monitor_wrapper)


def _warn_of_long_episodes() -> None:
    warnings.warn(
        f"A rollout batch has taken {LONG_EPISODE:,} steps and goes on, since candidates are whole episodes and the "
        "longest is waited for. If episodes may never end, pass gymnasium.make(..., max_episode_steps=...) or wrap the "
        "environment in gymnasium.wrappers.TimeLimit.",
        stacklevel=2,
    )
