"""Training on verl: the settings of a run as data files and one command with Hydra overrides.

verl starts its own processes through Ray, so nothing is trained here. Target Policy Optimization on verl is a plug-in
of this package that verl loads by its entry point; GRPO is verl's own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tpo_gym.llm.settings import RunSettings
from tpo_gym.llm.tasks import write_parquet
from tpo_gym.llm.train import task_of


def write_data(settings: RunSettings) -> tuple[Path, Path]:
    """Writes the questions to train on and the held-out ones into the folder of the run, as files for verl.

    Raises:
        ImportError: The package ``datasets`` or the task's package is missing.
        ValueError: The task's settings do not fit together.
    """
    task, train_on, held_out_task, held_out = task_of(settings)
    folder = Path(settings.output) / "data"
    return (
        write_parquet(task, train_on, folder / "train.parquet", "train"),
        write_parquet(held_out_task, held_out, folder / "test.parquet", "test"),
    )


def verl_command(settings: RunSettings, train_file: Path, test_file: Path) -> list[str]:
    """The command that trains with these settings on verl.

    Every step is one rollout batch of ``prompts_per_step`` questions and ``epochs`` optimizer steps on all of it.
    ``loss_agg_mode`` stays verl's for both methods, so that the penalty on the divergence from the first model is the
    same; TPO's own loss sums over tokens and averages over candidates whatever it is.

    Args:
        settings: Of the run.
        train_file: From :func:`write_data`.
        test_file: From :func:`write_data`.

    Raises:
        ValueError: The method is not one of verl's.
    """
    if settings.method not in ("target_po", "grpo"):
        raise ValueError(f"method={settings.method!r} is not offered on verl: use 'target_po' or 'grpo', or TRL.")
    actor, rollout, model = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    options: dict[str, object] = {
        "data.train_files": train_file,
        "data.val_files": test_file,
        "data.train_batch_size": settings.prompts_per_step,
        "data.max_prompt_length": settings.max_prompt_length,
        "data.max_response_length": settings.max_completion_length,
        "data.filter_overlong_prompts": True,
        "data.seed": settings.seed,
        f"{model}.path": settings.model,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": settings.group_size,
        f"{rollout}.temperature": settings.temperature,
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.seed": settings.seed,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": settings.per_device_batch_size,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": settings.per_device_batch_size,
        f"{actor}.ppo_mini_batch_size": settings.prompts_per_step,
        f"{actor}.ppo_micro_batch_size_per_gpu": settings.per_device_batch_size,
        f"{actor}.ppo_epochs": settings.epochs,
        f"{actor}.optim.lr": settings.learning_rate,
        f"{actor}.optim.lr_warmup_steps": settings.warmup_steps,
        f"{actor}.optim.weight_decay": 0.0,
        f"{actor}.entropy_coeff": 0,
        f"{actor}.use_kl_loss": settings.kl_coef > 0,
        f"{actor}.kl_loss_coef": settings.kl_coef,
        f"{actor}.kl_loss_type": "low_var_kl",
        "algorithm.adv_estimator": "grpo",
        "algorithm.use_kl_in_reward": False,
        "reward.custom_reward_function.path": "pkg://tpo_gym.llm.tasks",
        "reward.custom_reward_function.name": "compute_score",
        "trainer.n_gpus_per_node": settings.n_devices,
        "trainer.nnodes": settings.n_machines,
        "trainer.total_training_steps": settings.steps,
        "trainer.total_epochs": -(-settings.steps * settings.prompts_per_step // settings.train_size) + 1,
        "trainer.test_freq": settings.eval_every or -1,
        "trainer.save_freq": settings.save_every or settings.steps,
        "trainer.project_name": "tpo_gym",
        "trainer.experiment_name": f"{settings.task}-{settings.method}-{settings.seed}",
        "trainer.default_local_dir": Path(settings.output) / "checkpoints",
        "trainer.logger": f"[console{'' if settings.report_to == 'none' else ',' + settings.report_to}]",
    }
    if settings.method == "target_po":
        options |= {
            "trainer.v1.trainer_mode": "tpo_sync",
            f"{actor}.policy_loss.loss_mode": "tpo",
        }
        if "group_policy" in settings.trl:  # one setting for both engines
            options["+trainer.v1.tpo_sync.group_policy"] = settings.trl["group_policy"]
    if settings.lora_rank:
        options |= {
            f"{model}.lora_rank": settings.lora_rank,
            f"{model}.lora_alpha": settings.lora_alpha,
            f"{model}.target_modules": "all-linear",
            f"{rollout}.load_format": "safetensors",
        }
    for name, value in settings.chat_template_kwargs.items():
        options[f"+data.apply_chat_template_kwargs.{name}"] = value
    options |= settings.verl
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{name}={value}" for name, value in options.items())]


def run_on_verl(settings: RunSettings) -> int:
    """Writes the data and the settings, and runs verl; returns its exit status."""
    settings.save(Path(settings.output) / "settings.yaml")
    environment = dict(os.environ)
    if settings.method == "target_po":  # verl tells of an entry point that fails at debug level only; this one is loud
        environment["VERL_USE_EXTERNAL_MODULES"] = "tpo_gym.llm.verl.plugin"
    return subprocess.run(verl_command(settings, *write_data(settings)), check=False, env=environment).returncode
