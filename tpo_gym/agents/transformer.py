"""The causal transformer of the token tasks, with a key/value cache and prompts shared by their candidates."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from gymnasium import spaces
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import Tensor, nn
from torch.nn import functional as F

from tpo_gym.agents.first_tokens import FirstTokens, first_tokens

# Keys and values of all positions so far, one tensor ``(rows, length, 2 * d_model)`` per layer.
Cache = list[Tensor]


def lecun_normal_(weight: Tensor, fan_in: int) -> None:
    """Fill with a normal of variance ``1 / fan_in``, truncated at two deviations (the reference's dense layers)."""
    std = 1.0 / math.sqrt(fan_in)
    # The constant restores the variance that truncation at ±2σ removes.
    nn.init.trunc_normal_(weight, std=std / 0.87962566103423978, a=-2 * std / 0.8796, b=2 * std / 0.8796)


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each with a residual connection.

    Attention projections are stored as 3-D tensors: :class:`~tpo_gym.agents.optimizers.MuonAdamW` gives 2-D tensors to
    Muon, and the reference keeps attention out of it.
    """

    def __init__(self, d_model: int, n_heads: int, ffn_mult: int) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.attention_norm = nn.LayerNorm(d_model, eps=1e-6)
        self.qkv_weight = nn.Parameter(torch.empty(3, d_model, d_model))
        self.qkv_bias = nn.Parameter(torch.zeros(3 * d_model))
        self.out_weight = nn.Parameter(torch.empty(d_model, n_heads, d_model // n_heads))
        self.out_bias = nn.Parameter(torch.zeros(d_model))
        self.ffn_norm = nn.LayerNorm(d_model, eps=1e-6)
        self.ffn_in = nn.Linear(d_model, ffn_mult * d_model)
        self.ffn_out = nn.Linear(ffn_mult * d_model, d_model)
        for weight in (self.qkv_weight, self.out_weight, self.ffn_in.weight):
            lecun_normal_(weight, d_model)
        lecun_normal_(self.ffn_out.weight, ffn_mult * d_model)
        nn.init.zeros_(self.ffn_in.bias)
        nn.init.zeros_(self.ffn_out.bias)

    def project(self, x: Tensor) -> Tensor:
        """Queries, keys and values ``(..., 3 * d_model)`` of ``x`` ``(..., d_model)``."""
        return F.linear(self.attention_norm(x), self.qkv_weight.flatten(0, 1), self.qkv_bias)

    def attend(self, q: Tensor, kv: Tensor, mask: Tensor | None = None) -> Tensor:
        """Attention of ``T`` positions ``(N, T, d_model)`` to ``L`` positions ``(N, L, 2 * d_model)``.

        ``mask`` ``(N, 1, T, L)`` is added to the logits; without one the ``T`` are the last of the ``L``, causally.
        """
        n, n_read, d_model = q.shape
        length, d_head = kv.shape[1], d_model // self.n_heads
        k, v = kv.view(n, length, 2, self.n_heads, d_head).permute(2, 0, 3, 1, 4)
        q = q.view(n, n_read, self.n_heads, d_head).transpose(1, 2)
        causal = mask is None and 1 < n_read == length
        if mask is None and 1 < n_read < length:
            mask = torch.ones(n_read, length, dtype=torch.bool, device=q.device).tril(length - n_read)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)
        return y.transpose(1, 2).flatten(2)

    def finish(self, x: Tensor, y: Tensor) -> Tensor:
        """Output projection of the attention ``y`` and feed-forward, each added to ``x``."""
        x = x + F.linear(y, self.out_weight.flatten(1), self.out_bias)
        return x + self.ffn_out(F.gelu(self.ffn_in(self.ffn_norm(x)), approximate="tanh"))


class CausalTransformer(nn.Module):
    """Decoder-only transformer over tokens (TPO, section 3.4; initialisation and layout of the reference).

    Args:
        vocab_size: Number of tokens.
        max_length: Longest sequence, prompt included.
        d_model: Width.
        n_layers: Number of blocks.
        n_heads: Attention heads; must divide ``d_model``.
        ffn_mult: Width of the feed-forward layer over ``d_model``.
    """

    def __init__(
        self,
        vocab_size: int,
        max_length: int,
        d_model: int = 64,
        n_layers: int = 2,
        n_heads: int = 2,
        ffn_mult: int = 4,
    ) -> None:
        super().__init__()
        if d_model % n_heads:
            raise ValueError(f"d_model={d_model} is not a multiple of n_heads={n_heads}: choose widths that divide.")
        # Stored as (d_model, entries): rows are the fan-out, as in every other 2-D weight that Muon scales.
        self.token_table = nn.Parameter(torch.randn(d_model, vocab_size) / math.sqrt(d_model))
        self.position_table = nn.Parameter(torch.randn(d_model, max_length) * 0.02)
        blocks = nn.ModuleList(Block(d_model, n_heads, ffn_mult) for _ in range(n_layers))
        self.blocks: Sequence[Block] = blocks  # type: ignore[assignment]
        self.final_norm = nn.LayerNorm(d_model, eps=1e-6)

    def embed(self, tokens: Tensor, start: int) -> Tensor:
        """Embeddings of ``tokens`` ``(..., T)`` at the positions from ``start`` on, ``(..., T, d_model)``."""
        positions = self.position_table[:, start : start + tokens.shape[-1]].T
        return F.embedding(tokens, self.token_table.T) + positions

    def forward(
        self, tokens: Tensor, past: Cache | None = None, read_from: int = 0, filled: int | None = None
    ) -> tuple[Tensor, Cache]:
        """Hidden states of ``tokens`` that follow ``past``.

        Args:
            tokens: ``(N, T)`` int64.
            past: Keys and values of the preceding positions, one row per row of ``tokens``.
            read_from: First of the ``T`` positions whose hidden state is wanted; the last block computes no other.
            filled: Only so many positions of ``past`` are there, the rest is room: see :func:`with_room`. Keys and
                values are then written into it, which no gradient goes through.

        Returns:
            ``(N, T - read_from, d_model)`` after the final LayerNorm, and the cache that includes all these tokens.
        """
        start, length = (filled or past[0].shape[1]) if past else 0, tokens.shape[1]
        n_positions, vocab_size = self.position_table.shape[1], self.token_table.shape[1]
        if not past and (first := first_tokens(tokens.shape, read_from, vocab_size, n_positions, tokens.device)):
            return self._forward_shared(tokens, first, read_from)
        if length > 1 and vocab_size <= len(tokens):
            # The first block's projections are computed once per symbol (token at a position), not per row.
            x, qkv = self._start(self._symbols(tokens, start))
        else:
            x = self.embed(tokens, start)
            qkv = self.blocks[0].project(x)
        cache: Cache = []
        for i, block in enumerate(self.blocks):
            if i:
                qkv = block.project(x)
            q, kv = self.split(qkv)
            if past and filled:
                past[i][:, start : start + length] = kv
                cache.append(past[i])
                kv = past[i][:, : start + length]
            else:
                kv = torch.cat([past[i], kv], dim=1) if past else kv
                cache.append(kv)
            if i + 1 == len(self.blocks) and read_from:
                x, q = x[:, read_from:], q[:, read_from:]
            x = block.finish(x, block.attend(q, kv))
        return self.final_norm(x), cache

    def _forward_shared(self, tokens: Tensor, first: FirstTokens, read_from: int) -> tuple[Tensor, Cache]:
        """:meth:`forward` where the first tokens, which are not read, are computed once for all rows that have them.

        Rows are flat here: first the nodes, then the remaining positions of each row of ``tokens``.
        """
        n_rows, depth = len(tokens), first.depth
        nodes = first.nodes(tokens[:, :depth])
        rest = self._symbols(tokens[:, depth:], depth)
        parts = [first.size, rest.numel()]
        x, qkv = self._start(torch.cat([first.symbols, rest.flatten()]))
        cache: Cache = []
        for i, block in enumerate(self.blocks):
            if i:
                qkv = block.project(x)
            q, kv = self.split(qkv)
            (q_first, q_rest), (kv_first, kv_rest) = q.split(parts), kv.split(parts)
            q_rest, kv_rest = q_rest.unflatten(0, (n_rows, -1)), kv_rest.unflatten(0, (n_rows, -1))
            cache.append(torch.cat([F.embedding(nodes, kv_first), kv_rest], 1))
            if i + 1 < len(self.blocks):
                y_first = block.attend(q_first.unsqueeze(0), kv_first.unsqueeze(0), first.mask).squeeze(0)
                x = block.finish(x, torch.cat([y_first, block.attend(q_rest, cache[-1]).flatten(0, 1)]))
            else:
                x = x.split(parts)[1].unflatten(0, (n_rows, -1))[:, read_from - depth :]
                x = block.finish(x, block.attend(q_rest[:, read_from - depth :], cache[-1]))
        return self.final_norm(x), cache

    def _symbols(self, tokens: Tensor, start: int) -> Tensor:
        """Rows of :meth:`symbol_table`, of ``tokens`` ``(..., T)`` at the positions from ``start`` on."""
        positions = torch.arange(start, start + tokens.shape[-1], device=tokens.device)
        return tokens * self.position_table.shape[1] + positions

    def _start(self, symbols: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings of symbols and their projections in the first block, both computed once per symbol."""
        table = self.symbol_table()
        return F.embedding(symbols, table), F.embedding(symbols, self.blocks[0].project(table))

    def split(self, qkv: Tensor) -> tuple[Tensor, Tensor]:
        """Queries ``(..., d_model)``, and keys and values ``(..., 2 * d_model)``."""
        d_model = self.token_table.shape[0]
        q, kv = qkv.split([d_model, 2 * d_model], dim=-1)  # one split is differentiated faster than two slices
        return q, kv

    def symbol_table(self) -> Tensor:
        """Embedding of each token at each position: row ``token * max_length + position``."""
        return (self.token_table.T.unsqueeze(1) + self.position_table.T).flatten(0, 1)


def select_rows(cache: Cache, rows: Tensor) -> Cache:
    """The cache with the given rows, e.g. each prompt's row once per candidate."""
    return [kv[rows] for kv in cache]


def with_room(cache: Cache, rows: Tensor, length: int) -> Cache:
    """The given rows as in :func:`select_rows`, with room for ``length`` positions, in which decoding can go on."""
    wider = [kv.new_empty(len(rows), length, kv.shape[2]) for kv in cache]
    for room, kv in zip(wider, cache, strict=True):
        room[:, : kv.shape[1]] = kv[rows]
    return wider


class TokenLayout:
    """What the token tasks' observation means: ``H`` prompt tokens, then ``H`` tokens or the symbol "not written yet".

    Raises:
        ValueError: If the spaces are not those of a token task.
    """

    def __init__(self, observation_space: spaces.Space, vocab_size: int | None = None) -> None:
        nvec = getattr(observation_space, "nvec", None)
        if not isinstance(observation_space, spaces.MultiDiscrete) or nvec is None or nvec.ndim != 1 or len(nvec) % 2:
            raise ValueError(
                "The transformer reads token tasks: a MultiDiscrete observation of prompt and written tokens, "
                f"got {observation_space}. Use MlpPolicy, CnnPolicy or MultiInputPolicy here."
            )
        self.sequence_length = len(nvec) // 2
        self.vocab_size = int(nvec.max()) - 1
        if vocab_size is not None and vocab_size != self.vocab_size:
            raise ValueError(
                f"The observation {observation_space} has {self.vocab_size} tokens and one symbol for 'not written', "
                f"but there are {vocab_size} actions: the transformer emits one of the same tokens at each step."
            )

    def split(self, observations: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens ``(N, 2H)`` with unwritten positions set to 0, and the position to read each row at, ``(N,)``."""
        observations = observations.long()
        written = (observations[:, self.sequence_length :] != self.vocab_size).sum(1)
        read_at = (self.sequence_length - 1 + written).clamp(max=2 * self.sequence_length - 2)
        return observations.clamp(max=self.vocab_size - 1), read_at


def read_hidden(model: CausalTransformer, layout: TokenLayout, observations: Tensor) -> Tensor:
    """Hidden state of each observation ``(N, 2H)`` at its last written token: ``(N, d_model)``."""
    if observations.device.type != "cpu":  # shapes stay fixed
        tokens, read_at = layout.split(observations)
        hidden, _ = model(tokens[:, :-1])  # the last token is read by no one
        return hidden[torch.arange(len(tokens), device=tokens.device), read_at]
    # Each distinct observation once, and none further than it is read.
    distinct, inverse = torch.unique(observations, dim=0, return_inverse=True)
    tokens, read_at = layout.split(distinct)
    order = read_at.argsort(stable=True)
    parts = []
    for position, rows in zip(*_runs(read_at[order], order), strict=True):
        hidden, _ = model(tokens[rows, : position + 1], read_from=position)
        parts.append(hidden[:, 0])
    return torch.cat(parts)[order.argsort()[inverse]]


def _runs(values: Tensor, order: Tensor) -> tuple[list[int], list[Tensor]]:
    """The distinct sorted values, and the rows that have each."""
    distinct, counts = values.unique_consecutive(return_counts=True)
    return distinct.tolist(), list(order.split(counts.tolist()))


class TransformerExtractor(BaseFeaturesExtractor):
    """The transformer as a features extractor: give SB3's PPO the network that :class:`TransformerPolicy` has.

    ``PPO("MlpPolicy", env, policy_kwargs=dict(features_extractor_class=TransformerExtractor, net_arch=[],
    optimizer_class=MuonAdamW))``: the action head on the last written token's hidden state is then the same.

    Args:
        observation_space: That of a token task.
        kwargs: Arguments of :class:`CausalTransformer`.
    """

    def __init__(self, observation_space: spaces.Space, **kwargs: int) -> None:
        layout = TokenLayout(observation_space)
        d_model = kwargs.get("d_model", 64)
        super().__init__(observation_space, features_dim=d_model)
        self.layout = layout
        self.model = CausalTransformer(layout.vocab_size, 2 * layout.sequence_length, **kwargs)

    def forward(self, observations: Tensor) -> Tensor:
        """``(N, Σ nvec)`` one-hot (as SB3 preprocesses) or ``(N, 2H)`` symbols -> ``(N, d_model)``."""
        if observations.shape[1] != 2 * self.layout.sequence_length:
            observations = observations.unflatten(1, (2 * self.layout.sequence_length, -1)).argmax(-1)
        return read_hidden(self.model, self.layout, observations)
