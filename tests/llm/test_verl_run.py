"""verl's own loop on a CPU for two steps of three epochs: Ray, TransferQueue, two FSDP processes, dynamic batches.

What verl_cpu.py replaces is named there. The oracle takes the recorded completions and the weights before a step, runs
one sequence at a time, differentiates the whole groups' cross-entropy and steps with plain SGD; verl's weights after
the step must be the same.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytestmark = pytest.mark.slow
EPOCHS, ETA, RATE, ROWS = 3, 0.7, 0.05, 20


def command(folder):
    actor, rollout, model = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
    options = {
        "data.train_files": folder / "train.parquet",
        "data.val_files": folder / "train.parquet",
        "data.train_batch_size": 4,
        "data.max_prompt_length": 32,
        "data.max_response_length": 12,
        "data.dataloader_num_workers": 0,
        f"{model}.path": folder / "model",
        f"+{model}.override_config.attn_implementation": "eager",
        f"{model}.use_remove_padding": False,
        f"{model}.enable_gradient_checkpointing": False,
        f"{rollout}.name": "vllm",
        f"{rollout}.n": 5,
        f"+{rollout}.agent.agent_loop_manager_class": "verl_cpu.Manager",
        f"{rollout}.log_prob_use_dynamic_bsz": True,
        f"{rollout}.log_prob_max_token_len_per_gpu": 130,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.fsdp_config.model_dtype": "fp32",
        f"+{actor}.fsdp_config.mixed_precision.param_dtype": "fp32",
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{actor}.use_dynamic_bsz": True,
        f"{actor}.ppo_max_token_len_per_gpu": 130,  # about six rows; verl's padding rows alone have 128 tokens
        f"{actor}.ppo_mini_batch_size": 4,
        f"{actor}.ppo_epochs": EPOCHS,
        f"{actor}.optim.optimizer": "SGD",
        f"{actor}.optim.lr": RATE,
        f"{actor}.optim.lr_warmup_steps": 1,
        f"{actor}.optim.weight_decay": 0,
        f"{actor}.optim.clip_grad": 1000,
        f"{actor}.policy_loss.loss_mode": "tpo",
        f"{actor}.loss_agg_mode": "seq-mean-token-sum",
        "actor_rollout_ref.hybrid_engine": False,
        "algorithm.adv_estimator": "grpo",
        "reward.custom_reward_function.path": "pkg://tpo_gym.llm.tasks",
        "reward.custom_reward_function.name": "compute_score",
        "reward.num_workers": 1,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "trainer.v1.trainer_mode": "tpo_cpu",
        "+trainer.v1.tpo_sync.eta": ETA,
        "trainer.n_gpus_per_node": 2,
        "trainer.nnodes": 1,
        "trainer.device": "cpu",
        "trainer.total_training_steps": 2,
        "trainer.val_before_train": False,
        "trainer.logger": "[console]",
        "trainer.default_local_dir": folder / "checkpoints",
        "ray_kwargs.ray_init.num_cpus": 32,
        "+ray_kwargs.ray_init.num_gpus": 2,
    }
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{name}={value}" for name, value in options.items())]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run."""
    for name in ("verl", "transfer_queue", "pandas"):
        pytest.importorskip(name, reason="needs the extra verl")
    import pandas

    from tpo_gym.llm.tiny import character_tokenizer, tiny_model

    folder = tmp_path_factory.mktemp("verl")
    tokenizer = character_tokenizer("abcdefgh =+?")
    tokenizer.save_pretrained(folder / "model")
    tiny_model(tokenizer, hidden_size=32, layers=2).save_pretrained(folder / "model")
    rows = [
        {
            "data_source": "openai/gsm8k",
            "prompt": [{"role": "user", "content": letter * (1 + number % 3) + "?"}],
            "reward_model": {"style": "rule", "ground_truth": "5"},
            "extra_info": {"index": number},
        }
        for number, letter in enumerate("abcdefgh")
    ]
    pandas.DataFrame(rows).to_parquet(folder / "train.parquet")
    environment = {
        "PYTHONPATH": str(Path(__file__).parent),
        "VERL_USE_EXTERNAL_MODULES": "verl_cpu",
        "VERL_ENGINE_DEVICE": "cuda",  # the name under which verl keeps its FSDP engine
        "VERL_CPU_FOLDER": str(folder),
        "OMP_NUM_THREADS": "1",
    }
    done = subprocess.run(
        command(folder), env=os.environ | environment, cwd=folder, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    return folder


class Oracle:
    def __init__(self, folder, step):
        from transformers import AutoModelForCausalLM

        self.batch = torch.load(folder / f"batch{step}.pt", weights_only=False)
        self.model = AutoModelForCausalLM.from_pretrained(folder / "model", attn_implementation="eager").double()
        self.model.load_state_dict(torch.load(folder / f"weights{step - 1}.pt"), strict=False)
        self.groups = {}
        for row, key in enumerate(self.batch["keys"]):
            if not key.startswith("pad"):
                self.groups.setdefault(key.split("_")[0], []).append(row)

    def log_prob(self, row):
        ids, mask = self.batch["input_ids"][row], self.batch["response_mask"][row]
        logits = self.model(ids.unsqueeze(0)).logits[0, -len(mask) - 1 : -1]
        tokens = torch.log_softmax(logits, -1).gather(-1, ids[-len(mask) :, None]).squeeze(-1)
        return (tokens * mask).sum()

    def loss(self, old):
        losses = []
        for name, rows in self.groups.items():
            scores = torch.stack([self.batch["rm_scores"][row].double().sum() for row in rows])
            deviation = scores.std(correction=0)
            u = (scores - scores.mean()) / deviation if deviation > 0 else torch.zeros_like(scores)
            ratio = torch.stack([self.log_prob(row) for row in rows]) - old[name]
            losses.append(-(torch.softmax(u / ETA, 0) * torch.log_softmax(ratio, 0)).sum())
        return torch.stack(losses).mean()

    def train(self, first):
        """Plain SGD on the groups, with the warmup that verl is told to make over one batch."""
        with torch.no_grad():
            old = {name: torch.stack([self.log_prob(row) for row in rows]) for name, rows in self.groups.items()}
        losses = []
        for epoch in range(EPOCHS):
            loss = self.loss(old)
            losses.append(loss.item())
            rate = RATE * min(1.0, (first + epoch) / EPOCHS)
            parameters = list(self.model.parameters())
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
                parameter.data -= rate * gradient
        return losses


@pytest.mark.parametrize("step", [1, 2])
def test_verls_steps_are_those_of_whole_groups(run, step):
    oracle = Oracle(run, step)
    sizes = sorted(len(rows) for rows in oracle.groups.values())
    assert sizes == [4, 5, 5, 5]  # one candidate is missing
    assert len(oracle.batch["keys"]) == ROWS  # and verl has added a row
    assert len({len(row) for row in oracle.batch["responses"]}) > 1
    before = {name: value.clone() for name, value in oracle.model.state_dict().items()}
    losses = oracle.train(first=EPOCHS * (step - 1))
    assert oracle.batch["metrics"]["group/cross_entropy"] == pytest.approx(losses[-1], rel=1e-4)
    assert losses[-1] < losses[0]
    after = torch.load(run / f"weights{step}.pt")
    moved = torch.cat([(oracle.model.state_dict()[name] - before[name]).flatten() for name in after])
    verls = torch.cat([(after[name].double() - before[name]).flatten() for name in after])
    assert float((verls - moved).norm() / moved.norm()) < 1e-4
