"""A small model made on the spot and trained on worked solutions, so that reinforcement learning has where to start."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from tpo_gym.llm.settings import RunSettings
from tpo_gym.llm.solutions import solution
from tpo_gym.llm.tasks import prompt_rows
from tpo_gym.llm.train import task_of


def warmup(
    settings: RunSettings,
    *,
    steps: int = 400,
    batch_size: int = 64,
    learning_rate: float = 2e-3,
    hidden_size: int = 128,
    layers: int = 5,
    chain_of_thought: float = 0.0,
) -> Path:
    """Makes a model of the Qwen3 architecture with a character tokenizer and trains it on solutions.

    It sees only questions of the task's training part. Where a question has several right answers, each pass shows
    another one.

    Args:
        settings: The task, ``seed``, and in ``model`` the folder to save to. Nothing else is read.
        steps: Optimizer steps, at a learning rate that falls to 0 along a cosine. Fewer leave more to learn.
        batch_size: Solutions per step.
        learning_rate: Of AdamW, at its highest.
        hidden_size: Width; 128 with 5 layers are about a million parameters.
        layers: Number of layers.
        chain_of_thought: Fraction of the solutions that are written in steps before the answer; the others are the
            answer alone. In between, the model starts with two ways to answer, and rewards decide.

    Returns:
        The folder of the model.

    Raises:
        ImportError: The extra ``llm`` is not installed.
        ValueError: The task has no solutions, or a setting is out of range.
    """
    if steps < 1 or batch_size < 1:
        raise ValueError(f"steps={steps} and batch_size={batch_size} must be at least 1.")
    if not 0 <= chain_of_thought <= 1:
        raise ValueError(f"chain_of_thought={chain_of_thought} must lie in [0, 1]: it is a fraction of the solutions.")
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    from tpo_gym.llm.tiny import character_tokenizer, tiny_model

    rng = random.Random(settings.seed)
    task, train_on, _, _ = task_of(settings)
    drawn = [rng.choice(train_on) for _ in range(steps * batch_size)]
    prompts = prompt_rows(task, drawn, chat=False)
    tokenizer = character_tokenizer()
    tokenizer.chat_template = None  # the model learns plain text, and no conversation may wrap its prompts
    rows: list[dict[str, Any]] = []
    for index, row in zip(drawn, prompts, strict=True):
        text = solution(task, index, rng, rng.random() < chain_of_thought)
        rows.append({"prompt": row["prompt"], "completion": text + tokenizer.eos_token})
    trainer = SFTTrainer(
        model=tiny_model(tokenizer, hidden_size=hidden_size, layers=layers, seed=settings.seed),
        args=SFTConfig(
            output_dir=settings.model,
            max_steps=steps,
            per_device_train_batch_size=batch_size,
            learning_rate=learning_rate,
            lr_scheduler_type="cosine",
            warmup_steps=min(20, steps // 5),
            completion_only_loss=True,
            max_length=None,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_steps=50,
            report_to="none",
            seed=settings.seed,
            use_cpu=not torch.cuda.is_available(),
            disable_tqdm=not os.isatty(2),
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()
    return Path(settings.model)
