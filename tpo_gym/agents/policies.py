"""Critic-free policies: SB3's features extractors, networks and action distributions, without a value function."""

from __future__ import annotations

from functools import partial
from typing import Any, cast

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import DiagGaussianDistribution, Distribution, make_proba_distribution
from stable_baselines3.common.policies import BasePolicy
from stable_baselines3.common.torch_layers import (
    BaseFeaturesExtractor,
    CombinedExtractor,
    FlattenExtractor,
    NatureCNN,
    create_mlp,
)
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor, nn

from tpo_gym.agents.optimizers import MuonAdamW
from tpo_gym.agents.transformer import CausalTransformer, TokenLayout, lecun_normal_, select_rows


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
    ) -> None:
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
        if net_arch is None:
            net_arch = [] if features_extractor_class is NatureCNN else [64, 64]
        self.net_arch = net_arch
        self.activation_fn = activation_fn
        self.ortho_init = ortho_init
        self.log_std_init = log_std_init
        self._build()
        self.optimizer = self.optimizer_class(self.parameters(), **{"lr": lr_schedule(1), **self.optimizer_kwargs})

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
    def action_start(self) -> int:
        """Value of the first action (``Discrete(n, start=...)``); the network counts from 0."""
        return int(self.action_space.start) if isinstance(self.action_space, spaces.Discrete) else 0

    def extract_features(self, obs: PyTorchObs, features_extractor: BaseFeaturesExtractor | None = None) -> Tensor:
        """Features ``(N, features_dim)`` of a batch of observations."""
        return super().extract_features(_count_from_zero(obs, self.observation_space), self.features_extractor)

    def _head(self, obs: PyTorchObs) -> Tensor:
        """The action head's output in float32, whatever precision the network runs in."""
        return self.action_net(self.mlp(self.extract_features(obs))).float()

    def get_distribution(self, obs: PyTorchObs) -> Distribution:
        """Action distribution for a batch of observations."""
        head = self._head(obs)
        if self.log_std is not None:
            return self.action_dist.proba_distribution(head, self.log_std)
        return self.action_dist.proba_distribution(head)

    def forward(self, obs: PyTorchObs, deterministic: bool = False) -> tuple[Tensor, Tensor]:
        """Actions ``(N, ...)`` and their log-probabilities ``(N,)``."""
        distribution = self.get_distribution(obs)
        actions = distribution.get_actions(deterministic=deterministic)
        log_probs = distribution.log_prob(actions)
        return self._to_env(actions), log_probs

    def _predict(self, observation: PyTorchObs, deterministic: bool = False) -> Tensor:
        return self._to_env(self.get_distribution(observation).get_actions(deterministic=deterministic))

    def evaluate_actions(self, obs: PyTorchObs, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities and entropies of given actions, each ``(N,)``."""
        distribution = self.get_distribution(obs)
        entropy = distribution.entropy()
        log_probs = distribution.log_prob(self._from_env(actions))
        # A distribution without a closed-form entropy: -log π of the sampled action estimates it.
        return log_probs, -log_probs if entropy is None else entropy

    def sample_candidates(self, obs: PyTorchObs, n_candidates: int) -> tuple[Tensor, Tensor]:
        """``n_candidates`` independent actions per observation: ``(N, K, ...)`` and log-probabilities ``(N, K)``."""
        distribution = self.get_distribution(obs)
        actions = [distribution.sample() for _ in range(n_candidates)]
        log_probs = [distribution.log_prob(action) for action in actions]
        return self._to_env(torch.stack(actions, 1)), torch.stack(log_probs, 1)

    def candidate_log_probs(self, obs: PyTorchObs, actions: Tensor) -> tuple[Tensor, Tensor]:
        """Log-probabilities ``(N, K)`` of candidate actions ``(N, K, ...)``; entropies ``(N,)``."""
        distribution = self.get_distribution(obs)
        log_probs = [distribution.log_prob(action) for action in self._from_env(actions).unbind(1)]
        entropy = distribution.entropy()
        stacked = torch.stack(log_probs, 1)
        return stacked, -stacked.mean(1) if entropy is None else entropy

    def all_log_probs(self, obs: PyTorchObs) -> Tensor:
        """Log-probabilities of every action of a Discrete space, ``(N, n)``."""
        return torch.log_softmax(self._head(obs), dim=-1)

    def _to_env(self, actions: Tensor) -> Tensor:
        return actions + self.action_start if self.action_start else actions

    def _from_env(self, actions: Tensor) -> Tensor:
        return actions - self.action_start if self.action_start else actions

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


def _count_from_zero(obs: PyTorchObs, space: spaces.Space) -> PyTorchObs:
    """SB3 one-hot encodes Discrete observations as if they began at 0: subtract ``start``."""
    if isinstance(space, spaces.Discrete) and space.start:
        return cast(Tensor, obs) - int(space.start)
    if isinstance(space, spaces.Dict) and isinstance(obs, dict):
        return {key: cast(Tensor, _count_from_zero(value, space[key])) for key, value in obs.items()}
    return obs


class CnnPolicy(ActorPolicy):
    """Policy for images: SB3's ``NatureCNN`` unless another extractor is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("features_extractor_class", NatureCNN)
        super().__init__(*args, **kwargs)


class MultiInputPolicy(ActorPolicy):
    """Policy for Dict observations: SB3's ``CombinedExtractor`` unless another extractor is given."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        kwargs.setdefault("features_extractor_class", CombinedExtractor)
        super().__init__(*args, **kwargs)


class TabularPolicy(ActorPolicy):
    """A table of logits: Discrete observations, Discrete actions.

    Args:
        observation_space: Discrete; one row per value.
        action_space: Discrete; one column per action.
        lr_schedule: Learning rate as a function of the remaining progress.
        init_std: Deviation of the initial logits (0: the uniform policy).
        kwargs: ``optimizer_class`` and ``optimizer_kwargs``.

    Raises:
        ValueError: If a space is not Discrete.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        init_std: float = 0.0,
        **kwargs: Any,
    ) -> None:
        if not (isinstance(observation_space, spaces.Discrete) and isinstance(action_space, spaces.Discrete)):
            raise ValueError(
                "TabularPolicy needs Discrete observations and actions, got "
                f"{observation_space} and {action_space}. Use MlpPolicy for other spaces."
            )
        self.init_std = init_std
        super().__init__(observation_space, action_space, lr_schedule, net_arch=[], ortho_init=False, **kwargs)

    def _build(self) -> None:
        super()._build()
        self.action_net = nn.Embedding(int(self.observation_space.n), int(self.action_space.n))  # type: ignore[attr-defined]
        nn.init.normal_(self.action_net.weight, std=self.init_std)

    def _head(self, obs: PyTorchObs) -> Tensor:
        rows = _count_from_zero(obs, self.observation_space)
        return self.action_net(rows.long().reshape(-1)).float()  # type: ignore[union-attr]

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        kept = ("observation_space", "action_space", "lr_schedule", "optimizer_class", "optimizer_kwargs")
        return {**{key: data[key] for key in kept}, "init_std": self.init_std}


class TransformerPolicy(ActorPolicy):
    """Causal transformer over prompt and written tokens (TPO, section 3.4), for the token tasks.

    Beside the step-by-step interface it generates all completions of a prompt in one cached pass and scores whole
    sequences, with the prompt computed once per group.

    Args:
        observation_space: MultiDiscrete of a token task.
        action_space: Discrete(vocab_size).
        lr_schedule: Learning rate as a function of the remaining progress.
        d_model: Width.
        n_layers: Number of blocks.
        n_heads: Attention heads.
        ffn_mult: Feed-forward width over ``d_model``.
        optimizer_class: Muon on matrices and AdamW on the rest unless another is given.
        kwargs: ``optimizer_kwargs``.

    Raises:
        ValueError: If the spaces are not those of a token task.
    """

    def __init__(
        self,
        observation_space: spaces.Space,
        action_space: spaces.Space,
        lr_schedule: Schedule,
        d_model: int = 64,
        n_layers: int = 2,
        n_heads: int = 2,
        ffn_mult: int = 4,
        optimizer_class: type[torch.optim.Optimizer] = MuonAdamW,
        **kwargs: Any,
    ) -> None:
        if not isinstance(action_space, spaces.Discrete):
            raise ValueError(
                f"TransformerPolicy emits one token per step: actions must be Discrete, got {action_space}."
            )
        self.model_kwargs = dict(d_model=d_model, n_layers=n_layers, n_heads=n_heads, ffn_mult=ffn_mult)
        layout = TokenLayout(observation_space, int(action_space.n))
        super().__init__(
            observation_space,
            action_space,
            lr_schedule,
            net_arch=[],
            ortho_init=False,
            optimizer_class=optimizer_class,
            **kwargs,
        )
        self.layout = layout

    def _build(self) -> None:
        layout = TokenLayout(self.observation_space)
        self.features_extractor = FlattenExtractor(self.observation_space)  # SB3 expects one; it has no weights
        self.model = CausalTransformer(layout.vocab_size, 2 * layout.sequence_length, **self.model_kwargs)
        self._build_head(self.model_kwargs["d_model"])
        lecun_normal_(self.action_net.weight, self.model_kwargs["d_model"])  # type: ignore[arg-type]
        nn.init.zeros_(self.action_net.bias)  # type: ignore[arg-type]

    def _head(self, obs: PyTorchObs) -> Tensor:
        tokens, read_at = self.layout.split(obs)  # type: ignore[arg-type]
        hidden, _ = self.model(tokens[:, :-1])
        rows = torch.arange(hidden.shape[0], device=hidden.device)
        return self.action_net(hidden[rows, read_at]).float()

    def decoder(self, prompts: Tensor, group_size: int = 1) -> Decoder:
        """A decoder at the first token of ``group_size`` completions of each prompt ``(B, H)``."""
        return Decoder(self, prompts, group_size)

    @torch.no_grad()
    def generate(self, prompts: Tensor, group_size: int, deterministic: bool = False) -> tuple[Tensor, Tensor]:
        """Complete every prompt ``group_size`` times.

        Args:
            prompts: ``(B, H)`` int64.
            group_size: Completions per prompt, ``K``.
            deterministic: Take the most likely token at each step.

        Returns:
            Tokens ``(B, K, H)`` and the log-probability of each token, same shape.
        """
        decoder = self.decoder(prompts, group_size)
        tokens, log_probs = [], []
        for _ in range(self.layout.sequence_length):
            distribution = decoder.distribution()
            token = distribution.get_actions(deterministic=deterministic)
            tokens.append(token)
            log_probs.append(distribution.log_prob(token))
            decoder.append(token)
        shape = (prompts.shape[0], group_size, self.layout.sequence_length)
        return torch.stack(tokens, 1).view(shape), torch.stack(log_probs, 1).view(shape)

    def sequence_log_probs(self, prompts: Tensor, tokens: Tensor) -> Tensor:
        """Next-token log-probabilities along given completions.

        Args:
            prompts: ``(B, H)`` int64.
            tokens: ``(B, K, H)`` int64.

        Returns:
            ``(B, K, H, V)`` float32: the distribution that each token was drawn from.
        """
        n_groups, group_size, length = tokens.shape
        flat = tokens.flatten(0, 1)
        rows = torch.arange(n_groups, device=prompts.device).repeat_interleave(group_size)
        inverse = None
        if flat.device.type == "cpu" and group_size > 1:
            # Candidates of a group coincide once the policy has learned: compute each distinct one once. On other
            # devices the shapes stay fixed.
            distinct, inverse = torch.unique(torch.cat([rows.unsqueeze(1), flat], 1), dim=0, return_inverse=True)
            rows, flat = distinct[:, 0], distinct[:, 1:]
        hidden, cache = self.model(prompts)
        first = self.action_net(hidden[:, -1]).float()[rows].unsqueeze(1)
        rest, _ = self.model(flat[:, :-1], select_rows(cache, rows)) if length > 1 else (hidden[:0, :0], cache)
        logits = torch.cat([first, self.action_net(rest).float()], 1) if length > 1 else first
        log_probs = torch.log_softmax(logits, dim=-1)
        if inverse is not None:
            log_probs = log_probs[inverse]
        return log_probs.view(n_groups, group_size, length, -1)

    def _get_constructor_parameters(self) -> dict[str, Any]:
        data = super()._get_constructor_parameters()
        kept = ("observation_space", "action_space", "lr_schedule", "optimizer_class", "optimizer_kwargs")
        return {**{key: data[key] for key in kept}, **self.model_kwargs}


class Decoder:
    """Token-by-token decoding with a key/value cache; the prompt is computed once per group.

    Rows are ``B * K`` completions, the ``K`` of a prompt side by side.
    """

    def __init__(self, policy: TransformerPolicy, prompts: Tensor, group_size: int) -> None:
        self._policy = policy
        hidden, cache = policy.model(prompts)
        rows = torch.arange(prompts.shape[0], device=prompts.device).repeat_interleave(group_size)
        self._cache, self._last = select_rows(cache, rows), hidden[rows, -1]
        self._pending: Tensor | None = None

    def append(self, tokens: Tensor) -> None:
        """Extend every completion by one token, ``(B * K,)``."""
        self._pending = tokens

    def distribution(self) -> Distribution:
        """Distribution of every completion's next token."""
        if self._pending is not None:
            # Delayed until it is asked for: the last token of a completion is never computed.
            hidden, self._cache = self._policy.model(self._pending.unsqueeze(1), self._cache)
            self._last, self._pending = hidden[:, -1], None
        return self._policy.action_dist.proba_distribution(self._policy.action_net(self._last).float())
