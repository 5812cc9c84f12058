"""Optimizers beside torch's: Muon for matrices with AdamW for the rest, and steps of a fixed length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor


class MuonAdamW(torch.optim.Optimizer):
    """``torch.optim.Muon`` on 2-D tensors and ``torch.optim.AdamW`` on the rest (TPO, section 3.4).

    Every parameter goes to exactly one of the two; a tied parameter counts once, a frozen one (``requires_grad=False``)
    keeps its value because it gets no gradient. Muon scales a step on a ``(rows, columns)`` matrix by
    ``sqrt(max(1, rows / columns))``, so store matrices with the fan-out as rows (as ``nn.Linear`` does).

    Args:
        params: Parameters, named parameters or parameter groups (a group may set its own ``lr`` or ``weight_decay``).
        lr: Learning rate of both.
        momentum: Muon's momentum (Nesterov).
        betas: AdamW's coefficients.
        eps: AdamW's epsilon.
        weight_decay: Decoupled weight decay of both.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay))
        matrices, others, seen = [], [], set()
        for group in self.param_groups:
            settings = {k: v for k, v in group.items() if k in ("lr", "weight_decay")}
            unique = [p for p in group["params"] if not (p in seen or seen.add(p))]  # type: ignore[func-returns-value]
            matrices.append({"params": [p for p in unique if p.ndim == 2], **settings})
            others.append({"params": [p for p in unique if p.ndim != 2], **settings})
        self._inner: list[torch.optim.Optimizer] = []
        if any(group["params"] for group in matrices):
            groups = [group for group in matrices if group["params"]]
            self._inner.append(_BatchedMuon(groups, lr=lr, momentum=momentum, weight_decay=weight_decay))
        if any(group["params"] for group in others):
            groups = [group for group in others if group["params"]]
            self._inner.append(
                torch.optim.AdamW(groups, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
            )
        self._share_groups()

    def _share_groups(self) -> None:
        # SB3 sets the learning rate through `param_groups`, so they must be the inner optimizers' own dictionaries.
        self.param_groups = [group for inner in self._inner for group in inner.param_groups]

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "_inner": self._inner}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._share_groups()

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step of both optimizers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for inner in self._inner:
            inner.step()
        return loss

    def state_dict(self) -> dict[str, Any]:
        """The states of both optimizers."""
        return {_name(inner): inner.state_dict() for inner in self._inner}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned for the same parameters.

        Raises:
            ValueError: If the state belongs to another set of optimizers.
        """
        names = [_name(inner) for inner in self._inner]
        if sorted(state_dict) != sorted(names):
            raise ValueError(f"This state is of {sorted(state_dict)}, this optimizer holds {sorted(names)}.")
        for inner in self._inner:
            inner.load_state_dict(state_dict[_name(inner)])
        self._share_groups()


def _name(inner: torch.optim.Optimizer) -> str:
    return "Muon" if isinstance(inner, torch.optim.Muon) else "AdamW"


class _BatchedMuon(torch.optim.Muon):
    """``torch.optim.Muon`` with several matrices orthogonalized together: the same numbers, in fewer operations.

    A small network has several small matrices, and most of Muon's time there goes to launching operations.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            batches: dict[tuple[Any, ...], list[tuple[Tensor, Tensor]]] = {}
            for p, update in self._updates(group):
                small = p.numel() <= _SMALL
                batches.setdefault((p.device, None if small else p.shape), []).append((p, update))
            for pairs in batches.values():
                settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
                directions = _orthogonalize([update for _, update in pairs], *settings)
                for (p, _), direction in zip(pairs, directions, strict=True):
                    rate = group["lr"] * math.sqrt(max(1, p.shape[0] / p.shape[1]))
                    if group["weight_decay"]:
                        p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.add_(direction, alpha=-rate)

    def _updates(self, group: dict[str, Any]) -> list[tuple[Tensor, Tensor]]:
        """The parameters that have gradients, and their momentum."""
        params = [p for p in group["params"] if p.grad is not None]
        gradients, buffers = [p.grad for p in params], []
        for p in params:
            state = self.state[p]
            if "momentum_buffer" not in state:
                state["momentum_buffer"] = torch.zeros_like(p.grad)
            buffers.append(state["momentum_buffer"])
        if not params:
            return []
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = torch._foreach_lerp(gradients, buffers, group["momentum"]) if group["nesterov"] else buffers
        return list(zip(params, updates, strict=True))


_SMALL = 2**15
"""Numbers in a matrix up to which launching the operations takes longer than computing them."""


def _orthogonalize(
    updates: list[Tensor], coefficients: tuple[float, float, float], steps: int, eps: float
) -> list[Tensor]:
    """Newton-Schulz iteration of ``torch.optim.Muon`` on several matrices, in bfloat16.

    Matrices of different shapes are padded with zeros, which the iteration keeps.
    """
    a, b, c = coefficients
    wide = [update.mT if update.shape[0] > update.shape[1] else update for update in updates]
    x = torch.zeros(
        len(wide),
        max(len(matrix) for matrix in wide),
        max(matrix.shape[1] for matrix in wide),
        dtype=torch.bfloat16,
        device=wide[0].device,
    )
    own = [slot[: len(matrix), : matrix.shape[1]] for slot, matrix in zip(x, wide, strict=True)]
    torch._foreach_copy_(own, wide)
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    directions = [slot[: len(matrix), : matrix.shape[1]] for slot, matrix in zip(x, wide, strict=True)]
    return [
        direction.mT if update.shape[0] > update.shape[1] else direction
        for update, direction in zip(updates, directions, strict=True)
    ]


class NormalizedStep(torch.optim.Optimizer):
    """Gradient steps of one length, ``θ -= lr · g / ‖g‖`` with the norm over all parameters (TPO, section 3.1).

    A gradient of zero moves nothing.

    Args:
        params: Parameters or parameter groups (a group may set its own ``lr``).
        lr: Length of a step.
    """

    def __init__(self, params: Iterable[Any], lr: float = 0.1) -> None:
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        gradients = [(p, p.grad, group["lr"]) for group in self.param_groups for p in group["params"]]
        norm = torch.nn.utils.get_total_norm([g for _, g, _ in gradients if g is not None])
        scale = torch.where(norm > 0, 1 / norm, 0.0)
        for p, g, lr in gradients:
            if g is not None:
                p.sub_(lr * scale * g)
        return loss


@torch.no_grad()
def normalized_steps(optimizers: Sequence[NormalizedStep]) -> None:
    """One step of several optimizers of like parameters, each normalized by itself; those without gradients rest.

    The learning rates are the first one's.
    """
    rates = [group["lr"] for group in optimizers[0].param_groups for _ in group["params"]]
    active = [parameters_of(optimizer) for optimizer in optimizers if _has_gradients(optimizer)]
    columns = [
        (column, lr) for *column, lr in zip(*active, rates, strict=True) if column and column[0].grad is not None
    ]
    gradients = [torch.stack([p.grad for p in column]) for column, _ in columns]
    if not gradients:
        return
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
    scale = torch.where(norms > 0, 1 / norms, 0.0)
    for (column, lr), g in zip(columns, gradients, strict=True):
        torch._foreach_sub_(column, (lr * scale.view(-1, *[1] * (g.ndim - 1)) * g).unbind())


def _has_gradients(optimizer: torch.optim.Optimizer) -> bool:
    return any(p.grad is not None for p in parameters_of(optimizer))


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters that an optimizer updates, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
