"""A short run of TargetPOTrainer that records what each optimizer step saw. Used by test_trl.py, also as a script:

torchrun --nproc-per-node 2 trl_worker.py FOLDER '{"num_iterations": 2}'
"""

import json
import os
import sys
from pathlib import Path

import torch
from datasets import Dataset
from peft import LoraConfig
from transformers import TrainerCallback

from tpo_gym.llm.tiny import character_tokenizer, tiny_model
from tpo_gym.llm.trl import TargetPOConfig, TargetPOTrainer

TOKENIZER = character_tokenizer("0123456789+=")
PROMPTS = ["1+2=", "12+34=", "7=", "9+9+9=", "5+50=", "83=", "6+1=", "40+4="]
LORA = LoraConfig(r=2, lora_alpha=8, lora_dropout=0.0, target_modules=["q_proj", "v_proj", "down_proj"])


def reward(completions, **_):
    """Multiples of 1/4, exact in any precision."""
    return [
        (4 * text.count("7") - text.count("1") + sum(digit in "02468" for digit in text)) / 4 for text in completions
    ]


def model():
    fresh = tiny_model(TOKENIZER, hidden_size=16, layers=2, heads=2, seed=1, dtype=torch.float64)
    with torch.no_grad():  # fresh weights give nearly uniform tokens; wider ones tell the candidates apart
        for parameter in fresh.parameters():
            if parameter.ndim == 2:
                parameter.mul_(4)
    return fresh


class InFloat64(TargetPOTrainer):
    """TRL's fused head always computes in float32; this one computes as the model does."""

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, compute_entropy=False, **_
    ):
        logps, entropies = [], []
        size = batch_size or len(input_ids)
        for ids, seen in zip(input_ids.split(size), attention_mask.split(size), strict=True):
            logits = model(input_ids=ids, attention_mask=seen).logits[:, -logits_to_keep - 1 : -1]
            all_logps = torch.log_softmax(logits / self.temperature, -1)
            logps.append(all_logps.gather(-1, ids[:, -logits_to_keep:, None]).squeeze(-1))
            entropies.append(-(all_logps.exp() * all_logps).sum(-1))
        return torch.cat(logps), torch.cat(entropies) if compute_entropy else None, None


class Recorder(TrainerCallback):
    """Parameters and gradients of each optimizer step, and the sequences of this process."""

    def __init__(self):
        self.steps = []
        self.trainer = None

    def on_pre_optimizer_step(self, *_, **__):
        trainer = self.trainer
        named = [(name, p) for name, p in trainer.model.named_parameters() if p.requires_grad]
        keys = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask")
        self.steps.append(
            {
                "parameters": {name: p.detach().clone() for name, p in named},
                "gradients": {name: p.grad.clone() for name, p in named},
                "batches": [{key: batch[key] for key in keys} for batch in trainer._buffered_inputs],
            }
        )


def run(folder, exact=True, lora=False, steps=2, source=None, resume=None, reward_funcs=reward, **settings):
    """Train for a few steps; return the recorded steps and the trainer, which has the log."""
    arguments = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 4,
        "num_generations": 8,
        "max_completion_length": 10,
        "max_steps": steps,
        "learning_rate": 3e-3,
        "lr_scheduler_type": "constant",
        "max_grad_norm": 0.0,
        "temperature": 0.9,
        "bf16": False,
        "use_cpu": True,
        "report_to": "none",
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        **settings,
    }
    recorder = Recorder()
    trainer = (InFloat64 if exact else TargetPOTrainer)(
        source or model(),
        reward_funcs,
        TargetPOConfig(**arguments),
        Dataset.from_dict({"prompt": PROMPTS}),
        Dataset.from_dict({"prompt": PROMPTS[:2]}) if "eval_strategy" in settings else None,
        processing_class=TOKENIZER,
        peft_config=LORA if lora is True else lora or None,
        callbacks=[recorder],
    )
    recorder.trainer = trainer
    trainer.train(resume_from_checkpoint=resume)
    return recorder.steps, trainer


if __name__ == "__main__":
    torch.set_num_threads(1)
    out = Path(sys.argv[1])
    for index, settings in enumerate(json.loads(sys.argv[2])):
        recorded, _ = run(out / str(index), **settings)
        torch.save(recorded, out / f"{index}-rank{os.environ['RANK']}.pt")
