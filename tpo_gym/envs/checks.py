"""Checks of arguments shared by the environments: each returns the value in its final form or says what to do."""

from __future__ import annotations

import operator
from typing import Any

import numpy as np
import torch
from gymnasium.vector import AutoresetMode
from torch import Tensor


def as_int(name: str, value: Any, minimum: int) -> int:
    """Returns ``value`` as an int of at least ``minimum``.

    Raises:
        TypeError: It is not an integer (a bool is not one).
        ValueError: It is smaller than ``minimum``.
    """
    if isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}={value!r} must be an integer, not a bool.")
    try:
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}={value!r} must be an integer, not {type(value).__name__}.") from None
    if number < minimum:
        raise ValueError(f"{name}={number} must be at least {minimum}.")
    return number


def as_seed(seed: Any) -> int | None:
    """Returns a seed in [0, 2**63), or None.

    Raises:
        TypeError: It is not an integer or None.
        ValueError: It is out of that range.
    """
    if seed is None:
        return None
    if isinstance(seed, (list, tuple, np.ndarray)):
        raise TypeError(
            f"seed={seed!r} is a sequence, but the sub-environments share one random generator: pass a single int."
        )
    number = as_int("seed", seed, minimum=0)
    if number >= 2**63:
        raise ValueError(f"seed={number} must be below 2**63.")
    return number


def as_device(device: str | torch.device) -> torch.device:
    """Returns the device with its index, having checked that it can hold a tensor.

    Raises:
        ValueError: There is no such device here.
    """
    try:
        return torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(
            f"device={device!r} cannot be used here ({str(error).splitlines()[0]}). Use 'cpu', or 'cuda' on a machine "
            "with a GPU and a CUDA build of torch."
        ) from error


def as_integers(name: str, values: Any, device: torch.device) -> Tensor:
    """Returns ``values`` as an int64 tensor on ``device``.

    Raises:
        TypeError: They are not integers.
    """
    tensor = values if isinstance(values, Tensor) else torch.as_tensor(np.asarray(values))
    if tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool:
        raise TypeError(f"{name} has dtype {tensor.dtype}, but it must hold integers.")
    return tensor.to(device=device, dtype=torch.int64)


def as_actions(actions: Any, num_envs: int, count: int, device: torch.device, candidates: bool = False) -> Tensor:
    """Returns actions as an int64 tensor (num_envs,), or also (num_envs, K) where ``candidates`` are allowed.

    Raises:
        TypeError: They are not integers.
        ValueError: The shape is another one, or (CPU) one is not in 0 to ``count`` - 1.
    """
    tensor = as_integers("actions", actions, device)
    fits = tensor.ndim == 1 or (candidates and tensor.ndim == 2 and tensor.shape[1] > 0)
    if not fits or tensor.shape[0] != num_envs:
        wanted = f"({num_envs},)" + (f" or ({num_envs}, K)" if candidates else "")
        raise ValueError(f"actions has shape {tuple(tensor.shape)}, but it must have shape {wanted}.")
    check_range("actions", tensor, count)
    return tensor


def as_autoreset_mode(mode: Any) -> AutoresetMode:
    """Returns the mode, given it or its value.

    Raises:
        ValueError: It is unknown.
    """
    try:
        return AutoresetMode(mode)
    except ValueError:
        known = [known.value for known in AutoresetMode]
        raise ValueError(f"autoreset_mode={mode!r} is unknown. Choose one of {known}.") from None


def check_range(name: str, values: Tensor, count: int) -> None:
    """Checks 0 <= values < count on a CPU; does nothing on a GPU, where looking would make the host wait.

    Raises:
        ValueError: A value is out of range.
    """
    if values.device.type != "cpu" or not values.numel():
        return
    array = values.numpy()  # shares memory; several times faster than torch for small batches
    low, high = int(array.min()), int(array.max())
    if low < 0 or high >= count:
        wrong = low if low < 0 else high
        raise ValueError(f"{name} holds {wrong}, but its values must be integers from 0 to {count - 1}.")


def as_group_size(value: Any, num_envs: int) -> int:
    """Returns a group size that divides ``num_envs``.

    Raises:
        TypeError: It is not an integer.
        ValueError: It is smaller than 1 or does not divide ``num_envs``.
    """
    size = as_int("options['group_size']", value, minimum=1)
    if num_envs % size:
        raise ValueError(
            f"group_size={size} does not divide num_envs={num_envs}: {num_envs % size} sub-environment(s) would be "
            f"left over. Use a multiple of {size}, for example num_envs={size * -(-num_envs // size)}."
        )
    return size


def as_rows(mask: Any, num_envs: int, group_size: int) -> np.ndarray:
    """Returns the indices, int64, that a ``reset_mask`` bool (num_envs,) selects.

    Raises:
        TypeError: It is not bool.
        ValueError: It has another shape, selects nothing, or splits a group.
    """
    flags = mask.cpu().numpy() if isinstance(mask, Tensor) else np.asarray(mask)
    if flags.dtype != np.bool_:
        raise TypeError(f"options['reset_mask'] has dtype {flags.dtype}, but it must be bool.")
    if flags.shape != (num_envs,):
        raise ValueError(f"options['reset_mask'] has shape {flags.shape}, but it must have ({num_envs},).")
    if not flags.any():
        raise ValueError("options['reset_mask'] selects no sub-environment; leave it out to reset all of them.")
    groups = flags.reshape(-1, group_size)
    if (groups.any(axis=1) != groups.all(axis=1)).any():
        raise ValueError(
            f"options['reset_mask'] splits a group: with group_size={group_size} every {group_size} consecutive "
            "sub-environments share a context and are reset together."
        )
    return np.flatnonzero(flags)
