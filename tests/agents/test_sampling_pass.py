"""The pass that sampled serves the first epoch, where nothing could make it another one."""

import gymnasium as gym
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from torch import nn

from tpo_gym.agents import DG, GRPO, TPO, ActorPolicy, CrossEntropy

SGD = {"optimizer_class": torch.optim.SGD}


class Silent(BaseCallback):
    def _on_step(self):
        return True


class Disturbing(Silent):
    """Changes the policy between sampling and training."""

    def _on_rollout_end(self):
        with torch.no_grad():
            for parameter in self.model.policy.parameters():
                parameter.mul_(0.9)


class Scaled(nn.Module):
    """Of a package that nobody knows: what it computes may depend on the mode."""

    def forward(self, x):
        return x * (2 if self.training else 1)


class ScaledPolicy(ActorPolicy):
    def _build(self):
        super()._build()
        self.action_net = nn.Sequential(self.action_net, Scaled())


class OwnCollection(TPO):
    def collect_rollouts(self, callback):
        collected = super().collect_rollouts(callback)
        with torch.no_grad():
            self.policy.action_net.bias.add_(0.1)
        return collected


def make(cls=TPO, policy="MlpPolicy", candidates="all_actions", device="cpu", **kwargs):
    env = gym.make_vec(
        "tpo_gym/ContextualBandit-v0", num_envs=6, num_contexts=6, num_actions=4, device=device, correct_actions=[0] * 6
    )
    kwargs = {"policy_kwargs": SGD, "learning_rate": 0.5, **kwargs}
    return cls(policy, env, candidates=candidates, seed=0, device=device, **kwargs)


def passes(model, callback=None, updates=3):
    """How often the network is evaluated."""
    count = 0

    def counted(*_):
        nonlocal count
        count += 1

    model.policy.action_net.register_forward_hook(counted)
    model.learn(6 * updates, callback)
    return count


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.policy.parameters()])


@pytest.mark.parametrize("n_epochs", [1, 3])
def test_it_saves_a_pass_per_update(n_epochs):
    assert passes(make(n_epochs=n_epochs)) == 3 * n_epochs
    assert passes(make(n_epochs=n_epochs), Silent()) == 3 * (n_epochs + 1)


@pytest.mark.parametrize("n_epochs", [1, 2])
@pytest.mark.parametrize("candidates", ["all_actions", "exact"])
@pytest.mark.parametrize("cls", [TPO, GRPO, DG, CrossEntropy])
def test_the_result_is_the_same(cls, candidates, n_epochs, device):
    kept = make(cls, candidates=candidates, n_epochs=n_epochs, device=device, ent_coef=0.1, max_grad_norm=0.1)
    kept.learn(30)
    again = make(cls, candidates=candidates, n_epochs=n_epochs, device=device, ent_coef=0.1, max_grad_norm=0.1)
    again.learn(30, Silent())
    assert torch.equal(weights(kept), weights(again))
    assert kept.policy.training
    assert again.policy.training


def test_it_is_not_kept_where_something_may_come_between():
    assert passes(make(n_epochs=1), Disturbing()) == 6
    assert passes(make(n_epochs=1, policy=ScaledPolicy)) == 6
    assert passes(make(OwnCollection, n_epochs=1)) == 6
    assert passes(make(n_epochs=1, batch_size=8)) == 3 * (1 + 3)  # two contexts at once
    compiled = make(n_epochs=1)
    compiled.compile(backend="eager")
    assert passes(compiled) == 6


def test_nothing_is_kept_after_learning():
    model = make(n_epochs=1)
    model.learn(12)
    before = weights(model)
    model.train()  # on the last batch again, with the policy as it is now
    assert not torch.equal(weights(model), before)
    assert model._sampled is None
