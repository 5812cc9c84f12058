"""Which group policy should TargetPOTrainer use by default? A study on tiny fresh models; prints Markdown tables.

First, without training: how far the target asks the policy to move, by the length of the completions. Then learning:
the reward is the share of sevens in the completion, so every candidate scores differently and groups always have a
signal. All group policies, and GRPO's weights, train with the same prompts, settings and seeds.

    python scripts/group_policy_study.py --seeds 3 --lengths 10 30
"""

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import PrinterCallback

from tpo_gym.llm.tiny import character_tokenizer, tiny_model
from tpo_gym.llm.trl import TargetPOConfig, TargetPOTrainer
from tpo_gym.llm.weights import GROUP_POLICIES, WeightOptions, candidate_weights

TOKENIZER = character_tokenizer("0123456789+=")
PROMPTS = ["1+2=", "12+34=", "7=", "9+9="]
VARIANTS: dict[str, dict[str, Any]] = {
    "sum": {"group_policy": "sum"},
    "mean": {"group_policy": "mean"},
    "ratio": {"group_policy": "ratio"},
    "GRPO": {"method": "grpo"},
}


@torch.no_grad()
def signal(policy: str, length: int, groups: int = 16, size: int = 16) -> float:
    """TV(q, p_old) of completions of one length, sampled from a fresh model, with random scores of 0 or 1."""
    torch.manual_seed(0)
    model = tiny_model(TOKENIZER, hidden_size=64, layers=2, heads=2)
    batch = TOKENIZER([PROMPTS[0]] * groups * size, return_tensors="pt")
    ids = model.generate(**batch, min_new_tokens=length, max_new_tokens=length, do_sample=True)
    start = batch["input_ids"].shape[1]
    every = torch.log_softmax(model(ids).logits[:, start - 1 : -1], -1)
    log_probs = every.gather(-1, ids[:, start:, None]).sum((1, 2)).view(groups, size)
    scores = (torch.rand(groups, size) < 0.3).float()
    options = WeightOptions(group_policy=policy)  # type: ignore[arg-type]
    lengths = torch.full_like(log_probs, length)
    return candidate_weights(log_probs, log_probs, scores, options, lengths=lengths).metrics["tv"].item()


def rewards(settings: dict[str, Any], length: int, steps: int, seed: int) -> list[float]:
    """Mean reward of each step's completions."""

    def sevens(completions: list[str], **_: object) -> list[float]:
        return [text.count("7") / length for text in completions]

    arguments = TargetPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=16,
        gradient_accumulation_steps=2,
        num_generations=8,
        max_completion_length=length,
        max_steps=steps,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        seed=seed,
        bf16=False,
        use_cpu=True,
        gradient_checkpointing=False,
        report_to="none",
        logging_steps=1,
        save_strategy="no",
        disable_tqdm=True,
        **settings,
    )
    model = tiny_model(TOKENIZER, hidden_size=32, layers=2, heads=2, seed=seed)
    data = Dataset.from_dict({"prompt": PROMPTS * 4})
    trainer = TargetPOTrainer(model, sevens, arguments, data, processing_class=TOKENIZER)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    return [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--lengths", type=int, nargs="+", default=[10, 30], help="longest completions of the training")
    parser.add_argument("--out", type=Path, help="also write the tables to this file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    lengths = (8, 16, 32, 64, 128, 256)
    lines = ["| TV(q, p_old), tokens: | " + " | ".join(map(str, lengths)) + " |", "|---|" + "---:|" * len(lengths)]
    for policy in GROUP_POLICIES:
        lines.append(f"| {policy} | " + " | ".join(f"{signal(policy, length):.3f}" for length in lengths) + " |")
    lines += ["", f"| reward, last 10 of {options.steps} steps | tokens | each seed |", "|---|---:|---|"]
    for length in options.lengths:
        for name, settings in VARIANTS.items():
            runs = [rewards(settings, length, options.steps, seed) for seed in range(options.seeds)]
            lines.append(f"| {name} | {length} | " + ", ".join(f"{statistics.fmean(r[-10:]):.2f}" for r in runs) + " |")
            print(lines[-1], flush=True)
    print("\n".join(lines))
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
