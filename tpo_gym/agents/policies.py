"""The policies by name: for flat, image and Dict observations, tables, and the transformer of the token tasks."""

from __future__ import annotations

from typing import Any

import torch
from gymnasium import spaces
from stable_baselines3.common.distributions import Distribution
from stable_baselines3.common.torch_layers import CombinedExtractor, FlattenExtractor, NatureCNN
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor, nn
from torch.nn import functional as F

from tpo_gym.agents.actor import ActorPolicy, count_from_zero
from tpo_gym.agents.categorical import log_softmax, race
from tpo_gym.agents.optimizers import MuonAdamW
from tpo_gym.agents.prefix_tree import SharedPrefixes, TreeDecoder
from tpo_gym.agents.transformer import (
    CausalTransformer,
    TokenLayout,
    lecun_normal_,
    read_hidden,
    select_rows,
    with_room,
)

__all__ = [
    "ActorPolicy",
    "CnnPolicy",
    "Decoder",
    "MultiInputPolicy",
    "TabularPolicy",
    "TransformerPolicy",
]


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
        rows = count_from_zero(obs, self.observation_space)
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
        optimizer_class: Muon on matrices and Adam on the rest unless another is given.
        kwargs: ``optimizer_kwargs``.

    Raises:
        ValueError: If the spaces are not those of a token task.
    """

    fixed_shapes: bool = False
    """Compute shared prefixes once per candidate, as on a GPU, also on a CPU: then no shape depends on data."""

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
        return self.action_net(read_hidden(self.model, self.layout, obs)).float()  # type: ignore[arg-type]

    def decoder(self, prompts: Tensor, group_size: int = 1) -> Decoder:
        """A decoder at the first token of ``group_size`` completions of each prompt ``(B, H)``."""
        return Decoder(self, prompts, group_size)

    @torch.no_grad()
    def generate(
        self, prompts: Tensor, group_size: int, deterministic: bool = False, limit: int | None = None
    ) -> tuple[Tensor, Tensor]:
        """Complete every prompt ``group_size`` times.

        Args:
            prompts: ``(B, H)`` int64.
            group_size: Completions per prompt, ``K``.
            deterministic: Take the most likely token at each step.
            limit: Largest number of completions at once, to bound memory; the result is the same.

        Returns:
            Tokens ``(B, K, H)`` and the log-probability of each token, same shape.
        """
        n_prompts, length = len(prompts), self.layout.sequence_length
        if limit is None or n_prompts * group_size <= limit:
            return self._complete(prompts, group_size, deterministic, None)
        # All random numbers first, in the order in which they are drawn without a limit.
        rows = prompts.new_empty(n_prompts * group_size, self.layout.vocab_size, dtype=torch.float32)
        races = [torch.empty_like(rows).exponential_() for _ in range(0 if deterministic else length)]
        by_group = [race.unflatten(0, (n_prompts, group_size)) for race in races]
        tokens = prompts.new_empty(n_prompts, group_size, length)
        log_probs = torch.empty(tokens.shape, device=prompts.device)
        per_part = min(limit, group_size)
        for chunk in torch.arange(n_prompts).split(max(1, limit // group_size)):
            own = slice(int(chunk[0]), int(chunk[-1]) + 1)
            for start in range(0, group_size, per_part):
                part = slice(start, min(start + per_part, group_size))
                drawn = [race[own, part].flatten(0, 1) for race in by_group]
                size = part.stop - part.start
                tokens[own, part], log_probs[own, part] = self._complete(prompts[own], size, deterministic, drawn)
        return tokens, log_probs

    def _complete(
        self, prompts: Tensor, group_size: int, deterministic: bool, races: list[Tensor] | None
    ) -> tuple[Tensor, Tensor]:
        """Complete in one piece.

        ``races``: exponential numbers ``(B * K, V)`` of each step. The token whose number over its probability is the
        smallest wins, which is how ``torch.multinomial`` draws one sample.
        """
        decoder = self.decoder(prompts, group_size)
        tokens, log_probs = [], []
        for step in range(self.layout.sequence_length):
            choices = log_softmax(decoder.logits())
            if deterministic:
                token = choices.argmax(1, keepdim=True)
            elif races is None:
                token = race(choices.exp())
            else:
                token = (choices.exp() / races[step]).argmax(1, keepdim=True)
            log_probs.append(choices.gather(1, token))
            tokens.append(token.squeeze(1))
            decoder.append(tokens[-1])
        shape = (len(prompts), group_size, self.layout.sequence_length)
        return torch.stack(tokens, 1).view(shape), torch.stack(log_probs, 1).view(shape)

    def shared_prefixes(self, prompts: Tensor, tokens: Tensor) -> SharedPrefixes | None:
        """What :meth:`sequence_log_probs` may be given to save work where it is called several times.

        ``None`` where there is nothing to share, and on devices where shapes that depend on data cost more.
        """
        if self.fixed_shapes or prompts.device.type != "cpu" or tokens.shape[1] == 1 or tokens.shape[2] == 1:
            return None
        return SharedPrefixes(prompts, tokens, self.layout.vocab_size, self.model.token_table.dtype)

    def sequence_log_probs(self, prompts: Tensor, tokens: Tensor, shared: SharedPrefixes | None = None) -> Tensor:
        """Next-token log-probabilities along given completions.

        Args:
            prompts: ``(B, H)`` int64.
            tokens: ``(B, K, H)`` int64.
            shared: What :meth:`shared_prefixes` returned for them.

        Returns:
            ``(B, K, H, V)`` float32: the distribution that each token was drawn from.
        """
        n_groups, group_size, length = tokens.shape
        before = prompts.shape[1] - 1  # the prompt's last position predicts the first token
        if group_size == 1 or length == 1:
            hidden, _ = self.model(torch.cat([prompts, tokens[:, 0, :-1]], 1), read_from=before)
            log_probs = self._log_probs(hidden).unsqueeze(1)
            return log_probs.expand(-1, group_size, -1, -1)  # with one token the prompt is all that they depend on
        shared = self.shared_prefixes(prompts, tokens) if shared is None else shared
        if shared is not None:
            log_probs = self._log_probs(shared.hidden(self.model))
            return F.embedding(shared.read_at, log_probs).view(n_groups, group_size, length, -1)
        rows = torch.arange(n_groups, device=prompts.device).repeat_interleave(group_size)
        first, cache = self.model(prompts, read_from=before)
        rest, _ = self.model(tokens.flatten(0, 1)[:, :-1], select_rows(cache, rows))
        return self._log_probs(torch.cat([first[rows], rest], 1)).view(n_groups, group_size, length, -1)

    def _log_probs(self, hidden: Tensor) -> Tensor:
        return log_softmax(self.action_net(hidden).float())

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
        self._tree: TreeDecoder | None = None
        self._pending: Tensor | None = None
        if group_size > 1 and prompts.device.type == "cpu" and not policy.fixed_shapes:
            self._tree = TreeDecoder(policy.model, prompts, group_size, policy.layout.vocab_size)
            return
        hidden, cache = policy.model(prompts, read_from=prompts.shape[1] - 1)
        rows = torch.arange(prompts.shape[0], device=prompts.device).repeat_interleave(group_size)
        self._filled = prompts.shape[1]
        self._cache = with_room(cache, rows, self._filled + policy.layout.sequence_length - 1)
        self._last = hidden[rows, 0]

    def append(self, tokens: Tensor) -> None:
        """Extend every completion by one token, ``(B * K,)``."""
        self._pending = tokens

    def distribution(self) -> Distribution:
        """Distribution of every completion's next token."""
        return self._policy.action_dist.proba_distribution(self.logits())

    def logits(self) -> Tensor:
        """Logits of every completion's next token, ``(B * K, V)`` float32."""
        if self._pending is not None:  # delayed until it is asked for: the last token of a completion is never computed
            if self._tree is not None:
                self._tree.append(self._pending)
            else:
                hidden, self._cache = self._policy.model(self._pending.unsqueeze(1), self._cache, 0, self._filled)
                self._last, self._filled = hidden[:, -1], self._filled + 1
            self._pending = None
        if self._tree is not None:
            return self._policy.action_net(self._tree.hidden).float()[self._tree.tree.node_of]
        return self._policy.action_net(self._last).float()
