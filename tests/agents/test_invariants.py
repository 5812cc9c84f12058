"""The design's six invariants. Each test fails when its invariant is broken on purpose (see the mutants at the end)."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback

import tpo_gym  # noqa: F401  (registers the environments)
from tpo_gym.agents import GRPO, TPO, collectors, objectives, updates
from tpo_gym.agents.group_env import BatchedGroupEnv


def token_env(num_envs=16, sequence_length=4, reward="terminal", device="cpu", **kwargs):
    return gym.make_vec(
        "tpo_gym/TokenReversal-v0",
        num_envs=num_envs,
        sequence_length=sequence_length,
        reward=reward,
        device=device,
        **kwargs,
    )


def token_model(cls=TPO, seed=0, device="cpu", num_envs=16, sequence_length=4, **kwargs):
    kwargs.setdefault("policy_kwargs", {"d_model": 16})
    kwargs.setdefault("group_size", 4)
    env = token_env(num_envs, sequence_length, device=device)
    return cls("TransformerPolicy", env, seed=seed, device=device, **kwargs)


def collect(model):
    """One rollout batch outside `learn`."""
    _, callback = model._setup_learn(10**6)
    assert model.collect_rollouts(callback)
    return model.rollout


# 1. q sums to 1, is finite, equals p_old for a zero-variance group; the gradient is p - q.


@pytest.mark.parametrize("anchor", ["old", "ratio", "none"])
def test_targets_of_a_real_batch(anchor, device):
    model = token_model(anchor=anchor, device=device, num_envs=64, sequence_length=2)
    rollout = collect(model)
    target = model.freeze(rollout)["target"]
    assert torch.isfinite(target).all()
    assert torch.allclose(target.sum(-1), torch.ones_like(target[:, 0]), atol=1e-6)
    neutral = objectives.zero_variance(rollout.scores)
    assert neutral.any()
    assert not neutral.all()
    if anchor != "none":
        snapshot = objectives.group_log_policy(rollout.old_log_probs, rollout.old_log_probs, anchor).exp()
        assert torch.allclose(target[neutral], snapshot[neutral], atol=1e-6)
        assert not torch.allclose(target[~neutral], snapshot[~neutral], atol=1e-2)


def test_gradient_through_the_policy_is_p_minus_q():
    """Chain rule through the whole training path: dL/dθ = Σ (p - q) · dlogπ/dθ / B."""
    model = token_model()
    rollout = collect(model)
    frozen = model.freeze(rollout)
    weights = model.group_weights(rollout, frozen)
    model.policy.optimizer.zero_grad()
    updates.accumulate_gradients(model, rollout, frozen, weights)
    trained = [p.grad.clone() for p in model.policy.parameters()]
    log_probs = rollout.candidates.evaluate(model.policy).log_probs
    difference = log_probs.detach().softmax(-1) - frozen["target"]
    by_hand = torch.autograd.grad((difference * log_probs).sum() / rollout.n_groups, list(model.policy.parameters()))
    assert any(g.abs().max() > 1e-4 for g in trained)
    for grad, expected in zip(trained, by_hand, strict=True):
        assert torch.allclose(grad, expected, atol=1e-6)


# 2. A group never mixes contexts, never loses a member, is never split without its softmax being exact.


def test_groups_share_their_context(device):
    model = token_model(device=device, num_envs=64)
    rollout = collect(model)
    prompts = model.env.batched.reset(options={"group_size": 4})[0][:, :4]
    assert (prompts.view(16, 4, 4) == prompts.view(16, 4, 4)[:, :1]).all()
    assert len(prompts.unique(dim=0)) > 4
    assert rollout.candidates.prompts.shape == (16, 4)
    assert rollout.candidates.tokens.shape == (16, 4, 4)


@pytest.mark.parametrize("policy", ["TransformerPolicy", "MlpPolicy"])
def test_a_reward_of_the_context_alone_has_no_variance_in_any_group(policy, monkeypatch):
    """Tiled instead of interleaved groups would pass every other check and still look plausible."""
    env = token_env(32)
    monkeypatch.setattr(
        type(env), "score_sequences", lambda self, prompts, tokens: tokens * 0.0 + prompts[..., :1].float()
    )
    monkeypatch.setattr(type(env), "_act", _reward_of_the_context(type(env)._act))
    model = TPO(policy, env, group_size=4, seed=0, candidates="episodes")
    rollout = collect(model)
    assert objectives.zero_variance(rollout.scores).all()
    assert len(rollout.scores.unique()) == 2


def _reward_of_the_context(act):
    def rewarded(self, actions, rows, step):
        return act(self, actions, rows, step) * 0 + self._board[rows, 0].float()

    return rewarded


@pytest.mark.parametrize("anchor", ["old", "ratio"])
@pytest.mark.parametrize(("policy", "candidates"), [("TransformerPolicy", "episodes"), ("MlpPolicy", "episodes")])
@pytest.mark.parametrize("batch_size", [1, 2, 3, 4, 5, 8, 11, 64])
def test_any_batch_size_gives_the_gradient_of_the_whole(policy, candidates, batch_size, anchor):
    """K = 4 in micro-batches that hold groups, split them, or leave a remainder."""
    env = token_env(16, sequence_length=3)
    model = TPO(policy, env, group_size=4, seed=1, candidates=candidates, anchor=anchor)
    with torch.no_grad():  # leave the snapshot, so that p differs from p_old
        rollout = collect(model)
        for parameter in model.policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    whole = gradient_with(model, rollout, None)
    for a, b in zip(whole, gradient_with(model, rollout, batch_size), strict=True):
        assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)


def test_any_batch_size_gives_the_same_token_level_gradient():
    env = token_env(6, sequence_length=3, reward="bag_of_tokens")
    model = GRPO("TransformerPolicy", env, group_size=4, seed=1, candidates="actions", ent_coef=0.1)
    rollout = collect(model)
    whole = gradient_with(model, rollout, None)
    for batch_size in (1, 12, 24, 30):
        for a, b in zip(whole, gradient_with(model, rollout, batch_size), strict=True):
            assert torch.allclose(a, b, atol=1e-6, rtol=1e-4)


def gradient_with(model, rollout, batch_size):
    model.batch_size = batch_size
    frozen = model.freeze(rollout)
    model.policy.optimizer.zero_grad()
    updates.accumulate_gradients(model, rollout, frozen, model.group_weights(rollout, frozen))
    return [p.grad.clone() for p in model.policy.parameters()]


# 3. p_old and q never change during the epochs of a batch.


def test_targets_are_frozen_and_the_policy_moves(monkeypatch):
    model = token_model(n_epochs=4, num_envs=64, sequence_length=2)
    seen = []
    original = TPO.group_losses

    def spy(self, evaluation, frozen):
        seen.append((evaluation.log_probs.detach().clone(), {k: v.clone() for k, v in frozen.items()}))
        return original(self, evaluation, frozen)

    monkeypatch.setattr(TPO, "group_losses", spy)
    steps = []
    step = model.policy.optimizer.step
    monkeypatch.setattr(model.policy.optimizer, "step", lambda: (steps.append(1), step())[1])
    rollout = collect(model)
    old = rollout.old_log_probs.clone()
    model.train()
    assert len(seen) == len(steps) == 4
    assert model._n_updates == 4
    for log_probs, frozen in seen[1:]:
        assert not torch.allclose(log_probs, seen[0][0], atol=1e-5)
        for name, value in frozen.items():
            assert torch.equal(value, seen[0][1][name])
    assert torch.equal(rollout.old_log_probs, old)


# 4. Fused and step-by-step collection agree; stored log-probabilities equal recomputed ones.


def both_collections(fused, by_step, group_size, reward):
    model = TPO("TransformerPolicy", token_env(32, reward=reward), group_size=group_size, seed=3)
    batches = []
    for collect_batch in (fused, by_step):
        env = BatchedGroupEnv(token_env(32, reward=reward), torch.device("cpu"))
        env.env.reset(seed=7)
        torch.manual_seed(5)
        batches.append(collect_batch(env, model.policy, group_size, lambda step: True))
    return model, batches


def test_fused_and_stepwise_episodes_are_the_same():
    model, (fused, stepwise) = both_collections(
        collectors.collect_sequences, collectors.collect_episodes, 4, "sequential"
    )
    assert torch.equal(fused.scores, stepwise.scores)
    assert torch.allclose(fused.old_step_log_probs, stepwise.old_step_log_probs, atol=1e-5)
    assert torch.equal(fused.step_rewards, stepwise.step_rewards)
    assert torch.equal(
        fused.candidates.tokens.flatten(), stepwise.candidates.actions.view(4, 8, 4).permute(1, 2, 0).flatten()
    )
    for rollout in (fused, stepwise):
        evaluation = rollout.candidates.evaluate(model.policy)
        assert torch.allclose(evaluation.step_log_probs, rollout.old_step_log_probs, atol=1e-5)


def test_fused_and_stepwise_actions_are_the_same():
    model, (fused, stepwise) = both_collections(
        collectors.collect_tokens, collectors.collect_actions, 4, "bag_of_tokens"
    )
    # Fused groups are ordered by prompt, stepwise ones by step.
    by_prompt = stepwise.scores.view(4, 32, 4).transpose(0, 1).flatten(0, 1)
    assert torch.equal(fused.scores, by_prompt)
    old = stepwise.old_log_probs.view(4, 32, 4).transpose(0, 1).flatten(0, 1)
    assert torch.allclose(fused.old_log_probs, old, atol=1e-5)
    for rollout in (fused, stepwise):
        assert torch.allclose(rollout.candidates.evaluate(model.policy).log_probs, rollout.old_log_probs, atol=1e-5)


def test_log_probabilities_have_distinct_values_at_every_position():
    """A shift by one token between sampling and scoring would pair the wrong positions."""
    model = token_model(seed=2, num_envs=8)
    rollout = collect(model)
    again = rollout.candidates.evaluate(model.policy).step_log_probs
    assert torch.allclose(again, rollout.old_step_log_probs, atol=1e-5)
    assert (rollout.old_step_log_probs[..., 1:] - rollout.old_step_log_probs[..., :-1]).abs().min() > 1e-5


def test_generated_sequences_follow_their_probabilities():
    """The frequency of a completion is exp of its log-probability."""
    model = token_model(sequence_length=2, num_envs=4)
    prompt = torch.tensor([[0, 1]])
    tokens, log_probs = model.policy.generate(prompt, 20_000)
    codes = (tokens[0] * torch.tensor([2, 1])).sum(-1)
    for code in range(4):
        chosen = codes == code
        expected = log_probs[0][chosen][0].sum().exp().item()
        assert chosen.float().mean().item() == pytest.approx(
            expected, abs=4 * (expected * (1 - expected) / 20_000) ** 0.5
        )


def test_batch_of_contexts_goes_on_after_the_fused_pass():
    """Fused collection leaves the environment where stepping would: at the next contexts."""
    prompts = []
    for collect_batch in (collectors.collect_sequences, collectors.collect_episodes):
        model = TPO("TransformerPolicy", token_env(8), group_size=4, seed=3)
        env = BatchedGroupEnv(token_env(8), torch.device("cpu"))
        env.env.reset(seed=7)
        for _ in range(3):
            collect_batch(env, model.policy, 4, lambda step: True)
        prompts.append(env.start(4)[:, :4])
    assert torch.equal(*prompts)


# 5. Same seed, same device, same numbers. (Save + load + continue: test_resume.py.)


@pytest.mark.parametrize(("policy", "candidates"), [("TransformerPolicy", "episodes"), ("MlpPolicy", "actions")])
def test_same_seed_same_numbers(policy, candidates, device):
    def run(seed):
        env = token_env(16, sequence_length=3, reward="bag_of_tokens", device=device)
        model = TPO(policy, env, group_size=4, seed=seed, candidates=candidates, device=device)
        return torch.nn.utils.parameters_to_vector(model.learn(500).policy.parameters())

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


# 6. num_timesteps counts interactions exactly.


class CountSteps(BaseCallback):
    def __init__(self):
        super().__init__()
        self.counted = []

    def _on_step(self):
        self.counted.append(self.model.num_timesteps)
        return True


@pytest.mark.parametrize(
    ("env_id", "kwargs", "policy", "candidates", "per_batch"),
    [
        ("tpo_gym/TokenReversal-v0", {"sequence_length": 5}, "TransformerPolicy", "episodes", 40),
        ("tpo_gym/TokenReversal-v0", {"sequence_length": 5}, "MlpPolicy", "episodes", 40),
        ("tpo_gym/TokenReversal-v0", {"sequence_length": 5}, "TransformerPolicy", "actions", 40),
        ("tpo_gym/TokenReversal-v0", {"sequence_length": 5}, "MlpPolicy", "actions", 40),
        ("tpo_gym/Bandit-v0", {}, "TabularPolicy", "all_actions", 8),
        ("tpo_gym/ContextualBandit-v0", {}, "MlpPolicy", "episodes", 8),
    ],
)
def test_interactions_are_counted_exactly(env_id, kwargs, policy, candidates, per_batch):
    env = gym.make_vec(env_id, num_envs=8, **kwargs)
    steps = []
    act = env._act
    env._act = lambda actions, rows, step: (steps.append(len(actions)), act(actions, rows, step))[1]
    if candidates == "episodes" and policy == "TransformerPolicy":
        fused = env.step_sequences
        env.step_sequences = lambda tokens: (steps.append(tokens.numel()), fused(tokens))[1]
    model = TPO(policy, env, group_size=4, seed=0, candidates=candidates)
    counter = CountSteps()
    model.learn(3 * per_batch - 1, callback=counter)
    assert model.num_timesteps == sum(steps) == 3 * per_batch
    assert counter.counted == list(range(8, 3 * per_batch + 1, 8))
    model.learn(1, reset_num_timesteps=False)
    assert model.num_timesteps == sum(steps) == 4 * per_batch


# Mutants: each breaks one invariant; the check that guards it must fail.


def test_a_tiled_group_is_noticed():
    rollout = collect(token_model(num_envs=64))
    prompts = rollout.candidates.prompts.repeat_interleave(4, 0)
    tiled = prompts.view(4, 16, 4).transpose(0, 1)
    assert not (tiled == tiled[:, :1]).all()


def test_a_refreshed_snapshot_is_noticed():
    """If p_old followed the policy, the target would move between epochs."""
    model = token_model(num_envs=64, sequence_length=2)
    rollout = collect(model)
    before = model.freeze(rollout)["target"].clone()
    model.train()
    moved = copy.copy(rollout)
    object.__setattr__(moved, "old_log_probs", rollout.candidates.evaluate(model.policy).log_probs.detach())
    assert not torch.allclose(model.freeze(moved)["target"], before, atol=1e-4)
    assert torch.equal(model.freeze(rollout)["target"], before)


def test_softmax_over_a_part_of_the_group_is_noticed():
    """Splitting a group and normalizing each part gives another gradient."""
    log_probs = torch.randn(1, 4, dtype=torch.float64, requires_grad=True)
    target = objectives.tpo_target(torch.zeros(1, 4), torch.tensor([[1.0, 0, 0, 2.0]])).double()
    (whole,) = torch.autograd.grad(objectives.tpo_loss(log_probs, target).sum(), log_probs)
    halves = sum(objectives.tpo_loss(log_probs[:, part], target[:, part]).sum() for part in (slice(2), slice(2, 4)))
    (split,) = torch.autograd.grad(halves, log_probs)
    assert np.abs((whole - split).numpy()).max() > 1e-2
