"""What verl loads: the policy loss ``tpo`` and the trainer ``tpo_sync``.

verl's loss sees micro-batches: dynamic batching and data-parallel processes split groups, and group ids are not
passed. So the trainer, which sees whole batches, writes each candidate's weight into ``advantages``, and the loss only
adds up ``-advantage * log π``. Between optimizer steps on one batch the trainer has the log-probabilities computed
again: ``p`` follows the policy, ``q`` and ``p_old`` stay those of the rollout.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import transfer_queue
from omegaconf import OmegaConf, open_dict
from tensordict import TensorDict
from torch import Tensor
from verl.trainer.ppo.core_algos import agg_loss, register_policy_loss
from verl.trainer.ppo.v1 import PPOTrainerSync, register_trainer
from verl.utils.torch_functional import masked_mean
from verl.workers.utils.padding import response_from_nested, response_to_nested

from tpo_gym.llm.verl.rows import row_advantages
from tpo_gym.llm.weights import SaturationWatch, WeightOptions

__all__ = ["LOSS", "MODE", "TargetPOTrainerSync", "check_config", "tpo_loss", "weight_options"]

LOSS = "tpo"
"""Name of the policy loss: ``actor_rollout_ref.actor.policy_loss.loss_mode``."""
MODE = "tpo_sync"
"""Name of the trainer, ``trainer.v1.trainer_mode``, and of the section of its settings, ``trainer.v1.tpo_sync``."""
_PATIENCE = "saturation_patience"

logger = logging.getLogger(__name__)


@register_policy_loss(LOSS)
def tpo_loss(
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "seq-mean-token-sum",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, float]]:
    """This micro-batch's part of the loss, in the form of verl's policy losses; all tensors ``(rows, tokens)``.

    The advantages of :class:`TargetPOTrainerSync` are weights of whole sequences, so tokens are added up and rows of
    the whole batch are averaged (verl's ``seq-mean-token-sum``), whatever ``loss_agg_mode`` says: it is left to the
    penalties that verl adds, a divergence from a reference and an entropy.

    Args:
        old_log_prob: Log-probabilities at sampling, for the log only.
        log_prob: The same now.
        advantages: From the trainer.
        response_mask: Which tokens count.
        loss_agg_mode: Not used here.
        config: verl's ``ActorConfig``; its ``global_batch_info`` says how many rows the whole batch has.
        rollout_is_weights: Must be None.

    Returns:
        The loss, whose gradient is the objective's, and metrics.

    Raises:
        ValueError: For importance weights, or where the size of the whole batch is not known.
    """
    if rollout_is_weights is not None:
        raise ValueError(
            "The loss 'tpo' takes no importance weights: set algorithm.rollout_correction.rollout_is=null."
        )
    batch = {} if config is None else config.global_batch_info
    if batch.get("global_batch_size") is None:
        raise ValueError(
            f"The loss {LOSS!r} needs the number of rows of the whole batch, which verl's engines give it as "
            f"config.global_batch_info['global_batch_size']: use it with trainer.v1.trainer_mode={MODE}."
        )
    loss = agg_loss(-advantages * log_prob, response_mask, "seq-mean-token-sum", **batch)
    return loss, {"actor/ppo_kl": masked_mean(old_log_prob - log_prob, response_mask).detach().item()}


def weight_options(config: Any) -> tuple[WeightOptions, int]:
    """The objective and the patience of the saturation warning, from the section ``trainer.v1.tpo_sync``.

    Raises:
        ValueError: For an unknown setting, or a value outside its range.
    """
    section = OmegaConf.select(config, f"trainer.v1.{MODE}")
    values = {} if section is None else dict(OmegaConf.to_container(section, resolve=True))
    patience = values.pop(_PATIENCE, 10)
    names = [item.name for item in dataclasses.fields(WeightOptions)]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ValueError(
            f"trainer.v1.{MODE} has unknown settings {', '.join(unknown)}; there are: {', '.join([*names, _PATIENCE])}."
        )
    return WeightOptions(**values), patience


def check_config(config: Any) -> None:
    """Refuses settings of verl with which a step would not be that of the objective.

    Raises:
        ValueError: Naming the setting, its value, and what to set instead.
    """
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    correction = config.algorithm.get("rollout_correction") or {}
    wanted = {
        "actor_rollout_ref.actor.policy_loss.loss_mode": (actor.policy_loss.loss_mode, LOSS),
        # verl computes this estimate, which needs no critic, for its log; it is replaced.
        "algorithm.adv_estimator": (config.algorithm.adv_estimator, "grpo"),
        # An optimizer step on part of a batch would cut groups.
        "actor_rollout_ref.actor.ppo_mini_batch_size": (actor.ppo_mini_batch_size, config.data.train_batch_size),
        "algorithm.rollout_correction.bypass_mode": (bool(correction.get("bypass_mode")), False),
        "algorithm.rollout_correction.rollout_is": (correction.get("rollout_is"), None),
        "algorithm.rollout_correction.rollout_rs": (correction.get("rollout_rs"), None),
    }
    for name, (value, right) in wanted.items():
        if value != right:
            text = "null" if right is None else str(right).lower() if isinstance(right, bool) else right
            raise ValueError(f"{name}={value!r} does not go with trainer.v1.trainer_mode={MODE}: set {name}={text}.")
    if rollout.n < 2:
        raise ValueError(f"actor_rollout_ref.rollout.n={rollout.n}: a group needs at least two completions per prompt.")


@register_trainer(MODE)
class TargetPOTrainerSync(PPOTrainerSync):
    """verl's synchronous trainer with the weights of :func:`~tpo_gym.llm.weights.candidate_weights` as advantages.

    Settings, all optional, go into ``trainer.v1.tpo_sync``: the fields of
    :class:`~tpo_gym.llm.weights.WeightOptions`, and ``saturation_patience`` (10; 0: never), the number of batches in a
    row after which a saturated group softmax is warned of. ``actor.ppo_epochs`` is the number of optimizer steps on
    each batch, every one on the whole batch.

    Logged as ``group/...``: the metrics of ``candidate_weights`` at the last optimizer step of a batch, and
    ``target_tv``, the distance TV(q, p_old) at its first.

    Args:
        config: verl's configuration.

    Raises:
        ValueError: As in :func:`check_config` and :func:`weight_options`.
    """

    def __init__(self, config: Any) -> None:
        check_config(config)
        self._options, patience = weight_options(config)
        self._watch = SaturationWatch(patience)
        super().__init__(config)

    def _build_replay_buffer(self) -> Any:
        # Where verl's synchronous and asynchronous trainers differ it asks for the mode's name, not for the class;
        # under another name than this one it would take the asynchronous buffer.
        self.trainer_mode = "sync"
        return super()._build_replay_buffer()

    def _init_dataloader(self) -> None:
        super()._init_dataloader()
        # verl moves the learning rate on once per call of update_actor, of which a batch has ppo_epochs here.
        optim = self.config.actor_rollout_ref.actor.optim
        epochs = self.config.actor_rollout_ref.actor.ppo_epochs
        with open_dict(self.config):
            optim.total_training_steps *= epochs
            if optim.lr_warmup_steps > 0:
                optim.lr_warmup_steps *= epochs

    def _compute_advantage(self, batch: Any, metrics: dict[str, Any]) -> Any:
        batch = super()._compute_advantage(batch, metrics)  # rewards with their penalty, returns, verl's own metrics
        found = self._write_weights(batch, metrics, self._read(batch, "old_log_probs")["old_log_probs"])
        if "tv" in found:
            metrics["group/target_tv"] = found["tv"]
            if self._watch.saturated(found["tv"]):
                logger.warning(self._watch.message(self._options))
        return batch

    def _update_actor(self, batch: Any, metrics: dict[str, Any]) -> Any:
        for epoch in range(self.config.actor_rollout_ref.actor.ppo_epochs):
            if epoch > 0:
                self._write_weights(batch, metrics, self._current_log_probs(batch))
            with self._one_step(len(batch)):
                batch = super()._update_actor(batch, metrics)
        return batch

    def _current_log_probs(self, batch: Any) -> Tensor:
        """Log-probabilities of all tokens under the policy as it is now; nested, a row each."""
        batch.extra_info.update(
            calculate_entropy=False,
            compute_loss=False,
            no_lora_adapter=False,  # left behind by the pass of the reference model
            temperature=self.config.actor_rollout_ref.rollout.temperature,
        )
        self.actor_rollout_wg.compute_log_prob(batch)
        data = self._read(batch, "log_probs", "response_mask")
        return response_from_nested(data["log_probs"], data["response_mask"])

    def _write_weights(self, batch: Any, metrics: dict[str, Any], log_probs: Tensor) -> dict[str, float]:
        """Writes the advantages for the coming optimizer step; adds to the metrics and returns them by plain name."""
        rewards = "token_level_rewards" if self.config.algorithm.use_kl_in_reward else "rm_scores"
        data = self._read(batch, "old_log_probs", "response_mask", rewards)
        nested_mask = data["response_mask"]
        found = row_advantages(
            batch.keys,
            log_probs.to_padded_tensor(0.0),
            data["old_log_probs"].to_padded_tensor(0.0),
            nested_mask.to_padded_tensor(0),
            data[rewards].to_padded_tensor(0.0).sum(-1),
            self._options,
        )
        fields = TensorDict({"advantages": response_to_nested(found.advantages, nested_mask)}, batch_size=len(batch))
        transfer_queue.kv_batch_put(keys=batch.keys, partition_id=batch.partition_id, fields=fields)
        metrics.update({f"group/{name}": value for name, value in found.metrics.items()})
        return found.metrics

    def _read(self, batch: Any, *fields: str) -> Any:
        return transfer_queue.kv_batch_get(keys=batch.keys, partition_id=batch.partition_id, select_fields=list(fields))

    @contextmanager
    def _one_step(self, rows: int) -> Iterator[None]:
        """Settings for a single optimizer step on all rows (agents may return more than one per candidate)."""
        actor = self.config.actor_rollout_ref.actor
        given = actor.ppo_epochs, actor.ppo_mini_batch_size
        actor.ppo_epochs, actor.ppo_mini_batch_size = 1, rows // self.config.actor_rollout_ref.rollout.n
        try:
            yield
        finally:
            actor.ppo_epochs, actor.ppo_mini_batch_size = given
