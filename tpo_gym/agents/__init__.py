"""Algorithms over groups of candidates, with Stable-Baselines3's interface."""

from tpo_gym.agents.callbacks import ResumeCallback
from tpo_gym.agents.group_algorithm import GroupAlgorithm
from tpo_gym.agents.group_gradients import AWR, REBEL, RLOO, GroupPG
from tpo_gym.agents.grpo import GRPO, GSPO, DrGRPO
from tpo_gym.agents.optimizers import MuonAdamW, NormalizedStep
from tpo_gym.agents.policies import ActorPolicy, CnnPolicy, MultiInputPolicy, TabularPolicy, TransformerPolicy
from tpo_gym.agents.policy_gradient import DG, REINFORCE, ClippedPG
from tpo_gym.agents.rollouts import GroupRollout
from tpo_gym.agents.seeds import train_seeds
from tpo_gym.agents.supervised import CrossEntropy
from tpo_gym.agents.tpo import TPO
from tpo_gym.agents.transformer import TransformerExtractor

__all__ = [
    "AWR",
    "DG",
    "GRPO",
    "GSPO",
    "REBEL",
    "REINFORCE",
    "RLOO",
    "TPO",
    "ActorPolicy",
    "ClippedPG",
    "CnnPolicy",
    "CrossEntropy",
    "DrGRPO",
    "GroupAlgorithm",
    "GroupPG",
    "GroupRollout",
    "MultiInputPolicy",
    "MuonAdamW",
    "NormalizedStep",
    "ResumeCallback",
    "TabularPolicy",
    "TransformerExtractor",
    "TransformerPolicy",
    "train_seeds",
]
