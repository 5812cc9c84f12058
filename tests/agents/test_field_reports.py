"""Cases of docs/field-reports.md that no other test covers."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tpo_gym.agents import GRPO, TPO, objectives, updates


class RandomLength(gym.Env):
    """Episodes of 2 to 20 steps, drawn from the seed; the reward is the share of zeros among the actions."""

    observation_space = spaces.Box(0, 1, (2,))
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observe(), {}

    def _observe(self):
        return np.array([self.t / 20, 1.0], np.float32)

    def step(self, action):
        self.t += 1
        over = self.t == 20 or (self.t >= 2 and action == 1 and self.np_random.random() < 0.3)
        return self._observe(), float(action == 0), over, False, {}


def gradient(model, batch_size):
    model.batch_size = batch_size
    frozen = model.freeze(model.rollout)
    model.policy.optimizer.zero_grad()
    updates.accumulate_gradients(model, model.rollout, frozen, model.group_weights(model.rollout, frozen))
    return torch.cat([p.grad.flatten() for p in model.policy.parameters()])


def collected(cls, **kwargs):
    model = cls("MlpPolicy", RandomLength(), group_size=8, n_contexts=3, seed=0, **kwargs)
    _, callback = model._setup_learn(10**6)
    assert model.collect_rollouts(callback)
    with torch.no_grad():
        for parameter in model.policy.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


@pytest.mark.parametrize("cls", [TPO, GRPO])
@pytest.mark.parametrize("batch_size", [8, 4, 3])
def test_cases_1_and_13_micro_batches_of_groups_with_unequal_lengths(cls, batch_size):
    """K = 8 in micro-batches of 8, 4 and 3, with candidates of 2 to 20 steps: the gradient of the whole batch."""
    model = collected(cls)
    lengths = model.rollout.lengths
    assert lengths.max() >= 4 * lengths.min()
    whole = gradient(model, None)
    assert whole.abs().max() > 1e-4
    assert torch.allclose(gradient(model, batch_size), whole, atol=1e-6, rtol=1e-4)


def test_case_13_one_normalizer():
    """A candidate's weight does not depend on the lengths of those it shares a micro-batch with."""
    model = collected(GRPO, ratio="step", beta=0.0)
    assert torch.allclose(gradient(model, 8), gradient(model, None), atol=1e-6, rtol=1e-4)


def test_case_11_what_counts_is_masked_by_position():
    """Decisions after a candidate's end count nothing, whatever action stands there; the last real one counts."""
    model = collected(TPO)
    rollout = model.rollout
    evaluation = rollout.candidates.evaluate(model.policy)
    assert (evaluation.step_log_probs[~rollout.mask] == 0).all()
    last = (rollout.lengths - 1).unsqueeze(-1)
    assert (evaluation.step_log_probs.gather(-1, last) < 0).all()


def test_case_3_rewards_scaled_down_give_the_same_targets_until_the_threshold():
    scores = torch.tensor([[1.0, 0.0, 0.5, 0.0]])
    targets = [objectives.tpo_target(torch.zeros(1, 4), scale * scores) for scale in (1.0, 1e-3, 1e-8)]
    assert torch.allclose(targets[0], targets[1], atol=1e-5)
    assert torch.allclose(targets[2], torch.full((1, 4), 0.25), atol=1e-6)
