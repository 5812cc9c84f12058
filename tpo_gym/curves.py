"""What is done to curves before they are drawn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.floating]


def smooth(values: Array, width: int) -> Array:
    """Trailing running mean over the last axis of up to ``width`` values."""
    if width <= 1:
        return values
    sums = np.cumsum(values, -1)
    stop = np.arange(values.shape[-1])
    start = stop - width
    before = np.where(start >= 0, sums[..., np.maximum(start, 0)], 0.0)
    return (sums - before) / np.minimum(stop + 1, width)
