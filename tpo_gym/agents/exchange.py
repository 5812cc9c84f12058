"""What the processes of one training tell each other, over ``torch.distributed``."""

from __future__ import annotations

import io
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor


class Exchange:
    """All processes of the default group. Every method must be called by all of them, in one order.

    Tensors are exchanged where they lie: by NCCL on GPUs, by Gloo on the CPU. Flags and Python objects go through Gloo.

    Raises:
        RuntimeError: If ``torch.distributed`` is not initialized.
    """

    def __init__(self) -> None:
        if not dist.is_initialized():
            raise RuntimeError(
                "Several processes can train one model only once torch.distributed is initialized: start the program "
                "with torchrun and call tpo_gym.agents.distributed.join() first (python -m tpo_gym.train does)."
            )
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self._control = dist.new_group(backend="gloo")

    def part(self, n_rows: int) -> range:
        """This process's rows of ``n_rows``, which ``size`` divides: contiguous, in the order of the ranks."""
        per_process = n_rows // self.size
        return range(self.rank * per_process, (self.rank + 1) * per_process)

    def objects(self, value: Any) -> list[Any]:
        """Everybody's Python object, by rank."""
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self._control)
        return found

    def all_true(self, flag: bool) -> bool:
        """Whether the flag is set everywhere."""
        value = torch.tensor([int(flag)])
        dist.all_reduce(value, dist.ReduceOp.MIN, group=self._control)
        return bool(value.item())

    def rows(self, values: Tensor) -> Tensor:
        """Everybody's rows, one after the other: all have equally many, ``(n, ...)`` becomes ``(size * n, ...)``."""
        parts = [torch.empty_like(values, memory_format=torch.contiguous_format) for _ in range(self.size)]
        dist.all_gather(parts, values.contiguous())
        return torch.cat(parts)

    def tensors(self, values: dict[str, Tensor]) -> tuple[dict[str, Tensor], list[int]]:
        """Everybody's rows of several tensors, of which each process may have another number.

        Args:
            values: Tensors on one device; the same names everywhere.

        Returns:
            The rows of all processes under each name, and how many of the first tensor each process has.
        """
        shapes = self.objects({name: tuple(value.shape) for name, value in values.items()})
        packed = torch.cat([_as_bytes(value) for value in values.values()])
        sizes = [
            sum(torch.Size(shape[name]).numel() * value.element_size() for name, value in values.items())
            for shape in shapes
        ]
        padded = packed.new_zeros(max(sizes))
        padded[: len(packed)] = packed
        parts = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(parts, padded)
        collected: dict[str, list[Tensor]] = {name: [] for name in values}
        for part, shape in zip(parts, shapes, strict=True):
            start = 0
            for name, value in values.items():
                stop = start + torch.Size(shape[name]).numel() * value.element_size()
                collected[name].append(part[start:stop].clone().view(value.dtype).view(shape[name]))
                start = stop
        first = next(iter(values))
        return {name: torch.cat(rows) for name, rows in collected.items()}, [shape[first][0] for shape in shapes]

    def sum(self, tensors: list[Tensor]) -> list[Tensor]:
        """The sum of everybody's tensors, in one message."""
        flat = torch.cat([tensor.flatten() for tensor in tensors])
        dist.all_reduce(flat)
        parts = flat.split([tensor.numel() for tensor in tensors])
        return [part.view_as(tensor) for part, tensor in zip(parts, tensors, strict=True)]

    def from_first(self, value: Any, device: torch.device) -> Any:
        """The first process's value: Python containers of tensors (put on ``device``), arrays and plain values."""
        buffer = io.BytesIO()
        if self.rank == 0:
            torch.save(value, buffer)
        message = [buffer.getvalue()]
        dist.broadcast_object_list(message, src=0, group=self._control)
        # Nothing here comes from outside of this training.
        return value if self.rank == 0 else torch.load(io.BytesIO(message[0]), map_location=device, weights_only=False)


def _as_bytes(value: Tensor) -> Tensor:
    return value.contiguous().flatten().view(torch.uint8)
