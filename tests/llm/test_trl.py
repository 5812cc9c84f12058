"""TargetPOTrainer against autograd through the whole group's loss, in float64.

The oracle shares nothing with the trainer: it runs each sequence alone, finds the groups by their prompts, scores the
texts again, and differentiates the objective as the paper writes it. (It keeps the padding on the left, since the
model's rotary positions are float32 whatever the model's type.)
"""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

for name in ("trl", "peft", "datasets"):
    pytest.importorskip(name, reason="needs the extra llm")
tiny_model = pytest.importorskip("tpo_gym.llm.tiny").tiny_model

WORKER = Path(__file__).with_name("trl_worker.py")
TOLERANCE = 1e-6


@pytest.fixture(scope="module")
def worker():
    return runpy.run_path(str(WORKER))


def sequences(step):
    """Prompt, which of its tokens are no padding, and completion, of each row of a step's batches."""
    for batch in step["batches"]:
        for row in range(len(batch["prompt_ids"])):
            completion = batch["completion_ids"][row][batch["completion_mask"][row].bool()]
            yield batch["prompt_ids"][row], batch["prompt_mask"][row], completion


class Oracle:
    """Losses and gradients of the recorded steps, one sequence at a time."""

    def __init__(self, worker, ranks, epochs, lora=False, reference=None, temperature=0.9):
        self.worker, self.ranks, self.epochs, self.temperature = worker, ranks, epochs, temperature
        self.model = worker["model"]()
        if lora:
            from peft import get_peft_model

            self.model = get_peft_model(self.model, worker["LORA"])
        self.reference = reference

    def groups(self, step):
        """Sequences by prompt, whatever process and micro-batch they came from."""
        found = {}
        for steps in self.ranks:
            for row in sequences(steps[step]):
                found.setdefault(self.text(row[0]), []).append(row)
        return found

    def text(self, ids):
        return self.worker["TOKENIZER"].decode(ids, skip_special_tokens=True)

    def load(self, step):
        own = dict(self.model.named_parameters())
        with torch.no_grad():
            for name, value in self.ranks[0][step]["parameters"].items():
                own[name].copy_(value)

    def token_log_probs(self, model, prompt, prompt_mask, completion):
        ids = torch.cat([prompt, completion]).unsqueeze(0)
        seen = torch.cat([prompt_mask, torch.ones_like(completion)]).unsqueeze(0)
        logits = model(ids, attention_mask=seen).logits[0, len(prompt) - 1 : -1] / self.temperature
        return torch.log_softmax(logits, -1).gather(-1, completion.unsqueeze(-1)).squeeze(-1)

    def table(self, model, step):
        """Per-token log-probabilities of each group's candidates."""
        return [[self.token_log_probs(model, *row) for row in group] for group in self.groups(step).values()]

    def scores(self, step):
        texts = [[self.text(completion) for *_, completion in group] for group in self.groups(step).values()]
        return torch.stack([torch.tensor(self.worker["reward"](group), dtype=torch.float64) for group in texts])

    def step(self, step, objective, beta=0.0, by_token=True):
        """The loss and the gradients that this step should have had."""
        self.load(step - step % self.epochs)
        with torch.no_grad():
            old = torch.stack([torch.stack([t.sum() for t in group]) for group in self.table(self.model, step)])
        self.load(step)
        tokens = self.table(self.model, step)
        new = torch.stack([torch.stack([t.sum() for t in group]) for group in tokens])
        lengths = torch.tensor([[len(t) for t in group] for group in tokens])
        loss = objective(new, old, self.scores(step), lengths).mean()
        if beta:
            with torch.no_grad():
                reference = self.table(self.reference, step)
            total = 0.0
            for group, fixed in zip(tokens, reference, strict=True):
                for t, r in zip(group, fixed, strict=True):
                    total = total + (torch.exp(r - t) - (r - t) - 1).sum()
            loss = loss + beta * total / (lengths.sum() if by_token else lengths.numel())
        parameters = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        gradients = torch.autograd.grad(loss, list(parameters.values()))
        return loss.item(), dict(zip(parameters, gradients, strict=True))


def standardized(scores):
    u = (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, correction=0, keepdim=True)
    return torch.where(scores.amax(-1, keepdim=True) > scores.amin(-1, keepdim=True), u, torch.zeros_like(u))


def target_po(policy="ratio", eta=1.0):
    def objective(new, old, scores, lengths):
        if policy == "mean":
            new, old = new / lengths, old / lengths
        if policy == "ratio":
            new, old = new - old, torch.zeros_like(old)
        q = torch.softmax(torch.log_softmax(old, -1) + standardized(scores) / eta, -1)
        return -(q * torch.log_softmax(new, -1)).sum(-1)

    return objective


def grpo(new, old, scores, lengths, clip=0.2, beta=0.04):
    r, a = new - old, standardized(scores)
    value = torch.minimum(r.exp() * a, r.exp().clamp(1 - clip, 1 + clip) * a) - beta * (torch.exp(-r) + r - 1)
    return -value.sum(-1)


def relative_error(ours, expected):
    assert ours.keys() == expected.keys()
    difference = sum((ours[name] - expected[name]).square().sum() for name in expected)
    size = sum(value.square().sum() for value in expected.values())
    assert size > 1e-8  # a gradient to compare
    return (difference / size).sqrt().item()


def check(oracle, objective, steps, log=None, tolerance=TOLERANCE, **penalty):
    for step in range(steps):
        loss, expected = oracle.step(step, objective, **penalty)
        for recorded in oracle.ranks:
            assert relative_error(recorded[step]["gradients"], expected) <= tolerance, f"step {step}"
        if log is not None:
            assert log[step]["loss"] == pytest.approx(loss, rel=1e-5)


@pytest.mark.parametrize("group_policy", ["sum", "mean", "ratio"])
def test_one_epoch_in_micro_batches(worker, tmp_path, group_policy):
    """(a) and (e): K = 8 in micro-batches of 4, completions of different lengths, some of them truncated."""
    steps, trainer = worker["run"](tmp_path, group_policy=group_policy, eta=0.8)
    oracle = Oracle(worker, [steps], epochs=1)
    groups = oracle.groups(0)
    assert [len(group) for group in groups.values()] == [8, 8]
    eos = worker["TOKENIZER"].eos_token_id
    completions = [completion for group in groups.values() for *_, completion in group]
    assert len({len(completion) for completion in completions}) > 3
    assert any(completion[-1] != eos for completion in completions)
    assert any(len(set(map(tuple, b["prompt_ids"].tolist()))) > 1 for b in steps[0]["batches"])  # TRL mixes the groups
    check(oracle, target_po(group_policy, 0.8), 2, trainer.state.log_history)


@pytest.mark.parametrize("group_policy", ["sum", "ratio"])
def test_three_epochs(worker, tmp_path, group_policy):
    """(b): p follows the policy at each optimizer step, q and p_old stay those of the rollout."""
    steps, trainer = worker["run"](tmp_path, group_policy=group_policy, num_iterations=3, steps=6)
    log = trainer.state.log_history
    check(Oracle(worker, [steps], epochs=3), target_po(group_policy), 6, log)
    for start in (0, 3):
        assert log[start + 2]["group/fit_kl"] < log[start]["group/fit_kl"]
        assert "group/target_tv" in log[start]
        assert "group/target_tv" not in log[start + 1]


@pytest.mark.slow
def test_two_processes(worker, tmp_path):
    """(c): 24 completions in three groups over two processes of 12, so the second group is in both; two epochs."""
    common = {"num_iterations": 2, "steps": 4, "per_device_train_batch_size": 3, "max_completion_length": 6}
    objectives = {
        ("target_po", "ratio"): target_po("ratio"),
        ("target_po", "mean"): target_po("mean"),
        ("target_po", "sum"): target_po("sum"),
        ("grpo", "sum"): grpo,
    }
    runs = [{**common, "method": method, "group_policy": policy} for method, policy in objectives]
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", WORKER, tmp_path]
    done = subprocess.run(
        [sys.executable, *map(str, command), json.dumps(runs)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    for index, objective in enumerate(objectives.values()):
        ranks = [torch.load(tmp_path / f"{index}-rank{rank}.pt") for rank in range(2)]
        oracle = Oracle(worker, ranks, epochs=2)
        prompts = [{oracle.text(prompt) for prompt, *_ in sequences(steps[0])} for steps in ranks]
        assert len(prompts[0] & prompts[1]) == 1
        assert len(oracle.groups(0)) == 3
        check(oracle, objective, 4)


def test_lora(worker, tmp_path):
    """(d), with the base model as the reference of the penalty."""
    steps, trainer = worker["run"](
        tmp_path, lora=True, num_iterations=2, steps=4, beta=0.3, kl_normalization="sequence", learning_rate=0.1
    )
    assert all("lora_" in name for name in steps[0]["gradients"])
    oracle = Oracle(worker, [steps], epochs=2, lora=True, reference=worker["model"]())
    check(oracle, target_po(), 4, trainer.state.log_history, beta=0.3, by_token=False)
    assert trainer.state.log_history[3]["kl"] > 1e-4


def test_penalty_to_a_reference_model(worker, tmp_path):
    worker["model"]().save_pretrained(tmp_path / "model")
    steps, trainer = worker["run"](
        tmp_path,
        source=str(tmp_path / "model"),
        model_init_kwargs={"dtype": "auto"},
        num_iterations=2,
        steps=4,
        beta=0.5,
        learning_rate=3e-2,
    )
    oracle = Oracle(worker, [steps], epochs=2, reference=worker["model"]())
    check(oracle, target_po(), 4, trainer.state.log_history, beta=0.5)
    assert trainer.state.log_history[3]["kl"] > 1e-3


def test_grpo_weights_take_the_same_path(worker, tmp_path):
    steps, trainer = worker["run"](tmp_path, method="grpo", num_iterations=2, steps=4, learning_rate=3e-2)
    check(Oracle(worker, [steps], epochs=2), grpo, 4, trainer.state.log_history)
    assert "group/tv" not in trainer.state.log_history[0]


def test_evaluation_between_epochs_leaves_the_rollout_alone(worker, tmp_path):
    steps, trainer = worker["run"](
        tmp_path, num_iterations=2, steps=4, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=8
    )
    evaluations = [entry for entry in trainer.state.log_history if "eval_reward" in entry]
    assert len(evaluations) == 4
    assert "eval_loss" not in evaluations[0]
    check(Oracle(worker, [steps], epochs=2), target_po(), 4)


def test_groups_are_whole_after_resuming(worker, tmp_path):
    worker["run"](tmp_path, steps=2, save_strategy="steps", save_steps=2)
    assert "Target Policy Optimization" in (tmp_path / "README.md").read_text()
    steps, trainer = worker["run"](tmp_path, steps=4, resume=str(tmp_path / "checkpoint-2"))
    assert len(steps) == 2
    assert trainer.state.global_step == 4
    check(Oracle(worker, [steps], epochs=1), target_po(), 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings", [{"method": "target_po"}, {"method": "target_po", "num_iterations": 2}, {"method": "grpo"}]
)
def test_the_reward_rises(worker, tmp_path, settings):
    """TRL's engine as it is, from fresh weights: the share of sevens among ten characters."""

    def sevens(completions, **_):
        return [text.count("7") / 10 for text in completions]

    fresh = tiny_model(worker["TOKENIZER"], hidden_size=32, layers=2, heads=2)
    common = {"exact": False, "steps": 40, "per_device_train_batch_size": 8, "source": fresh}
    _, trainer = worker["run"](tmp_path, reward_funcs=sevens, **common, **settings)
    rewards = [entry["reward"] for entry in trainer.state.log_history if "reward" in entry]
    assert sum(rewards[:5]) / 5 < 0.2
    assert sum(rewards[-5:]) / 5 > 0.5


def test_trls_own_head(worker, tmp_path):
    """The engine as it is: its head computes in float32, so the comparison is to float32's precision."""
    steps, _ = worker["run"](tmp_path, exact=False, num_iterations=2, steps=4)
    check(Oracle(worker, [steps], epochs=2), target_po(), 4, tolerance=1e-5)
