"""Target Policy Optimization on TRL: :class:`TargetPOConfig` and :class:`TargetPOTrainer`.

TRL generates, scores, shuffles and slices; this module only replaces the loss. A group is never in one micro-batch, and
may be spread over processes. So before each optimizer step one pass without gradient gives the log-probabilities of all
completions, which are gathered, and :func:`~tpo_gym.llm.weights.candidate_weights` turns them into one constant per
completion. The micro-batches then add up ``-Σ w · log π``, whose gradient is that of the whole objective.

Not to be confused with TRL's own ``TPOTrainer``, which is Triple Preference Optimization.
"""

from __future__ import annotations

import dataclasses
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from trl import GRPOConfig, GRPOTrainer
from trl.models.utils import disable_gradient_checkpointing

from tpo_gym.agents import objectives
from tpo_gym.llm.weights import CandidateWeights, GroupPolicy, Method, SaturationWatch, WeightOptions, candidate_weights

# Settings of TRL's GRPO that the objective here would not read, with what to use instead.
_WITHOUT_EFFECT = {
    "loss_type": "choose `method`",
    "importance_sampling_level": "the weights belong to whole completions; choose `method`",
    "scale_rewards": "the objective standardizes the scores; soften it with `std_floor`",
    "multi_objective_aggregation": "the score of a completion is the weighted sum of its rewards",
    "epsilon": "use `clip_range`",
    "epsilon_high": "use `clip_range_high`",
    "delta": "use `clip_range`",
    "top_entropy_quantile": "the log-probability of a completion is the sum over all of its tokens",
    "off_policy_mask_threshold": "a masked completion would change the group that its siblings are compared with",
    "entropy_coef": "the objective has no entropy bonus; use `eta` or `temperature`",
    "use_adaptive_entropy": "the objective has no entropy bonus; use `eta` or `temperature`",
    "use_bias_correction_kl": "the penalty is the plain estimator e^-r + r - 1",
}
# What a model may need besides the tokens (images), as TRL's batches name it.
_MODEL_INPUTS = (
    "pixel_values",
    "image_grid_thw",
    "num_images",
    "pixel_attention_mask",
    "spatial_shapes",
    "num_tiles",
    "image_sizes",
    "token_type_ids",
    "mm_token_type_ids",
    "image_position_ids",
)


@dataclass
class TargetPOConfig(GRPOConfig):
    """Settings of :class:`TargetPOTrainer`: those of TRL's ``GRPOConfig``, and the ones below.

    ``num_generations`` is the paper's ``K``, ``num_iterations`` its number of epochs, ``beta`` the weight of the
    penalty on the divergence from a reference model, and
    ``per_device_train_batch_size x gradient_accumulation_steps x processes`` is the number of completions of an
    optimizer step: contexts x ``K``.

    Args:
        method: ``"target_po"``, or to compare with it, through the same path: ``"grpo"``, ``"gspo"``, ``"group_pg"``.
            See :class:`~tpo_gym.llm.weights.WeightOptions`, also for the next six.
        group_policy: ``"sum"`` (the paper), ``"mean"`` (per token) or ``"ratio"`` (to the policy at sampling).
        eta: Temperature of the target.
        std_floor: Smallest deviation that scores are divided by.
        clip_range: Lower ε of the clipped methods.
        clip_range_high: Upper ε of the clipped methods.
        old_kl_coef: ``"grpo"``'s penalty on the divergence from the policy at sampling.
        kl_normalization: How ``beta``'s penalty is averaged. ``"token"``: the mean over all generated tokens of the
            optimizer step, over all processes. ``"sequence"``: the mean over completions of the sum over their tokens,
            which estimates the divergence of whole completions.
        saturation_patience: Warn when for so many rollout batches in a row TV(q, p_old), the distance that the target
            asks the policy to move, stays below 0.01 though scores differ. 0: never.
        learning_rate: The paper's 1e-5.

    Raises:
        ValueError: For settings that would break a group or have no effect, saying what to set instead.
    """

    learning_rate: float = field(default=1e-5, metadata={"help": "Learning rate of AdamW (the paper: 1e-5)."})
    use_bias_correction_kl: bool = field(default=False, metadata={"help": "Not supported, see `beta`."})
    vllm_importance_sampling_correction: bool = field(default=False, metadata={"help": "Not supported."})

    method: Method = field(default="target_po", metadata={"help": "target_po, grpo, gspo or group_pg."})
    group_policy: GroupPolicy = field(default="ratio", metadata={"help": "sum (the paper), mean or ratio."})
    eta: float = field(default=1.0, metadata={"help": "Temperature of the target."})
    std_floor: float = field(default=0.0, metadata={"help": "Smallest deviation that scores are divided by."})
    clip_range: float | None = field(default=None, metadata={"help": "Lower epsilon; None: the method's own."})
    clip_range_high: float | None = field(default=None, metadata={"help": "Upper epsilon; None: the method's own."})
    old_kl_coef: float = field(default=0.04, metadata={"help": "grpo: penalty to the policy at sampling."})
    kl_normalization: str = field(default="token", metadata={"help": "token or sequence: how beta's term is averaged."})
    saturation_patience: int = field(default=10, metadata={"help": "Saturated rollout batches before a warning."})

    def __post_init__(self) -> None:
        super().__post_init__()
        self.weight_options()
        if self.kl_normalization not in ("token", "sequence"):
            raise ValueError(f"Unknown kl_normalization {self.kl_normalization!r}: choose 'token' or 'sequence'.")
        if self.steps_per_generation != self.gradient_accumulation_steps:
            raise ValueError(
                f"steps_per_generation is {self.steps_per_generation} and gradient_accumulation_steps "
                f"{self.gradient_accumulation_steps}: TargetPOTrainer needs them equal, so that an optimizer step "
                "holds whole groups. Leave out steps_per_generation and generation_batch_size; for several optimizer "
                "steps per rollout batch set num_iterations."
            )
        if self.mask_truncated_completions:
            raise ValueError(
                "mask_truncated_completions=True would give a truncated completion the log-probability 0, more than "
                "any other of its group. Set it to False and let the reward function judge truncated completions."
            )
        if self.use_vllm and self.vllm_importance_sampling_correction:
            raise ValueError(
                "vllm_importance_sampling_correction=True weighs completions outside the objective. Set it to False: "
                "p_old is computed with the model that is trained, not taken from vLLM."
            )
        for name, instead in _WITHOUT_EFFECT.items():
            value, default = getattr(self, name), _default(type(self), name)
            if value != default:
                raise ValueError(
                    f"{name}={value!r} has no effect in TargetPOTrainer: {instead}. Leave it at {default!r}."
                )

    def weight_options(self) -> WeightOptions:
        """The settings of the weights alone."""
        return WeightOptions(
            method=self.method,
            group_policy=self.group_policy,
            eta=self.eta,
            std_floor=self.std_floor,
            clip_range=self.clip_range,
            clip_range_high=self.clip_range_high,
            old_kl_coef=self.old_kl_coef,
        )


@dataclass
class _Rollout:
    """One rollout batch: all completions of all processes, in an order in which groups are contiguous."""

    scores: Tensor  # (N,)
    lengths: Tensor  # (N,), generated tokens
    first: int  # position of this process's first completion
    old_log_probs: Tensor | None = None  # (N,), from the first optimizer step on


class TargetPOTrainer(GRPOTrainer):
    """Trains a language model with Target Policy Optimization (arXiv 2604.06159) on TRL.

    Takes what TRL's ``GRPOTrainer`` takes: models, reward functions, data sets, PEFT configurations, vLLM, DeepSpeed
    and FSDP through ``accelerate launch``. The score of a completion is the weighted sum of its rewards. The gradient
    of each optimizer step is that of the objective's mean over all groups of the step, whatever the micro-batches and
    the processes.

    Logged beside TRL's metrics, once per optimizer step: ``group/cross_entropy``, ``group/fit_kl``, ``group/tv``,
    ``group/max_p``, ``group/log_prob_spread``, ``group/active_groups`` (see
    :func:`~tpo_gym.llm.weights.candidate_weights`), and ``group/target_tv`` = TV(q, p_old) once per rollout batch. The
    logged loss is the objective's value, plus the penalty's. TRL's table of completions shows TRL's own advantages.
    Evaluation logs rewards and completions; it has no loss.

    Args:
        model: A name or folder, a model, or a PEFT model. With ``beta > 0`` and without PEFT, the reference is loaded
            from the name or folder that the model came from.
        reward_funcs: As TRL's: each is called with ``prompts``, ``completions`` and the data set's columns.
        args: A :class:`TargetPOConfig`; ``None``: its defaults.
        train_dataset: Rows with a ``prompt``.
        eval_dataset: The same.
        processing_class: The tokenizer; ``None``: the one in the model's folder.
        **kwargs: Further arguments of ``GRPOTrainer``, such as ``peft_config`` and ``callbacks``.

    Raises:
        TypeError: If ``args`` is another kind of configuration.
        ValueError: For dropout, or an auxiliary loss of experts: log-probabilities must not be random.
    """

    _tag_names = ["trl", "target-po"]
    _name = "TargetPO"
    _paper = {
        "title": "Target Policy Optimization",
        "id": "2604.06159",
        "citation": "@article{kaddour2026target,\n    title   = {Target Policy Optimization},\n"
        "    author  = {Kaddour, Jean},\n    journal = {arXiv preprint arXiv:2604.06159},\n    year    = {2026}\n}",
    }

    def __init__(
        self,
        model: Any,
        reward_funcs: Any = None,
        args: TargetPOConfig | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ) -> None:
        if args is None:
            args = TargetPOConfig(output_dir="TargetPO")
        if not isinstance(args, TargetPOConfig):
            raise TypeError(f"args must be a TargetPOConfig, got {type(args).__name__}.")
        self._options = args.weight_options()
        self._watch = SaturationWatch(args.saturation_patience)
        self._scores: Tensor | None = None
        self._rollout: _Rollout | None = None
        self._weights: CandidateWeights | None = None
        super().__init__(model, reward_funcs, args, train_dataset, eval_dataset, processing_class, **kwargs)
        _refuse_dropout(self.model)
        if self.aux_loss_enabled:
            raise ValueError(
                f"router_aux_loss_coef is {self.router_aux_loss_coef}: a mixture of experts' load-balancing loss is "
                "not supported. Set router_aux_loss_coef=0.0."
            )

    # Rollouts

    def _calculate_rewards(self, inputs: Any, prompts: Any, completions: Any, completion_ids_list: Any) -> Tensor:
        rewards = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
        if self.model.training:
            self._scores = self._to_scores(rewards)
        return rewards

    def _to_scores(self, rewards: Tensor) -> Tensor:
        """Weighted sums of rewards ``(N, functions)``; NaN says that a function does not apply to a prompt."""
        size = self.num_generations
        missing = rewards.isnan().view(-1, size, rewards.shape[1])
        bad = (missing & ~missing.all(1, keepdim=True)).view_as(rewards) | rewards.isinf()
        if bad.any():
            row, function = bad.nonzero()[0].tolist()
            raise ValueError(
                f"The reward function {self.reward_func_names[function]!r} gave {rewards[row, function].item()} "
                f"(None counts as nan) for completion {row % size} of group {row // size}: the completions of a group "
                "are compared, so each needs a finite number. Return one for bad completions too, 0 for example."
            )
        if missing.all(-1).any():
            group = int(missing.all(-1).any(-1).nonzero()[0])
            raise ValueError(
                f"No reward function gave group {group} a score (None or NaN for all of its completions): "
                "each prompt needs at least one that applies to it."
            )
        return (rewards * self.reward_weights.to(rewards.device)).nansum(1)

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        if not self.model.training:
            return output
        assert self._scores is not None
        lengths = self.accelerator.gather(_token_mask(output).sum(-1))
        if not bool((lengths > 0).all()):
            row = int((lengths == 0).nonzero()[0])
            raise ValueError(
                f"Completion {row % self.num_generations} of group {row // self.num_generations} has no token of the "
                "model's own, so it has no log-probability to train. Check the rollout function or the tools' masks."
            )
        local = len(output["completion_ids"])
        first = self.accelerator.process_index * local
        # TRL shuffles the rows of every tensor together, so each completion carries its place in the global order.
        output["position"] = torch.arange(first, first + local, device=lengths.device)
        self._rollout = _Rollout(self._scores, lengths, first)
        return output

    # Weights

    def _log_probs(self, model: nn.Module, inputs: dict[str, Any], entropy: bool) -> tuple[Tensor, Tensor | None]:
        """Per-token log-probabilities and, on request, entropies of a micro-batch's completions, ``(B, T)``."""
        per_token, entropies, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
            torch.cat([inputs["prompt_mask"], inputs["completion_mask"]], dim=1),
            inputs["completion_ids"].size(1),
            compute_entropy=entropy,
            **{name: inputs[name] for name in _MODEL_INPUTS if name in inputs},
        )
        return per_token, entropies

    @torch.no_grad()
    def _all_log_probs(self, rollout: _Rollout, use_stored: bool) -> Tensor:
        """Log-probabilities of all completions of all processes, ``(N,)``."""
        pieces, positions = [], []
        with disable_gradient_checkpointing(self.model, self.args.gradient_checkpointing_kwargs):
            for inputs in self._buffered_inputs:
                stored = inputs.get("old_per_token_logps") if use_stored else None
                per_token = self._log_probs(self.model, inputs, entropy=False)[0] if stored is None else stored
                pieces.append((per_token * _token_mask(inputs)).sum(-1))
                positions.append(inputs["position"] - rollout.first)
        order = torch.cat(positions).argsort()
        return self.accelerator.gather(torch.cat(pieces)[order])

    def _refresh_weights(self) -> None:
        """Weights of all completions for the coming optimizer step; ``q`` and ``p_old`` stay those of the rollout."""
        rollout, size = self._rollout, self.num_generations
        assert rollout is not None
        starts = rollout.old_log_probs is None
        # With num_iterations > 1 TRL has computed the log-probabilities at sampling: they are also the current ones.
        log_probs = self._all_log_probs(rollout, use_stored=starts)
        if rollout.old_log_probs is None:
            rollout.old_log_probs = log_probs
        self._weights = candidate_weights(
            log_probs.view(-1, size),
            rollout.old_log_probs.view(-1, size),
            rollout.scores.to(log_probs.dtype).view(-1, size),
            self._options,
            lengths=rollout.lengths.view(-1, size),
        )
        values = {name: value.item() for name, value in self._weights.metrics.items()}
        if values["active_groups"] == 0:
            values.pop("tv", None)  # a mean over no groups
        for name, value in values.items():
            if name != "loss":
                self._metrics["train"][f"group/{name}"].append(value)
        if starts and "tv" in values:
            self._metrics["train"]["group/target_tv"].append(values["tv"])
            if self._watch.saturated(values["tv"]):
                warnings.warn(self._watch.message(self._options), stacklevel=2)

    # Loss

    def _compute_loss(self, model: nn.Module, inputs: dict[str, Any]) -> Tensor:
        """This micro-batch's part of the objective; processes are averaged, micro-batches added."""
        steps = self.args.gradient_accumulation_steps
        if self.current_gradient_accumulation_steps != steps:
            raise ValueError(
                f"This optimizer step has {self.current_gradient_accumulation_steps} micro-batches instead of {steps}, "
                "so its groups are not whole. Use a data set with a length, or one whose length fits."
            )
        if self._step % steps == 0:
            self._refresh_weights()
        assert self._weights is not None
        mask = _token_mask(inputs)
        per_token, entropies = self._log_probs(model, inputs, entropy=True)
        log_probs = (per_token * mask).sum(-1)
        weights = self._weights.weights.flatten()[inputs["position"]]
        surrogate = -(weights * log_probs).sum() * self.accelerator.num_processes
        # The gradient is the surrogate's; the value, which is logged, is the objective's.
        loss = surrogate - surrogate.detach() + self._weights.metrics["loss"] / steps
        if self.beta != 0.0:
            loss = loss + self._penalty(per_token, inputs["ref_per_token_logps"], mask)
        self._log_token_mean("entropy", entropies, mask)
        return loss

    def _penalty(self, per_token: Tensor, reference: Tensor, mask: Tensor) -> Tensor:
        """``beta`` times this micro-batch's part of the mean divergence from the reference model."""
        assert self._rollout is not None
        divergence = objectives.kl_penalty(objectives.bounded(per_token - reference))
        self._log_token_mean("kl", divergence, mask)
        by_token = self.args.kl_normalization == "token"
        count = self._rollout.lengths.sum() if by_token else len(self._rollout.lengths)
        return self.beta * (divergence * mask).sum() / count * self.accelerator.num_processes

    @torch.no_grad()
    def _log_token_mean(self, name: str, values: Tensor | None, mask: Tensor) -> None:
        assert values is not None
        totals = torch.stack([(values * mask).sum(), mask.sum().to(values.dtype)])
        total, count = self.accelerator.reduce(totals, reduction="sum").tolist()
        self._metrics["train"][name].append(total / max(count, 1.0))

    def prediction_step(self, model: nn.Module, inputs: Any, *args: Any, **kwargs: Any) -> tuple[None, None, None]:
        """Generates and scores, which logs the rewards; there is no loss to report."""
        self._prepare_inputs(inputs)
        return None, None, None


def _default(config: type, name: str) -> Any:
    return next(item.default for item in dataclasses.fields(config) if item.name == name)


def _token_mask(inputs: dict[str, Any]) -> Tensor:
    """Which tokens of the completions the model generated itself (tools' answers are not), ``(B, T)``."""
    mask = inputs["completion_mask"]
    return mask * inputs["tool_mask"] if "tool_mask" in inputs else mask


def _refuse_dropout(model: nn.Module) -> None:
    """Raise if the log-probability of a completion is random while training."""
    for name, module in model.named_modules():
        rate = module.p if isinstance(module, nn.Dropout) else getattr(module, "attention_dropout", 0.0)
        if isinstance(rate, float) and rate > 0:
            raise ValueError(
                f"{name or 'The model'} has dropout {rate}: the group's weights come from one pass and the gradient "
                "from another, so log-probabilities must not be random. Set lora_dropout=0.0 in the adapter's "
                "configuration, attention_dropout=0.0 in the model's, or disable_dropout=True in TargetPOConfig."
            )
