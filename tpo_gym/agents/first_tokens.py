"""Beginnings that rows of tokens have in common: all sequences of a few tokens, each computed once for all rows.

Where there are as many rows as sequences of ``t`` tokens, there is less to compute for these sequences than for the
first ``t`` positions of the rows. What a causal transformer computes at a position depends on the tokens up to there,
so it is the same. No shape depends on the tokens themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

MAX_NODES = 512
"""Attention costs the square of the sequences."""
WORTH = 0.1
"""Share of all positions that must be saved: splitting and joining rows takes time too."""


class FirstTokens:
    """All sequences of 1 to ``depth`` tokens, the *nodes*, shorter ones first.

    Args:
        vocab_size: Number of tokens ``V``.
        depth: Length of the longest.
        n_positions: Positions that a symbol can have: see :meth:`CausalTransformer.symbol_table`.
        device: Where the tensors lie.
    """

    def __init__(self, vocab_size: int, depth: int, n_positions: int, device: torch.device) -> None:
        lengths = torch.arange(1, depth + 1)
        counts = vocab_size**lengths
        offsets = counts.cumsum(0) - counts
        length = lengths.repeat_interleave(counts)
        code = torch.arange(len(length)) - offsets.repeat_interleave(counts)
        self.depth = depth
        self.size = len(length)
        """Number of nodes."""
        self.symbols = (code % vocab_size * n_positions + length - 1).to(device)
        """Last token and position of each node, as one index."""
        ancestor = code.unsqueeze(1) // vocab_size ** (length.unsqueeze(1) - length).clamp(min=0)
        self.mask = ((length <= length.unsqueeze(1)) & (ancestor == code))[None, None].to(device)
        """Which nodes each node begins with, bool ``(1, 1, size, size)``."""
        exponents = lengths.unsqueeze(1) - lengths
        self._weights = torch.where(exponents < 0, 0, vocab_size ** exponents.clamp(min=0)).to(device)
        self._offsets = offsets.to(device)

    def nodes(self, tokens: Tensor) -> Tensor:
        """The node that each position of ``tokens`` ``(N, depth)`` is at, same shape."""
        return (tokens.unsqueeze(1) * self._weights).sum(-1) + self._offsets


_made = cache(FirstTokens)


def first_tokens(
    shape: Sequence[int], limit: int, vocab_size: int, n_positions: int, device: torch.device
) -> FirstTokens | None:
    """What rows of tokens have in common; ``None`` where that is too little.

    On GPUs it is always too little: there launching operations takes longer than computing them.

    Args:
        shape: Rows and tokens of each, ``(N, T)``.
        limit: Look at so many of the ``T`` at most.
        vocab_size: Number of tokens ``V``.
        n_positions: See :class:`FirstTokens`.
        device: Where the rows lie.
    """
    n_rows, length = shape
    depth = saved = size = 0
    while depth < limit and (count := vocab_size ** (depth + 1)) <= n_rows and size + count <= MAX_NODES:
        depth, saved, size = depth + 1, saved + n_rows - count, size + count
    if saved <= WORTH * n_rows * length or device.type != "cpu" or torch.compiler.is_dynamo_compiling():
        return None
    return _made(vocab_size, depth, n_positions, device)
