"""Optimizers beside torch's: Muon for matrices with AdamW for the rest, and steps of a fixed length."""

from __future__ import annotations

from collections.abc import Callable, Iterable
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
            self._inner.append(torch.optim.Muon(groups, lr=lr, momentum=momentum, weight_decay=weight_decay))
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
        return {type(inner).__name__: inner.state_dict() for inner in self._inner}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned for the same parameters.

        Raises:
            ValueError: If the state belongs to another set of optimizers.
        """
        names = [type(inner).__name__ for inner in self._inner]
        if sorted(state_dict) != sorted(names):
            raise ValueError(f"This state is of {sorted(state_dict)}, this optimizer holds {sorted(names)}.")
        for inner in self._inner:
            inner.load_state_dict(state_dict[type(inner).__name__])
        self._share_groups()


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


def parameters_of(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """All parameters that an optimizer updates, in order."""
    return [p for group in optimizer.param_groups for p in group["params"]]
