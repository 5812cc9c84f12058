"""Training on TRL: from settings to a saved model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from tpo_gym.llm.settings import RunSettings
from tpo_gym.llm.tasks import exact_match, make_tasks, prompt_rows, reward

LOG = "log.json"
"""File of the logged numbers, one dictionary per logged step, in the folder of the run."""


def gradient_accumulation_steps(settings: RunSettings, processes: int) -> int:
    """Micro-batches per optimizer step.

    Raises:
        ValueError: The completions of a step do not divide into micro-batches.
    """
    at_once = settings.per_device_batch_size * processes
    steps, rest = divmod(settings.batch_size, at_once)
    if rest or not steps:
        raise ValueError(
            f"group_size x prompts_per_step = {settings.batch_size} completions do not divide into micro-batches of "
            f"per_device_batch_size={settings.per_device_batch_size} on {processes} processes: choose a divisor of "
            f"{settings.batch_size} / {processes}."
        )
    return steps


def trainer_arguments(settings: RunSettings, processes: int = 1) -> dict[str, Any]:
    """The settings as arguments of ``TargetPOConfig``.

    Args:
        settings: Of the run.
        processes: How many of them train together.

    Raises:
        ValueError: As in :func:`gradient_accumulation_steps`.
    """
    import torch

    gpu = torch.cuda.is_available()
    arguments: dict[str, Any] = {
        "output_dir": settings.output,
        "method": settings.method,
        "num_generations": settings.group_size,
        "per_device_train_batch_size": settings.per_device_batch_size,
        "gradient_accumulation_steps": gradient_accumulation_steps(settings, processes),
        "num_iterations": settings.epochs,
        "max_steps": settings.steps * settings.epochs,
        "learning_rate": settings.learning_rate,
        "lr_scheduler_type": "constant_with_warmup",
        "warmup_steps": settings.warmup_steps,
        "beta": settings.kl_coef,
        "temperature": settings.temperature,
        "max_completion_length": settings.max_completion_length,
        "chat_template_kwargs": settings.chat_template_kwargs or None,
        "model_init_kwargs": {"dtype": settings.dtype},
        "bf16": settings.bf16 and gpu,
        "gradient_checkpointing": gpu,
        "reward_weights": [1.0, 0.0],
        "eval_strategy": "steps" if settings.eval_every else "no",
        "eval_steps": settings.eval_every * settings.epochs or None,
        "num_generations_eval": 1,
        "per_device_eval_batch_size": settings.per_device_batch_size,
        "save_strategy": "steps" if settings.save_every else "no",
        "save_steps": settings.save_every * settings.epochs or 500,
        "logging_steps": 1,
        "seed": settings.seed,
        "report_to": settings.report_to,
        "disable_tqdm": not os.isatty(2),
    }
    if settings.vllm != "none":
        arguments |= {"use_vllm": True, "vllm_mode": settings.vllm}
        if settings.vllm == "server":
            arguments["vllm_server_base_url"] = settings.vllm_server
    return arguments | settings.trl


def train(settings: RunSettings) -> Path:
    """Trains and saves the model, the tokenizer, the settings and the log in the folder of the run.

    Under ``accelerate launch`` every process calls this. A run that left checkpoints goes on from the last one.

    Args:
        settings: Of the run; the backend must be TRL.

    Returns:
        The folder of the model.

    Raises:
        ImportError: The extra ``llm`` is not installed.
        OSError: The model or the data cannot be read.
        ValueError: The settings do not fit together.
    """
    if settings.backend != "trl":
        raise ValueError(f"backend={settings.backend!r}: this function trains on TRL; see tpo_gym.llm.verl_command.")
    from datasets import Dataset
    from transformers import AutoTokenizer
    from transformers.trainer_utils import get_last_checkpoint

    from tpo_gym.llm.trl import TargetPOConfig, TargetPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(settings.model, padding_side="left")
    task, train_on, held_out_task, held_out = task_of(settings)
    chat = tokenizer.chat_template is not None and not settings.short
    trainer = TargetPOTrainer(
        model=settings.model,
        reward_funcs=[reward, exact_match],
        args=TargetPOConfig(**trainer_arguments(settings, int(os.environ.get("WORLD_SIZE", "1")))),
        train_dataset=Dataset.from_list(prompt_rows(task, train_on, chat)),
        eval_dataset=Dataset.from_list(prompt_rows(held_out_task, held_out, chat)) if settings.eval_every else None,
        processing_class=tokenizer,
        peft_config=_adapters(settings),
    )
    output = Path(settings.output)
    if trainer.is_world_process_zero():
        settings.save(output / "settings.yaml")
    last = get_last_checkpoint(settings.output) if output.is_dir() else None
    trainer.train(resume_from_checkpoint=last)
    trainer.save_model()
    if trainer.is_world_process_zero():
        (output / LOG).write_text(json.dumps(trainer.state.log_history, indent=1))
    return output


def task_of(settings: RunSettings) -> tuple[Any, list[int], Any, list[int]]:
    """The questions of a run; see :func:`~tpo_gym.llm.tasks.make_tasks`."""
    return make_tasks(
        settings.task,
        config=settings.task_config,
        seed=settings.task_seed,
        train_size=settings.train_size,
        eval_size=settings.eval_size,
        source=settings.source,
        eval_source=settings.eval_source,
        min_credit=settings.min_credit,
        short=settings.short,
    )


def _adapters(settings: RunSettings) -> Any:
    if not settings.lora_rank:
        return None
    from peft import LoraConfig

    return LoraConfig(
        r=settings.lora_rank,
        lora_alpha=settings.lora_alpha,
        lora_dropout=0.0,  # log-probabilities must not be random
        target_modules="all-linear",
        task_type="CAUSAL_LM",
    )
