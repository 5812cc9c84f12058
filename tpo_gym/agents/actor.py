"""The critic-free policy: SB3's features extractors, networks and action distributions, without a value function."""

from __future__ import annotations

import warnings
from functools import partial
from typing import Any, cast

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import (
    CategoricalDistribution,
    DiagGaussianDistribution,
    Distribution,
    make_proba_distribution,
)
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.preprocessing import preprocess_obs
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    FlattenExtractor,
    NatureCNN,
    create_mlp,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor, nn

from tpo_gym.agents.categorical import log_softmax, sample_several
from tpo_gym.agents.masks import apply_masks, check_masks

Masks = Tensor | np.ndarray | None


class ActorPolicy(BasePolicy):
    """A network from observations to an action distribution.

    The actor of SB3's ``ActorCriticPolicy``: the same features extractor, the same multilayer perceptron and action
    head, the same orthogonal initialisation, so that a comparison with PPO differs in the algorithm alone.

    Args:
        observation_space: Any space that SB3 preprocesses.
        action_space: Discrete, MultiDiscrete, MultiBinary or Box.
        lr_schedule: Learning rate as a function of the remaining progress.
        net_arch: Widths of the hidden layers (default ``[64, 64]``; none after :class:`NatureCNN`). SB3's
            ``dict(pi=[...])`` is read too.
        activation_fn: Activation between them.
        ortho_init: Orthogonal initialisation, as in SB3.
        log_std_init: Initial log standard deviation for Box actions.
        features_extractor_class: Network that makes features of the observation.
        features_extractor_kwargs: Its arguments.
        normalize_images: Divide images by 255.
        optimizer_class: Optimizer.
        optimizer_kwargs: Its arguments without the learning rate.
        use_sde: Only ``False``: state-dependent exploration has no fixed probability to compare candidates by.
        squash_output: Only ``False``, for the same reason.

    Raises:
        ValueError: For an action space or an option that the policy cannot serve.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        net_arch: list[int] | dict[str, list[int]] | None = None,
        activation_fn: type[nn.Module] = nn.Tanh,
        ortho_init: bool = True,
        log_std_init: float = 0.0,
        features_extractor_class: type[BaseFeaturesExtractor] = FlattenExtractor,
        features_extractor_kwargs: dict[str, Any] | None = None,
        normalize_images: bool = True,
        optimizer_class: type[torch.optim.Optimizer] = torch.optim.Adam,
        optimizer_kwargs: dict[str, Any] | None = None,
        use_sde: bool = False,
        squash_output: bool = False,
    ) -> None:
        for name, value in (("use_sde", use_sde), ("squash_output", squash_output)):
            if value:
                raise ValueError(
                    f"{name}={value!r}: {type(self).__name__} has neither state-dependent exploration nor a squashed "
                    f"output. Leave {name} out: Box actions are drawn from a Gaussian and clipped to their bounds."
                )
        if optimizer_kwargs is None and optimizer_class is torch.optim.Adam:
            optimizer_kwargs = {"eps": 1e-5}  # as SB3's actor-critic policies
        super().__init__(
            observation_space,
            action_space,
            features_extractor_class,
            features_extractor_kwargs,
            normalize_images=normalize_images,
            optimizer_class=optimizer_class,
            optimizer_kwargs=optimizer_kwargs,
        )
        if isinstance(net_arch, list) and net_arch and isinstance(net_arch[0], dict):
            warnings.warn(
                f"net_arch={net_arch} is SB3's form of before version 1.8: pass the dictionary without the list.",
                stacklevel=2,
            )
            net_arch = net_arch[0]
        if net_arch is None:
            net_arch = [] if features_extractor_class is NatureCNN else [64, 64]
        self.net_arch = net_arch
        self.activation_fn = activation_fn
        self.ortho_init = ortho_init
        self.log_std_init = log_std_init
        self._counts_from_zero = not np.any(_start(action_space))
        self._build()
        arguments = {"lr": lr_schedule(1), **self.optimizer_kwargs}
        if self.optimizer_class in (torch.optim.Adam, torch.optim.AdamW):
            arguments.setdefault("fused", not arguments.get("foreach"))  # one kernel instead of some per parameter
        self.optimizer = self.optimizer_class(self.parameters(), **arguments)

    def _build(self) -> None:
        """Make the features extractor, the hidden layers and the action head."""
        self.features_extractor = self.make_features_extractor()
        arch = self.net_arch.get("pi", []) if isinstance(self.net_arch, dict) else self.net_arch
        features_dim = self.features_extractor.features_dim
        self.mlp = nn.Sequential(*create_mlp(features_dim, -1, arch, self.activation_fn))
        self._build_head(arch[-1] if arch else features_dim)
        if self.ortho_init:
            for module, gain in ((self.features_extractor, 2**0.5), (self.mlp, 2**0.5), (self.action_net, 0.01)):
                module.apply(partial(self.init_weights, gain=gain))

    def _build_head(self, width: int) -> None:
        try:
            self.action_dist = make_proba_distribution(self.action_space)
        except (NotImplementedError, AssertionError) as error:
            raise ValueError(
                f"{type(self).__name__} cannot act in {self.action_space}: use Discrete, MultiDiscrete, a flat "
                "MultiBinary or Box."
            ) from error
        self.action_net: nn.Module
        self.log_std: nn.Parameter | None = None
        if isinstance(self.action_dist, DiagGaussianDistribution):
            self.action_net, self.log_std = self.action_dist.proba_distribution_net(width, self.log_std_init)
        else:
            self.action_net = cast(nn.Module, self.action_dist.proba_distribution_net(width))

    @property
    def action_start(self) -> Tensor | int:
        """Value of the first action (``Discrete(n, start=...)``, also MultiDiscrete); the network counts from 0."""
        start = _start(self.action_space)
        return torch.as_tensor(start, device=self.device) if isinstance(start, np.ndarray) else start

    def set_training_mode(self, mode: bool) -> None:
        """Training or evaluation mode of all modules; visits them only where it changes."""
        if self.training != mode:
            super().set_training_mode(mode)

    def extract_features(self, obs: PyTorchObs, features_extractor: BaseFeaturesExtractor | None = None) -> Tensor:
        """Features ``(N, features_dim)`` of a batch of observations."""
        obs = count_from_zero(obs, self.observation_space)
        preprocessed = preprocess_obs(obs, self.observation_space, normalize_images=self.normalize_images)
        weight = next(self.parameters(), None)
        if weight is not None and weight.dtype != torch.float32:
            preprocessed = _as_type(preprocessed, weight.dtype)
        return self.features_extractor(preprocessed)

    def _head(self, obs: PyTorchObs) -> Tensor:
        """The action head's output in float32, whatever precision the network runs in."""
        return self.action_net(self.mlp(self.extract_features(obs))).float()

    def _logits(self, obs: PyTorchObs, action_masks: Masks) -> Tensor:
        """The head's output, masked."""
        head = self._head(obs)
        if action_masks is None:
            return head
        if not isinstance(action_masks, Tensor):
            action_masks = check_masks(action_masks, self.action_space, head.shape[0])
        masks = torch.as_tensor(action_masks, dtype=torch.bool, device=head.device)
        return apply_masks(head, masks, self.action_space)

    def get_distribution(self, obs: PyTorchObs, action_masks: Masks = None) -> Distribution:
        """Action distribution for a batch of observations.

        Args:
            obs: ``N`` observations.
            action_masks: Allowed actions, ``(N, entries)`` (see :mod:`tpo_gym.agents.masks`); ``None``: all. Here and
                in the other methods.
        """
        logits = self._logits(obs, action_masks)
        if self.log_std is not None:
            return self.action_dist.proba_distribution(logits, self.log_std.float())
        return self.action_dist.proba_distribution(logits)

    def forward(
        self, obs: PyTorchObs, deterministic: bool = False, action_masks: Masks = None
    ) -> tuple[Tensor, Tensor]:
        """Actions ``(N, ...)`` and their log-probabilities ``(N,)``."""
        distribution = self.get_distribution(obs, action_masks)
        actions = distribution.get_actions(deterministic=deterministic)
        log_probs = distribution.log_prob(actions)
        return self._to_env(actions), log_probs

    def _predict(self, observation: PyTorchObs, deterministic: bool = False, action_masks: Masks = None) -> Tensor:
        distribution = self.get_distribution(observation, action_masks)
        return self._to_env(distribution.get_actions(deterministic=deterministic))

    def predict(
        self,
        observation: np.ndarray | dict[str, np.ndarray],
        state: tuple[np.ndarray, ...] | None = None,
        episode_start: np.ndarray | None = None,
        deterministic: bool = False,
        action_masks: np.ndarray | None = None,
    ) -> tuple[np.ndarray, tuple[np.ndarray, ...] | None]:
        """As SB3, with sb3-contrib's ``action_masks``.

        Args:
            observation: One observation, or a batch.
            state: Returned as it is: the policy has no memory.
            episode_start: Not used.
            deterministic: Take the most likely action.
            action_masks: Allowed actions, one row per observation.

        Returns:
            Actions (of the action space's shape, with a batch dimension if the observation has one) and ``state``.
        """
        if action_masks is None:
            return super().predict(observation, state, episode_start, deterministic)
        self.set_training_mode(False)
        obs, is_batch = self.obs_to_tensor(observation)
        with torch.no_grad():
            actions = self._predict(obs, deterministic, action_masks)
        array = actions.cpu().numpy().reshape((-1, *cast(tuple[int, ...], self.action_space.shape)))
        return (array if is_batch else array.squeeze(axis=0)), state

    def evaluate_actions(self, obs: PyTorchObs, actions: Tensor, action_masks: Masks = None) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of given actions, each ``(N,)``."""
        distribution = self.get_distribution(obs, action_masks)
        entropy = distribution.entropy()
        log_probs = distribution.log_prob(self._from_env(actions))
        # A distribution without a closed-form entropy: -log π of the sampled action estimates it.
        return log_probs, -log_probs if entropy is None else entropy

    def sample_candidates(
        self, obs: PyTorchObs, n_candidates: int, action_masks: Masks = None
    ) -> tuple[Tensor, Tensor]:
        """``n_candidates`` independent actions per observation: ``(N, K, ...)`` and log-probabilities ``(N, K)``."""
        distribution = self.get_distribution(obs, action_masks)
        actions = sample_many(distribution, n_candidates)
        return self._to_env(actions), log_prob_many(distribution, actions)

    def candidate_log_probs(
        self, obs: PyTorchObs, actions: Tensor, action_masks: Masks = None
    ) -> tuple[Tensor, Tensor]:
        """Log-probabilities ``(N, K)`` of candidate actions ``(N, K, ...)``; entropies ``(N,)``."""
        distribution = self.get_distribution(obs, action_masks)
        log_probs = log_prob_many(distribution, self._from_env(actions))
        entropy = distribution.entropy()
        return log_probs, -log_probs.mean(1) if entropy is None else entropy

    def all_log_probs(self, obs: PyTorchObs, action_masks: Masks = None) -> Tensor:
        """Log-probabilities of every action of a Discrete space, ``(N, n)``."""
        return log_softmax(self._logits(obs, action_masks))

    def _to_env(self, actions: Tensor) -> Tensor:
        if isinstance(self.action_space, spaces.Box):
            return actions.reshape(*actions.shape[:-1], *self.action_space.shape)
        return actions if self._counts_from_zero else actions + self.action_start

    def _from_env(self, actions: Tensor) -> Tensor:
        if isinstance(self.action_space, spaces.MultiBinary):
            return actions.float()
        if isinstance(self.action_space, spaces.Box):
            batch_dims = actions.ndim - len(self.action_space.shape)
            return actions.reshape(*actions.shape[:batch_dims], -1)
        return actions if self._counts_from_zero else actions - self.action_start

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        data.update(
            lr_schedule=self._dummy_schedule,  # the optimizer is not needed to predict
            net_arch=self.net_arch,
            activation_fn=self.activation_fn,
            ortho_init=self.ortho_init,
            log_std_init=self.log_std_init,
            features_extractor_class=self.features_extractor_class,
            features_extractor_kwargs=self.features_extractor_kwargs,
            optimizer_class=self.optimizer_class,
            optimizer_kwargs=self.optimizer_kwargs,
        )
        return data


def sample_many(distribution: Distribution, n: int) -> Tensor:
    """``n`` independent actions of each of ``N`` rows, ``(N, n, ...)``."""
    if isinstance(distribution, CategoricalDistribution):  # in one draw
        return sample_several(distribution.distribution.probs, n)
    return torch.stack([distribution.sample() for _ in range(n)], 1)


def log_prob_many(distribution: Distribution, actions: Tensor) -> Tensor:
    """Log-probabilities ``(N, n)`` of ``n`` actions of each row, ``(N, n, ...)``."""
    if isinstance(distribution, CategoricalDistribution):
        return distribution.distribution.logits.gather(1, actions.long())
    return torch.stack([distribution.log_prob(action) for action in actions.unbind(1)], 1)


def _start(space: spaces.Space) -> int | np.ndarray:
    """Value of a space's first element, 0 where it has none."""
    if isinstance(space, spaces.Discrete):
        return int(space.start)
    if isinstance(space, spaces.MultiDiscrete) and np.any(space.start):
        return space.start
    return 0


def count_from_zero(obs: PyTorchObs, space: spaces.Space) -> PyTorchObs:
    """SB3 one-hot encodes Discrete and MultiDiscrete observations as if they began at 0: subtract ``start``."""
    if isinstance(space, spaces.Dict) and isinstance(obs, dict):
        return {key: cast(Tensor, count_from_zero(value, space[key])) for key, value in obs.items()}
    start, obs = _start(space), cast(Tensor, obs)
    if isinstance(start, np.ndarray):
        return obs - torch.as_tensor(start, device=obs.device)
    return obs - start if start else obs


def _as_type(obs: PyTorchObs, dtype: torch.dtype) -> PyTorchObs:
    if isinstance(obs, dict):
        return {key: value.to(dtype) for key, value in obs.items()}
    return obs.to(dtype)
