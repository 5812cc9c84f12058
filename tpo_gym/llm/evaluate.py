"""How a model answers held-out questions: exact matches and scores, with an interval over questions."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tpo_gym.llm.settings import RunSettings
from tpo_gym.llm.tasks import exact_match, prompt_rows, reward
from tpo_gym.llm.train import task_of

RESAMPLES = 2000


class Interval(NamedTuple):
    """A mean and the ends of its 95 % interval."""

    mean: float
    low: float
    high: float


def bootstrap(values: Sequence[float] | np.ndarray, seed: int = 0) -> Interval:
    """Mean and percentile-bootstrap interval over independent values.

    It says how well the questions at hand measure this one model; how training differs from seed to seed is another
    matter, for which several runs are needed.

    Args:
        values: One per question.
        seed: Of the resampling.

    Raises:
        ValueError: There are no values.
    """
    array = np.asarray(values, dtype=np.float64)
    if not array.size:
        raise ValueError("There are no values to take a mean of.")
    rng = np.random.default_rng(seed)
    means = array[rng.integers(array.size, size=(RESAMPLES, array.size))].mean(1)
    low, high = np.quantile(means, [0.025, 0.975])
    return Interval(float(array.mean()), float(low), float(high))


def evaluate(
    settings: RunSettings, *, samples: int = 0, batch_size: int = 64, held_out: bool = True, device: str | None = None
) -> dict[str, Any]:
    """Answers the held-out questions and grades the answers.

    Args:
        settings: Model, task, ``temperature``, ``max_completion_length``, ``seed``.
        samples: Sampled completions per question; 0: one completion by greedy decoding.
        batch_size: Completions at once.
        held_out: False: on the questions to train on instead, as many as there are held-out ones.
        device: Where to run; None: a GPU where there is one.

    Returns:
        ``exact_match`` and ``score`` (mean, low, high over questions), ``answered`` (fraction of completions that
        ended before the limit), ``per_question`` values, the number of questions, and ``examples``.

    Raises:
        ImportError: The extra ``llm`` is not installed.
        OSError: The model or the data cannot be read.
        ValueError: The task's settings do not fit together.
    """
    import torch
    from transformers import AutoTokenizer

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = AutoTokenizer.from_pretrained(settings.model, padding_side="left")
    model = _load(settings).to(device).eval()
    train_task, train_on, task, indices = task_of(settings)
    if not held_out:
        task, indices = train_task, train_on[: len(indices)]
    chat = tokenizer.chat_template is not None and not settings.short
    per_question = max(samples, 1)
    rows = [row for row in prompt_rows(task, indices, chat) for _ in range(per_question)]
    torch.manual_seed(settings.seed)
    texts: list[str] = []
    ended = 0
    for start in range(0, len(rows), batch_size):
        batch = [row["prompt"] for row in rows[start : start + batch_size]]
        new_texts, new_ended = _complete(model, tokenizer, batch, settings, sample=samples > 0)
        texts += new_texts
        ended += new_ended
    columns = {name: [row[name] for row in rows] for name in ("data_source", "ground_truth")}
    exact = np.reshape(exact_match(texts, **columns), (-1, per_question)).mean(1)
    scores = np.reshape(reward(texts, **columns), (-1, per_question)).mean(1)
    return {
        "model": settings.model,
        "task": settings.task,
        "questions": len(indices),
        "held_out": held_out,
        "samples": samples,
        "exact_match": bootstrap(exact)._asdict(),
        "score": bootstrap(scores)._asdict(),
        "answered": ended / len(rows),
        "per_question": {"exact_match": exact.tolist(), "score": scores.tolist()},
        "examples": [{"prompt": rows[i]["prompt"], "completion": texts[i]} for i in range(min(3, len(rows)))],
    }


def _load(settings: RunSettings) -> Any:
    """The model; adapters saved by a run are merged into the model they belong to."""
    from transformers import AutoModelForCausalLM

    if (Path(settings.model) / "adapter_config.json").is_file():
        from peft import AutoPeftModelForCausalLM

        return AutoPeftModelForCausalLM.from_pretrained(settings.model, dtype=settings.dtype).merge_and_unload()
    return AutoModelForCausalLM.from_pretrained(settings.model, dtype=settings.dtype)


def _complete(
    model: Any, tokenizer: Any, prompts: list[Any], settings: RunSettings, sample: bool
) -> tuple[list[str], int]:
    """Completions of a batch of prompts, and how many of them ended by themselves."""
    import torch

    if isinstance(prompts[0], str):
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, add_special_tokens=False)
    else:
        inputs = tokenizer.apply_chat_template(
            prompts,
            add_generation_prompt=True,
            return_tensors="pt",
            return_dict=True,
            padding=True,
            **settings.chat_template_kwargs,
        )
    inputs = {name: inputs[name].to(model.device) for name in ("input_ids", "attention_mask")}
    how: dict[str, Any] = {"do_sample": sample}
    if sample:
        how |= {"temperature": settings.temperature, "top_k": 0, "top_p": 1.0}
    with torch.inference_mode():
        output = model.generate(
            **inputs, max_new_tokens=settings.max_completion_length, pad_token_id=tokenizer.pad_token_id, **how
        )
    tokens = output[:, inputs["input_ids"].shape[1] :]
    ends = torch.as_tensor(model.generation_config.eos_token_id, device=tokens.device).reshape(-1)
    ended = int(torch.isin(tokens, ends).any(-1).sum())
    return tokenizer.batch_decode(tokens, skip_special_tokens=True), ended


def write_result(result: dict[str, Any], path: Path) -> None:
    """Writes a result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1, ensure_ascii=False))
