"""Algorithms over groups of candidates, with Stable-Baselines3's interface."""

from tpo_gym.agents.group_algorithm import GroupAlgorithm
from tpo_gym.agents.grpo import GRPO
from tpo_gym.agents.optimizers import MuonAdamW
from tpo_gym.agents.policies import ActorPolicy, CnnPolicy, MultiInputPolicy, TabularPolicy, TransformerPolicy
from tpo_gym.agents.rollouts import GroupRollout
from tpo_gym.agents.tpo import TPO
from tpo_gym.agents.transformer import TransformerExtractor

__all__ = [
    "GRPO",
    "TPO",
    "ActorPolicy",
    "CnnPolicy",
    "GroupAlgorithm",
    "GroupRollout",
    "MultiInputPolicy",
    "MuonAdamW",
    "TabularPolicy",
    "TransformerExtractor",
    "TransformerPolicy",
]
