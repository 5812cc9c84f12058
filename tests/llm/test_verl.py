"""The plug-in for verl on synthetic batches: rows shuffled and cut as verl cuts them, against autograd on whole groups.

The first part needs no verl. The oracle shares nothing with the plug-in: it differentiates the objective, written as in
the paper, through all candidates' log-probabilities at once.
"""

import os
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

from tpo_gym.llm.verl.rows import row_advantages
from tpo_gym.llm.weights import WeightOptions

needs_verl = pytest.mark.skipif(find_spec("verl") is None, reason="needs the extra verl")
K, T, VOCABULARY, WIDTH = 4, 7, 11, 5


class Batch:
    """Ragged rows of three groups in verl's order: shuffled, with padding rows, a lost candidate and masked tokens."""

    def __init__(self, seed=0, padding=1):
        generator = torch.Generator().manual_seed(seed)
        names = [(f"prompt{g}", k) for g in range(3) for k in range(K) if (g, k) != (1, 2)]
        rows = [(f"{prompt}_{session}_0", prompt) for prompt, session in names]
        rows += [(f"pad_{i}_0", "pad") for i in range(padding)]
        order = torch.randperm(len(rows), generator=generator).tolist()
        self.keys, self.prompts = zip(*(rows[i] for i in order), strict=True)
        self.features = torch.randn(len(rows), T, WIDTH, dtype=torch.float64, generator=generator)
        self.tokens = torch.randint(VOCABULARY, (len(rows), T), generator=generator)
        self.lengths = torch.randint(2, T + 1, (len(rows),), generator=generator)
        self.mask = (torch.arange(T) < self.lengths[:, None]).long()
        self.mask[::3, 1] = 0  # as a tool's answer
        self.scores = torch.randint(3, (len(rows),), generator=generator).double()
        for row, prompt in enumerate(self.prompts):
            if prompt == "pad":
                self.mask[row], self.scores[row] = 0, 0.0
            if prompt == "prompt2":
                self.scores[row] = 1.0  # a group without a signal
        self.parameters = torch.randn(WIDTH, VOCABULARY, dtype=torch.float64, generator=generator)

    def log_probs(self, parameters, rows=slice(None)):
        """Per-token log-probabilities, 0 after the end of a row, as verl pads them."""
        table = torch.log_softmax(self.features[rows] @ parameters, -1)
        tokens = table.gather(-1, self.tokens[rows, :, None]).squeeze(-1)
        return tokens * (torch.arange(T) < self.lengths[rows, None])

    def groups(self):
        prompts = sorted(set(self.prompts) - {"pad"})
        return [[row for row, prompt in enumerate(self.prompts) if prompt == name] for name in prompts]


def oracle_loss(batch, parameters, old, eta, group_policy):
    """The mean over groups of TPO's cross-entropy."""
    losses = []
    for rows in batch.groups():
        mask = batch.mask[rows]
        new = (batch.log_probs(parameters, rows) * mask).sum(-1)
        start = (old[rows] * mask).sum(-1)
        if group_policy == "mean":
            new, start = new / mask.sum(-1), start / mask.sum(-1)
        scores = batch.scores[rows]
        deviation = scores.std(correction=0)
        u = (scores - scores.mean()) / deviation if deviation > 0 else torch.zeros_like(scores)
        if group_policy == "ratio":
            target, logits = torch.softmax(u / eta, 0), new - start
        else:
            target, logits = torch.softmax(start + u / eta, 0), new
        losses.append(-(target * torch.log_softmax(logits, 0)).sum())
    return torch.stack(losses).mean()


def gradient(loss, parameters):
    return torch.autograd.grad(loss, parameters)[0]


def error(value, right):
    return float((value - right).norm() / right.norm())


@pytest.mark.parametrize("group_policy", ["sum", "mean", "ratio"])
def test_rows_in_any_split_give_the_gradient_of_whole_groups(group_policy):
    batch = Batch()
    options = WeightOptions(group_policy=group_policy, eta=0.7)
    old = batch.log_probs(batch.parameters)
    parameters = batch.parameters.clone().requires_grad_()
    for _ in range(3):  # epochs: p moves, q and p_old stay
        right = gradient(oracle_loss(batch, parameters, old, 0.7, group_policy), parameters)
        now = batch.log_probs(parameters).detach()
        advantages, metrics = row_advantages(batch.keys, now, old, batch.mask, batch.scores, options)
        parts = [[0, 5, 1], [2, 3, 4, 6, 7], [8], [9, 10, 11]]  # micro-batches that cut every group
        total = sum(
            gradient(-(advantages[rows] * batch.log_probs(parameters, rows)).sum() / len(batch.keys), parameters)
            for rows in parts
        )
        assert error(total, right) < 1e-12
        with torch.no_grad():
            parameters -= 0.5 * right
    assert metrics["active_groups"] == pytest.approx(2 / 3)


def test_whole_groups_get_k_times_q_minus_p():
    keys = [f"a_{k}_0" for k in range(K)] + [f"b_{k}_0" for k in range(K)]
    log_probs = -torch.arange(8.0)[:, None]
    scores = torch.tensor([1.0, 0, 0, 0, 0, 2, 1, 1])
    options = WeightOptions(group_policy="sum")
    advantages, _ = row_advantages(keys, log_probs, log_probs, torch.ones(8, 1), scores, options)
    for rows in (slice(0, K), slice(K, 2 * K)):
        p = torch.softmax(log_probs[rows, 0], 0)
        u = (scores[rows] - scores[rows].mean()) / scores[rows].std(correction=0)
        q = p * u.exp() / (p * u.exp()).sum()
        torch.testing.assert_close(advantages[rows, 0], K * (q - p))


def test_rows_of_one_candidate_count_together():
    """An agent that starts over leaves several rows per candidate: their log-probabilities add up."""
    log_probs = torch.tensor([[-1.0, -2.0], [-3.0, -1.0], [-0.5, -0.5], [-2.0, 0.0]])
    mask = torch.tensor([[1, 1], [1, 1], [1, 1], [1, 0]])
    split = row_advantages(
        ["a_0_1", "a_1_0", "a_0_0", "a_2_0"], log_probs, log_probs, mask, torch.tensor([1.0, 0, 9, 0]), SUM
    )
    joined = row_advantages(
        ["a_0_0", "a_1_0", "a_2_0"],
        torch.tensor([[-4.0], [-4.0], [-2.0]]),
        torch.tensor([[-4.0], [-4.0], [-2.0]]),
        torch.ones(3, 1),
        torch.tensor([1.0, 0, 0]),
        SUM,
    )
    torch.testing.assert_close(split.advantages[[0, 1, 3], 0] / 4, joined.advantages[:, 0] / 3)
    assert split.advantages[2, 0] == split.advantages[0, 0]
    assert split.advantages[3, 1] == 0


SUM = WeightOptions(group_policy="sum")


def test_padding_and_failed_rows_change_nothing():
    batch, padded = Batch(padding=0), Batch(padding=0)
    extra = 3
    padded.keys = (*batch.keys, "prompt0_9_0", "pad_0_0", "pad_1_0")  # a failed candidate, and verl's padding
    widen = lambda x, value: torch.cat([x, x.new_full((extra, *x.shape[1:]), value)])  # noqa: E731
    old = batch.log_probs(batch.parameters)
    plain = row_advantages(batch.keys, old, old, batch.mask, batch.scores, SUM)
    other = row_advantages(
        padded.keys, widen(old, -7.0), widen(old, -7.0), widen(batch.mask, 0), widen(batch.scores, 5.0), SUM
    )
    size = len(batch.keys)
    torch.testing.assert_close(other.advantages[:size] / (size + extra), plain.advantages / size)
    assert (other.advantages[size:] == 0).all()
    assert other.metrics == pytest.approx(plain.metrics)


def test_nothing_to_learn_from():
    advantages, metrics = row_advantages(["a_0_0", "b_0_0"], *[torch.zeros(2, 1)] * 3, torch.zeros(2))
    assert (advantages == 0).all()
    assert metrics == {}
    _, metrics = row_advantages(["a_0_0", "a_1_0"], *[torch.zeros(2, 1)] * 2, torch.ones(2, 1), torch.zeros(2))
    assert "tv" not in metrics
    assert metrics["active_groups"] == 0


def test_keys_and_scores_that_cannot_be_read():
    one = torch.ones(2, 1)
    with pytest.raises(ValueError, match="key 'a-1' of row 1 is not of the form prompt_session_index"):
        row_advantages(["a_0_0", "a-1"], one, one, one, torch.zeros(2))
    with pytest.raises(ValueError, match="scores of candidate 1 in group 0 is nan"):
        row_advantages(["a_0_0", "a_1_0"], one, one, one, torch.tensor([0.0, torch.nan]))


# --- verl


@pytest.fixture(scope="module")
def plugin():
    pytest.importorskip("verl", reason="needs the extra verl")
    import tpo_gym.llm.verl.plugin as plugin

    return plugin


@pytest.fixture
def compose(tmp_path, plugin):
    """verl's configuration with the overrides of our command line and others."""
    from hydra import compose, initialize_config_module

    from tpo_gym.llm.settings import load_settings
    from tpo_gym.llm.verl_command import verl_command

    def make(*overrides, **settings):
        values = {"method": "target_po", "lora_rank": 0, "output": str(tmp_path), "model": "m"} | settings
        command = verl_command(load_settings("qwen3-1.7b-gsm8k", **values), tmp_path / "a", tmp_path / "b")
        with initialize_config_module("verl.trainer.config", version_base=None):
            return compose("ppo_trainer", overrides=[*command[3:], *overrides])

    return make


@needs_verl
def test_verl_loads_the_plugin_by_itself(tmp_path):
    code = (
        "import verl\n"
        "from verl.trainer.ppo.core_algos import get_policy_loss_fn\n"
        "from verl.trainer.ppo.v1 import get_trainer_cls\n"
        "print(get_policy_loss_fn('tpo').__module__, get_trainer_cls('tpo_sync').__module__)"
    )

    def run(**env):  # not in a clone, where the metadata of an older build may lie
        command = [sys.executable, "-W", "ignore", "-c", code]
        return subprocess.run(command, env=os.environ | env, cwd=tmp_path, capture_output=True, text=True, check=False)

    assert run().stdout.split() == ["tpo_gym.llm.verl.plugin"] * 2
    assert "Unsupported loss mode: tpo" in run(VERL_USE_EXTERNAL_PLUGINS="none").stderr
    named = {"VERL_USE_EXTERNAL_PLUGINS": "none", "VERL_USE_EXTERNAL_MODULES": "tpo_gym.llm.verl.plugin"}
    assert run(**named).stdout.split() == ["tpo_gym.llm.verl.plugin"] * 2


def test_our_command_fits_verls_configuration(compose, plugin):
    from verl.trainer.ppo.utils import need_critic, need_reference_policy
    from verl.trainer.ppo.v1 import get_trainer_cls
    from verl.utils.config import omega_conf_to_dataclass, validate_config
    from verl.utils.import_utils import load_extern_type

    from tpo_gym.llm import tasks

    config = compose("+trainer.v1.tpo_sync.group_policy=sum", "+trainer.v1.tpo_sync.eta=0.5", epochs=3)
    validate_config(config, need_reference_policy(config), need_critic(config))
    plugin.check_config(config)
    assert plugin.weight_options(config) == (WeightOptions(group_policy="sum", eta=0.5), 10)
    assert get_trainer_cls(config.trainer.v1.trainer_mode) is plugin.TargetPOTrainerSync
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    assert (actor.policy_loss.loss_mode, actor.ppo_epochs) == ("tpo", 3)
    assert need_reference_policy(config)  # the configuration has a penalty to the first model
    custom = config.reward.custom_reward_function
    assert load_extern_type(custom.path, custom.name) is tasks.compute_score
    grpo = compose(method="grpo")
    validate_config(grpo, need_reference_policy(grpo), need_critic(grpo))
    assert grpo.trainer.v1.trainer_mode == "sync"


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("actor_rollout_ref.actor.policy_loss.loss_mode=vanilla", "loss_mode='vanilla' does not go with .*: set"),
        ("algorithm.adv_estimator=gae", "algorithm.adv_estimator='gae' .* set algorithm.adv_estimator=grpo"),
        ("actor_rollout_ref.actor.ppo_mini_batch_size=8", "ppo_mini_batch_size=8 .*ppo_mini_batch_size=16"),
        ("actor_rollout_ref.rollout.n=1", r"rollout.n=1: a group needs at least two"),
        ("algorithm.rollout_correction.bypass_mode=True", "bypass_mode=True .*bypass_mode=false"),
        ("algorithm.rollout_correction.rollout_is=token", "rollout_is='token' .*rollout_is=null"),
        ("algorithm.rollout_correction.rollout_rs=seq_sum_k1", "rollout_rs='seq_sum_k1' .*rollout_rs=null"),
    ],
)
def test_settings_that_change_the_objective_are_refused(compose, plugin, override, message):
    with pytest.raises(ValueError, match=message):
        plugin.TargetPOTrainerSync(compose(override))


def test_settings_of_the_section(compose, plugin):
    assert plugin.weight_options(compose()) == (WeightOptions(), 10)
    config = compose("+trainer.v1.tpo_sync={method: grpo, clip_range: 0.1, saturation_patience: 0}")
    assert plugin.weight_options(config) == (WeightOptions(method="grpo", clip_range=0.1), 0)
    with pytest.raises(ValueError, match="unknown settings temperature; there are: method, group_policy, eta"):
        plugin.weight_options(compose("+trainer.v1.tpo_sync.temperature=1"))
    with pytest.raises(ValueError, match="eta must be positive, got -1"):
        plugin.weight_options(compose("+trainer.v1.tpo_sync.eta=-1"))


def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


@pytest.mark.parametrize("agg_mode", ["seq-mean-token-sum", "token-mean"])
def test_verls_loss_over_ragged_micro_batches_on_two_ranks(compose, plugin, agg_mode):
    """verl's own ppo_loss, with nested tensors, as each rank's engine calls it; ranks are averaged as FSDP does."""
    from tensordict import TensorDict
    from verl.utils import tensordict_utils as tu
    from verl.utils.config import omega_conf_to_dataclass
    from verl.workers.utils.losses import ppo_loss

    config = compose("actor_rollout_ref.actor.use_kl_loss=False", f"actor_rollout_ref.actor.loss_agg_mode={agg_mode}")
    actor = omega_conf_to_dataclass(config.actor_rollout_ref.actor)
    batch, options = Batch(), WeightOptions(group_policy="sum")
    old = batch.log_probs(batch.parameters)
    parameters = (batch.parameters + 0.1).requires_grad_()
    now = batch.log_probs(parameters)
    advantages, _ = row_advantages(batch.keys, now.detach(), old, batch.mask, batch.scores, options)
    right = gradient(oracle_loss(batch, parameters, old, 1.0, "sum"), parameters)
    ranks = [[[0, 5, 1], [2, 3, 4]], [[6], [7, 8, 9, 10, 11]]]
    total = torch.zeros_like(right)
    for micro_batches in ranks:
        for rows in micro_batches:
            cut = lambda x, rows=rows: nested(x[row, : batch.lengths[row]] for row in rows)  # noqa: E731
            fields = {"prompts": nested(torch.zeros(2) for _ in rows), "responses": cut(batch.tokens)}
            fields |= {"response_mask": cut(batch.mask), "old_log_probs": cut(old), "advantages": cut(advantages)}
            data = TensorDict(fields, batch_size=len(rows))
            tu.assign_non_tensor(data, dp_size=2, batch_num_tokens=99, global_batch_size=len(batch.keys))
            mine = batch.log_probs(parameters, rows)
            # verl's model output holds prompt and response, shifted by one token
            rows_out = [
                torch.cat([mine.new_zeros(1), mine[i, : batch.lengths[row]], mine.new_zeros(1)])
                for i, row in enumerate(rows)
            ]
            loss, metrics = ppo_loss(actor, {"log_probs": nested(rows_out)}, data)
            total += gradient(loss, parameters) / len(ranks)
            assert "actor/ppo_kl" in metrics
    assert error(total, right) < 1e-12


def test_the_loss_says_what_it_lacks(plugin):
    class Config:
        global_batch_info = {}

    one = torch.ones(1, 1)
    with pytest.raises(ValueError, match="needs the number of rows of the whole batch"):
        plugin.tpo_loss(one, one, one, one, config=Config())
    with pytest.raises(ValueError, match="takes no importance weights"):
        plugin.tpo_loss(one, one, one, one, config=Config(), rollout_is_weights=one)


def test_log_probs_between_epochs_are_the_policys_own(compose, plugin, monkeypatch):
    """With adapters verl computes the reference by switching them off, and leaves that switch in the batch."""
    trainer = plugin.TargetPOTrainerSync.__new__(plugin.TargetPOTrainerSync)
    trainer.config, seen = compose("actor_rollout_ref.rollout.temperature=0.9"), {}

    class Batch:
        extra_info = {"no_lora_adapter": True, "calculate_entropy": True}

    class Workers:
        def compute_log_prob(self, batch):
            seen.update(batch.extra_info)

    trainer.actor_rollout_wg = Workers()
    stored = {  # a prompt of two tokens and a response of three; verl's outputs are shifted by one
        "log_probs": nested([torch.tensor([0.0, -1.0, -2.0, -3.0, 9.0])]),
        "response_mask": nested([torch.ones(3)]),
    }
    monkeypatch.setattr(trainer, "_read", lambda batch, *names: {name: stored[name] for name in names})
    result = trainer._current_log_probs(Batch())
    assert result.to_padded_tensor(0.0).tolist() == [[-1.0, -2.0, -3.0]]
    assert seen["no_lora_adapter"] is False
    assert (seen["calculate_entropy"], seen["compute_loss"], seen["temperature"]) == (False, False, 0.9)
