"""Optimizers beside torch's: Muon for matrices with Adam for the rest, and steps of a fixed length."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from tpo_gym.draws import drawn


def total_norm(gradients: list[Tensor]) -> Tensor:
    """``torch.nn.utils.get_total_norm`` of tensors on one device, which takes half as long to launch."""
    return torch.linalg.vector_norm(torch.stack(torch._foreach_norm(gradients))) if gradients else torch.zeros(())


@torch.no_grad()
def take_step(optimizer: torch.optim.Optimizer) -> None:
    """``optimizer.step()``, to the same bits; of a fused Adam on a CPU that nobody watches, the kernel alone.

    Around it torch spends several times as long as in it where networks are small.
    """
    groups = [[p for p in group["params"] if p.grad is not None] for group in optimizer.param_groups]
    if not _is_plain_adam(optimizer) or any(p not in optimizer.state or not p.is_cpu for g in groups for p in g):
        optimizer.step()
        return
    for group, params in zip(optimizer.param_groups, groups, strict=True):
        if params:
            states = [optimizer.state[p] for p in params]
            steps = [state["step"] for state in states]
            whole = steps[0]._base
            if whole is None or whole.shape != (len(steps),) or any(step._base is not whole for step in steps):
                whole = torch.stack(steps)  # of which the parameters' own are parts, as torch wants them
                for i, state in enumerate(states):
                    state["step"] = whole[i]
                steps = [state["step"] for state in states]
            whole.add_(1)
            kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
            kernel(
                params,
                [p.grad for p in params],
                [state["exp_avg"] for state in states],
                [state["exp_avg_sq"] for state in states],
                [],
                steps,
                lr=group["lr"],
                beta1=group["betas"][0],
                beta2=group["betas"][1],
                weight_decay=group["weight_decay"],
                eps=group["eps"],
                amsgrad=False,
                maximize=group["maximize"],
            )


def _is_plain_adam(optimizer: torch.optim.Optimizer) -> bool:
    return (
        type(optimizer) in (torch.optim.Adam, torch.optim.AdamW)
        and all(g["fused"] and not g["amsgrad"] and isinstance(g["lr"], float) for g in optimizer.param_groups)
        and not hasattr(optimizer, "grad_scale")  # set by those who train in half precision
        and not _is_watched(optimizer)
    )


def _is_watched(optimizer: torch.optim.Optimizer) -> bool:
    own = (optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks)
    everyones = (_global_optimizer_pre_hooks, _global_optimizer_post_hooks)
    # Torch's schedules of the learning rate patch the step.
    return "step" in vars(optimizer) or any(hooks for hooks in (*own, *everyones))


def can_be_recorded(optimizer: torch.optim.Optimizer) -> bool:
    """Whether :class:`~tpo_gym.agents.captured.Captured` repeats this optimizer's steps: those of unwatched Muon."""
    return (
        type(optimizer) is MuonAdamW
        and not any(_is_watched(each) or type(each) not in (_BatchedMuon, _FlatNAdam) for each in optimizer._inner)
        and not _is_watched(optimizer)
    )


class MuonAdamW(torch.optim.Optimizer):
    """Muon on 2-D tensors, Adam with decoupled weight decay on the rest (TPO, section 3.4).

    As in the reference (``optax.contrib.muon``) the Newton-Schulz iterations are in float32, and both have Nesterov
    momentum. ``torch.optim.Muon`` iterates in bfloat16, and amplifies its rounding to steps where no gradient points.

    Every parameter goes to exactly one of the two; a tied parameter counts once, a frozen one (``requires_grad=False``)
    keeps its value because it gets no gradient. Muon scales a step on a ``(rows, columns)`` matrix by
    ``sqrt(max(1, rows / columns))``, so store matrices with the fan-out as rows (as ``nn.Linear`` does).

    Args:
        params: Parameters, named parameters or parameter groups (a group may set its own ``lr`` or ``weight_decay``).
        lr: Learning rate of both.
        momentum: Muon's momentum.
        betas: Adam's coefficients.
        eps: What both add to the norms that they divide by.
        weight_decay: Decoupled weight decay of both.
        nesterov: Nesterov momentum in both.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.95,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        nesterov: bool = True,
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
            muon = dict(lr=lr, momentum=momentum, weight_decay=weight_decay, nesterov=nesterov, eps=eps)
            self._inner.append(_BatchedMuon(groups, **muon))  # type: ignore[arg-type]
        if any(group["params"] for group in others):
            groups = [group for group in others if group["params"]]
            adam = dict(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
            self._inner.append(
                _FlatNAdam(groups, adam) if nesterov else torch.optim.AdamW(groups, **adam, fused=True)  # type: ignore[arg-type]
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
    return {"_BatchedMuon": "Muon", "_FlatNAdam": "NAdam"}.get(type(inner).__name__, type(inner).__name__)


class _FlatNAdam(torch.optim.Optimizer):
    """``torch.optim.NAdam`` with decoupled weight decay and constant momentum, on all tensors of a group as one vector.

    Most tensors that are not matrices are small, and torch's would spend its time on launching operations for each.
    (Dozat's schedule of the momentum, which torch's has, would begin at half of it.)
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for params in _of_one_age(self, group):
                self._step_together(params, group)

    def _step_together(self, params: list[Tensor], group: dict[str, Any]) -> None:
        def coefficients(step: int) -> list[float]:
            beta1, beta2 = group["betas"]
            lookahead = (beta1 / (1 - beta1 ** (step + 1)), (1 - beta1) / (1 - beta1**step))
            return [*lookahead, 1 - beta2**step, group["lr"], 1 - group["lr"] * group["weight_decay"]]

        of_mean, of_gradient, correction, rate, decay = _coefficients(self, params, coefficients)
        beta1, beta2 = group["betas"]
        gradient = torch.cat([p.grad.flatten() for p in params])  # type: ignore[union-attr]
        mean, square = self._moments(params, "exp_avg"), self._moments(params, "exp_avg_sq")
        mean.lerp_(gradient, 1 - beta1)
        square.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        size = (square / correction).sqrt_().add_(group["eps"])
        ahead = (mean * of_mean).add_(gradient * of_gradient)
        if group["weight_decay"]:
            torch._foreach_mul_(params, decay)
        torch._foreach_sub_(params, _parts(ahead.div_(size).mul_(rate), params))

    def _moments(self, params: list[Tensor], name: str) -> Tensor:
        """One vector, of which the parameters' own states are parts."""
        parts = [self.state[p].get(name) for p in params]
        whole = None if parts[0] is None else parts[0]._base
        total = sum(p.numel() for p in params)
        if whole is None or whole.shape != (total,) or any(part is None or part._base is not whole for part in parts):
            own = [torch.zeros_like(p) if part is None else part for p, part in zip(params, parts, strict=True)]
            whole = torch.cat([part.flatten() for part in own])
            for p, part in zip(params, _parts(whole, params), strict=True):
                self.state[p][name] = part
        return whole


def _of_one_age(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> list[list[Tensor]]:
    """The group's parameters that have gradients, by device, type and the number of steps they have taken."""
    found: dict[tuple[Any, ...], list[Tensor]] = {}
    for p in group["params"]:
        if p.grad is not None:
            state = optimizer.state[p]
            state["step"] = int(state.get("step", 0))  # torch's own, in a file, is a tensor
            found.setdefault((p.device, p.dtype, state["step"]), []).append(p)
    return list(found.values())


def _coefficients(
    optimizer: torch.optim.Optimizer, params: list[Tensor], of_step: Callable[[int], list[float]]
) -> Sequence[Tensor]:
    """Count the parameters' next step; what the numbers are that depend on it, each a tensor of one."""
    device = params[0].device
    dtype = torch.promote_types(params[0].dtype, torch.float32)

    def draw() -> Tensor:
        step = optimizer.state[params[0]]["step"] + 1
        for p in params:
            optimizer.state[p]["step"] = step
        numbers = torch.tensor(of_step(step), dtype=dtype)
        # From memory that stays where it is the device takes them without making anybody wait.
        return numbers if device.type != "cuda" else numbers.pin_memory().to(device, non_blocking=True)

    return drawn(draw).unbind()


def _parts(whole: Tensor, params: list[Tensor]) -> list[Tensor]:
    """What belongs to each parameter, in its shape."""
    pieces = whole.split([p.numel() for p in params])
    return [piece.view(p.shape) for piece, p in zip(pieces, params, strict=True)]


class _BatchedMuon(torch.optim.Muon):
    """``torch.optim.Muon`` in the gradients' precision, with bias-corrected momentum, several matrices at a time.

    A small network has several small matrices, and most of Muon's time there goes to launching operations.
    """

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """One step."""
        for group in self.param_groups:
            for params in _of_one_age(self, group):
                self._step_together(params, group)

    def _step_together(self, params: list[Tensor], group: dict[str, Any]) -> None:
        def coefficients(step: int) -> list[float]:
            beta, ahead = group["momentum"], 1 if group["nesterov"] else 0
            lookahead = (beta**ahead / (1 - beta ** (step + ahead)), (1 - beta) / (1 - beta**step))
            return [*lookahead, group["lr"], 1 - group["lr"] * group["weight_decay"]]

        *lookahead, rate, decay = _coefficients(self, params, coefficients)
        if group["weight_decay"]:
            torch._foreach_mul_(params, decay)
        batches: dict[Any, list[tuple[Tensor, Tensor]]] = {}
        for p, update in zip(params, self._updates(params, group, *lookahead), strict=True):
            # Small ones are padded together, but not a tiny one to many times its size.
            size = max(p.shape).bit_length() if p.numel() <= _SMALL else p.shape
            batches.setdefault(size, []).append((p, update))
        for pairs in batches.values():
            settings = group["ns_coefficients"], group["ns_steps"], group["eps"]
            for (p, _), direction in zip(pairs, _orthogonalize([u for _, u in pairs], rate, *settings), strict=True):
                p.add_(direction, alpha=-math.sqrt(max(1, p.shape[0] / p.shape[1])))

    def _updates(
        self, params: list[Tensor], group: dict[str, Any], of_momentum: Tensor, of_gradient: Tensor
    ) -> Sequence[Tensor]:
        """The parameters' momentum."""
        gradients = [p.grad for p in params if p.grad is not None]
        for p in params:
            if "momentum_buffer" not in self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        buffers = [self.state[p]["momentum_buffer"] for p in params]
        torch._foreach_lerp_(buffers, gradients, 1 - group["momentum"])
        updates = torch._foreach_mul(buffers, of_momentum)
        if group["nesterov"]:
            torch._foreach_add_(updates, torch._foreach_mul(gradients, of_gradient))
        return updates


_SMALL = 2**15
"""Numbers in a matrix up to which launching the operations takes longer than computing them."""


def _orthogonalize(
    updates: list[Tensor], length: Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> list[Tensor]:
    """Muon's Newton-Schulz iteration on several matrices of one type, times ``length``.

    Matrices of different shapes are padded with zeros, which the iteration keeps.
    """
    a, b, c = coefficients
    wide = [update.mT if update.shape[0] > update.shape[1] else update for update in updates]
    x = wide[0].new_zeros(len(wide), max(len(matrix) for matrix in wide), max(matrix.shape[1] for matrix in wide))
    torch._foreach_copy_(_own(x, wide), wide)
    x = x / (x.norm(dim=(1, 2), keepdim=True) + eps)
    for _ in range(steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    x = x * length
    return [
        direction.mT if update.shape[0] > update.shape[1] else direction
        for update, direction in zip(updates, _own(x, wide), strict=True)
    ]


def _own(padded: Tensor, matrices: list[Tensor]) -> list[Tensor]:
    """Each matrix's part of its padded form."""
    return [slot[: len(matrix), : matrix.shape[1]] for slot, matrix in zip(padded, matrices, strict=True)]


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
        norm = total_norm([g for _, g, _ in gradients if g is not None])
        scale = torch.where(norm > 0, 1 / norm, 0.0)
        for p, g, lr in gradients:
            if g is not None:
                p.sub_(lr * scale * g)
        return loss


@torch.no_grad()
def normalized_steps(steps: Sequence[tuple[Tensor, Tensor, float]], live: Tensor | None = None) -> None:
    """:class:`NormalizedStep` of several networks at once, each normalized by itself.

    Args:
        steps: Every parameter of all networks and its gradient, ``(S, ...)``, and its learning rate.
        live: The networks that step, bool ``(S,)``; the others rest. ``None``: all step.
    """
    norms = torch.stack([g.flatten(1).norm(dim=1) for _, g, _ in steps]).norm(dim=0)
    scale = torch.where(norms > 0 if live is None else (norms > 0) & live, 1 / norms, 0.0)
    for weight, g, lr in steps:
        weight.sub_(lr * scale.view(-1, *[1] * (g.ndim - 1)) * g)
