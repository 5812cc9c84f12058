"""Numbers that are made anew for the next update: see :mod:`tpo_gym.agents.captured`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor

Draw = Callable[[], Tensor]
_taker: ContextVar[Callable[[Draw], Tensor] | None] = ContextVar("taker", default=None)


def drawn(draw: Draw) -> Tensor:
    """What ``draw`` returns. Whoever repeats what is computed here takes it apart from that: see :func:`taken_by`.

    Args:
        draw: Draws a new tensor of random numbers, or of what depends on the number of updates; always of one shape and
            dtype. It does not read tensors that are computed.
    """
    taker = _taker.get()
    return draw() if taker is None else taker(draw)


@contextmanager
def taken_by(taker: Callable[[Draw], Tensor]) -> Iterator[None]:
    """Let ``taker`` call the functions given to :func:`drawn` meanwhile."""
    token = _taker.set(taker)
    try:
        yield
    finally:
        _taker.reset(token)
