"""A computation whose tensor operations are recorded once and replayed from then on.

Small networks spend most of an update between operations: in Python, in autograd, in vectorizing over seeds. A replay
calls the recorded operations alone, in the same order, so its numbers are the same. ``torch.compile`` then turns them
into few kernels, and on a GPU into CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.fx import GraphModule, Node
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from tpo_gym.agents.compiled import warn_of_failure
from tpo_gym.agents.decompositions import FASTER_COMPILED
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
        self._structure: TreeSpec | None = None  # of the results
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
        return self._tree_of(self._graph(*tree_leaves(args)))

    def _take(self, draw: Draw) -> Tensor:
        with _disable_current_modes():  # so the numbers become an input of what is recorded
            values = draw()
        self._draws.append((values, draw))
        return values

    def _record(self, *args: Any) -> Any:
        inputs, structure = tree_flatten(args)
        results: list[Any] = []

        def traced(*inputs: Tensor) -> list[Any]:
            with _WithoutLooking():
                results[:] = [self._function(*tree_unflatten(inputs, structure))]
            leaves, self._structure = tree_flatten(results[0])
            return leaves

        compiles = self._options is not None and _by_inductor(self._options)
        graph = make_fx(traced, FASTER_COMPILED if compiles else {})(*inputs)
        for node in graph.graph.nodes:
            if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) and _draws(node):
                raise RuntimeError(f"{node.target} draws random numbers that a replay would not draw again.")
        if self._options is not None:
            self._compiled = _compile(graph, self._options)
        self._graph = graph
        return results[0]

    def _run_compiled(self, *args: Any) -> Any:
        assert self._compiled is not None
        on_gpu = torch.cuda.is_initialized()
        if on_gpu:  # else it would import the whole compiler
            torch.compiler.cudagraph_mark_step_begin()
        leaves = self._compiled(*tree_leaves(args))
        if on_gpu:  # a CUDA graph's next replay writes where this one's results lie
            leaves = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return self._tree_of(leaves)

    def _tree_of(self, leaves: list[Any]) -> Any:
        assert self._structure is not None
        return tree_unflatten(leaves, self._structure)


def _draws(node: Node) -> bool:
    """Whether an operation that may draw random numbers does: attention does not where nothing is dropped."""
    schema = node.target._schema  # type: ignore[union-attr]
    for place, argument in enumerate(schema.arguments):
        if argument.name == "dropout_p":
            return bool(node.args[place] if place < len(node.args) else node.kwargs.get("dropout_p", 0.0))
    return True


def _compile(graph: GraphModule, options: dict[str, Any]) -> Callable[..., Any]:
    """``torch.compile`` of a function that never changes, so that nothing has to be looked at before each call."""
    if not _by_inductor(options):
        return torch.compile(graph, **options)
    from torch import _inductor

    rest = {name: value for name, value in options.items() if name not in ("mode", "options")}
    mode = _inductor.list_mode_options(options["mode"]) if options.get("mode") not in (None, "default") else {}
    settings = {**mode, **(options.get("options") or {})}
    kernel: Callable[..., Any] | None = None

    def compiled(*inputs: Tensor) -> Any:
        nonlocal kernel
        if kernel is None:
            on_cpu = all(tensor.is_cpu for tensor in (*graph.parameters(), *graph.buffers(), *inputs))
            if on_cpu and not rest.keys() - {"backend"}:
                # What torch.compile does in the end; its way there through Python's bytecode would take 0.03 to 0.3 ms
                # of every call. On a GPU it tells CUDA graphs which tensors stay where they are.
                kernel = _inductor.compile(graph, list(inputs), settings)
            else:
                unguarded = {**settings, "guard_filter_fn": torch.compiler.skip_all_guards_unsafe}
                kernel = torch.compile(graph, **rest, options=unguarded)
        return kernel(*inputs)

    return compiled


def _by_inductor(options: dict[str, Any]) -> bool:
    return bool(options.get("backend", "inductor") == "inductor")
