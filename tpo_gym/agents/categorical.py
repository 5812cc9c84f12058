"""Categorical distributions, where torch's kernels take a slow way on a CPU."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tpo_gym.draws import drawn

SHORT = range(4, 16)
"""Lengths of rows, e.g. ten actions, for which a detour pays: torch's softmax wants 16 numbers at once, else it takes
one at a time; fewer than 4 cost little."""


def log_softmax(x: Tensor) -> Tensor:
    """``torch.log_softmax`` over the last dimension; several times faster on a CPU where that one is short."""
    return _over_last(torch.log_softmax, x)


def softmax(x: Tensor) -> Tensor:
    """``torch.softmax`` over the last dimension: see :func:`log_softmax`."""
    return _over_last(torch.softmax, x)


def _over_last(kernel: Callable[[Tensor, int], Tensor], x: Tensor) -> Tensor:
    if x.ndim > 1 and x.shape[-1] in SHORT and x.device.type == "cpu":
        # Over the first dimension it takes many rows at once. Contiguous, as samplers draw in the order of memory.
        return kernel(x.movedim(-1, 0), 0).movedim(0, -1).contiguous()
    return kernel(x, -1)


def sample(probabilities: Tensor) -> Tensor:
    """One draw from each row of ``(N, n)``: ``(N,)``, by inverting the distribution.

    It takes one random number per row, where ``torch.multinomial`` takes one per entry for a single draw.
    """
    return _invert(probabilities, 1, probabilities.dtype).squeeze(1)


def race(probabilities: Tensor) -> Tensor:
    """One draw from each row of ``(N, n)``: ``(N, 1)``, with the random numbers that ``torch.multinomial`` takes.

    Every entry draws an exponential number; the smallest one over its probability wins.
    """
    shape, dtype, device = probabilities.shape, probabilities.dtype, probabilities.device
    numbers = drawn(lambda: torch.empty(shape, dtype=dtype, device=device).exponential_())
    return (probabilities / numbers).argmax(-1, keepdim=True)


def sample_several(probabilities: Tensor, n: int) -> Tensor:
    """``n`` draws with replacement from each row of ``(N, m)``: ``(N, n)``.

    On a CPU these are the draws of ``torch.multinomial``, but for rounding.
    """
    return _invert(probabilities, n, torch.float64)


def _invert(probabilities: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """``n`` draws from each row by inverting the distribution, ``(N, n)``; ``dtype``: of the random numbers."""
    cumulative = probabilities.cumsum(-1).to(dtype)
    n_rows, device = len(cumulative), cumulative.device
    uniform = drawn(lambda: torch.rand(n_rows, n, dtype=dtype, device=device))
    # Slightly below the sum, so that rounding never leads to an entry behind the last possible one.
    total = cumulative[:, -1:] * (1 - torch.finfo(dtype).eps)
    return torch.searchsorted(cumulative, uniform * total, right=True)
