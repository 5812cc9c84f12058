"""A computation whose tensor operations are recorded once and replayed from then on.

Small networks spend most of an update between operations: in Python, in autograd, in vectorizing over seeds. A replay
calls the recorded operations alone, in the same order, so its numbers are the same. ``torch.compile`` then turns them
into few kernels, and on a GPU into CUDA graphs.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_map_only

from tpo_gym.draws import Draw, taken_by


class _WithoutLooking(TorchFunctionMode):
    """Lets ``one_hot``, which looks whether a number is out of range, compare instead."""

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is F.one_hot:
            return self._one_hot(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _one_hot(self, tensor: Tensor, num_classes: int = -1) -> Tensor:
        if num_classes < 0:
            return F.one_hot(tensor, num_classes)
        return (tensor.unsqueeze(-1) == torch.arange(num_classes, device=tensor.device)).to(tensor.dtype)


class Captured:
    """A function that is executed and recorded at its first call, and replayed at all others.

    What it does must be the same each time, but for the numbers in tensors: no decision and no other result than
    tensors may depend on them. Tensors that it reads or changes beside its arguments are those of the first call. It
    may draw random numbers by :func:`tpo_gym.draws.drawn` alone.

    Args:
        function: Takes trees (tuples, lists, dictionaries) of tensors and returns one.
        options: Arguments of ``torch.compile``; ``None``: the operations are called one by one. Where compiling fails
            they are too, with a warning.
        keep: Called before recording; what it returns is called to undo what the function has done if it cannot be
            recorded. The function itself is called from then on, with a warning where ``options`` are given.
    """

    def __init__(
        self,
        function: Callable[..., Any],
        options: dict[str, Any] | None = None,
        keep: Callable[[], Callable[[], None]] | None = None,
    ) -> None:
        self._function = function
        self._options = options
        self._keep = keep
        self._draws: list[tuple[Tensor, Draw]] = []
        self._graph: GraphModule | None = None
        self._compiled: Callable[..., Any] | None = None
        self._failed = False

    def __call__(self, *args: Any) -> Any:
        """What the function returns."""
        if self._failed:
            return self._function(*args)
        if self._graph is None:
            undo = self._keep() if self._keep is not None else None
            try:
                with taken_by(self._take):
                    return self._record(*args)
            except Exception as error:
                self._failed = True
                if self._options is not None:
                    warn_of_failure(error)
                if undo is not None:
                    undo()
                return self._function(*args)
        with torch.no_grad():
            return self._replay(*args)

    def _replay(self, *args: Any) -> Any:
        for buffer, draw in self._draws:
            buffer.copy_(draw())
        if self._compiled is not None:
            try:
                return self._run_compiled(*args)
            except Exception as error:
                warn_of_failure(error)
                self._compiled = None
        assert self._graph is not None
        return self._graph(*args)

    def _take(self, draw: Draw) -> Tensor:
        with _disable_current_modes():  # so the numbers become an input of what is recorded
            values = draw()
        self._draws.append((values, draw))
        return values

    def _record(self, *args: Any) -> Any:
        results: list[Any] = []

        def traced(*args: Any) -> Any:
            with _WithoutLooking():
                results[:] = [self._function(*args)]
            return results[0]

        graph = make_fx(traced)(*args)
        for node in graph.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
                raise RuntimeError(f"{node.target} draws random numbers that a replay would not draw again.")
        self._graph = graph
        if self._options is not None:
            self._compiled = torch.compile(graph, **self._options)
        return results[0]

    def _run_compiled(self, *args: Any) -> Any:
        assert self._compiled is not None
        if torch.cuda.is_initialized():  # else it would import the whole compiler
            torch.compiler.cudagraph_mark_step_begin()
        results = self._compiled(*args)
        # A CUDA graph's next replay writes where this one's results lie.
        return tree_map_only(Tensor, lambda value: value.clone() if value.is_cuda else value, results)


def warn_of_failure(error: Exception) -> None:
    """Tell that training goes on without compilation."""
    reason = (str(error).splitlines() or [""])[0][:200]
    warnings.warn(
        f"torch.compile failed ({type(error).__name__}: {reason}); training goes on without it, with the same result.",
        UserWarning,
        stacklevel=4,
    )
