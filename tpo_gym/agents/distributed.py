"""One training in several processes, on several devices or machines.

The groups of a rollout batch are sharded: each process samples the candidates of its own contexts and computes their
gradient. The rest is the same in all of them, because small things are exchanged:

* **Randomness** is that of one process (:mod:`tpo_gym.agents.shards`), so the number of processes changes nothing but
  the rounding of sums.
* **The batch's numbers** (scores, log-probabilities, rewards, masks) are gathered after sampling; candidates and
  observations stay where they are. So baselines over the batch, ``group_weights``, ``wants_update``, diagnostics and
  metrics are computed from the whole batch, by the code that does it in one process.
* **Gradients** are summed once per optimizer step, as one flat tensor, after all chunks of
  :func:`~tpo_gym.agents.updates.accumulate_gradients`. The weights of the loss are already those of the whole batch, so
  the sum is its gradient, and clipping sees its norm.
  ``DistributedDataParallel`` would hook into every backward pass, of which there are many here, on a ``forward`` that
  training does not use, and overlap messages that are small beside the passes.

Training starts from the first process's state, whatever the others hold; only the first one writes files and logs.
Callbacks run in all of them, and what one of them ends ends everywhere.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from stable_baselines3.common.logger import KVWriter, Logger
from torch import Tensor

from tpo_gym.agents.exchange import Exchange
from tpo_gym.agents.group_env import BatchedGroupEnv, GroupEnv, Step, VecGroupEnv
from tpo_gym.agents.resume_state import capture, restore
from tpo_gym.agents.rollouts import GroupRollout
from tpo_gym.agents.shards import BatchedPart, CannotShare, SharedNoise, VecPart
from tpo_gym.agents.updates import accumulate_gradients, current_log_probs

if TYPE_CHECKING:
    from tpo_gym.agents.group_algorithm import GroupAlgorithm

    Model = TypeVar("Model", bound=GroupAlgorithm)


class OneProcess:
    """The process that trains a model alone. What :class:`ManyProcesses` does otherwise goes through these methods."""

    writes = True
    """Whether this process writes files and logs."""

    def begin(self, model: GroupAlgorithm, total_timesteps: int) -> None:
        """Called when training begins."""

    def collect(self, model: GroupAlgorithm, on_step: Callable[[Step], bool]) -> GroupRollout | None:
        """Collect a rollout batch."""
        return model._collect(on_step)

    def accumulate_gradients(
        self, model: GroupAlgorithm, rollout: GroupRollout, frozen: dict[str, Tensor], weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """See :func:`tpo_gym.agents.updates.accumulate_gradients`."""
        return accumulate_gradients(model, rollout, frozen, weights)

    def log_probs(self, model: GroupAlgorithm, rollout: GroupRollout) -> Tensor:
        """See :func:`tpo_gym.agents.updates.current_log_probs`."""
        return current_log_probs(model, rollout)


@dataclass(frozen=True)
class ShardedRollout(GroupRollout):
    """The numbers of a whole rollout batch, with the candidates of this process only.

    The groups are ordered by process. In every other respect it is what one process would have collected.
    """

    own: GroupRollout | None = None
    """The groups of this process, with their candidates."""
    first: int = 0
    """Where they begin."""
    everyone: Tensor | None = None
    """Voters of the whole batch."""

    @property
    def voters(self) -> Tensor | None:
        return self.everyone

    def own_rows(self, values: Tensor) -> Tensor:
        """Rows of a ``(B, ...)`` tensor that belong to the groups of this process."""
        assert self.own is not None
        return values[self.first : self.first + self.own.n_groups]


NUMBERS = tuple(f.name for f in fields(GroupRollout) if f.init and f.name not in ("candidates", "share"))


class ManyProcesses(OneProcess):
    """One of several processes that train a model together."""

    def __init__(self) -> None:
        self._exchange = Exchange()
        self._noise = SharedNoise(self._exchange)
        self._part: BatchedPart | VecPart | None = None
        self._part_of: GroupEnv | None = None
        self.writes = self._exchange.rank == 0

    def begin(self, model: GroupAlgorithm, total_timesteps: int) -> None:
        """Share the environment and take over the first process's state.

        Raises:
            CannotShare: If the environment cannot be shared, or the processes were given different trainings.
        """
        self._check_agreement(model, total_timesteps)
        if self._part_of is not model._group_env:
            self._part_of, self._part = model._group_env, self._share(model)
        if any(self._exchange.objects(model._log_is_read)) and not model._log_is_read:
            model.logger.output_formats.append(_Unread())  # what is logged takes everybody to compute
        here = {"state": capture(model), "parameters": model.get_parameters(), "n_updates": model._n_updates}
        there = self._exchange.from_first(here, torch.device("cpu"))
        if not self.writes:
            model.set_parameters(there["parameters"], device=model.device)
            model._n_updates = there["n_updates"]
            restore(model, there["state"])
        if model.device.type == "cuda":  # not everybody trains on the device of the same index
            device_state = torch.cuda.get_rng_state(model.device)
            torch.cuda.set_rng_state(self._exchange.from_first(device_state, torch.device("cpu")), model.device)

    def _check_agreement(self, model: GroupAlgorithm, total_timesteps: int) -> None:
        trained = {
            "algorithm": type(model).__name__,
            "total_timesteps": total_timesteps,
            "interactions so far": model.num_timesteps,
            "sub-environments": model.n_envs,
            "group_size": model.group_size,
            "candidates": model.candidate_set,
            "n_epochs": model.n_epochs,
            "parameters": sum(p.numel() for p in model.policy.parameters()),
        }
        for rank, other in enumerate(self._exchange.objects(trained)):
            if other != trained:
                different = ", ".join(
                    f"{key} {value} here, {other[key]} there" for key, value in trained.items() if other[key] != value
                )
                raise CannotShare(
                    f"Process {rank} was given another training than process {self._exchange.rank}: {different}."
                )

    def _share(self, model: GroupAlgorithm) -> BatchedPart | VecPart:
        env, size = model._group_env, self._exchange.size
        per_context = model.group_size if model.candidate_set == "episodes" else 1
        n_contexts = model.n_envs // per_context
        if n_contexts % size:
            fitting = [n for n in (n_contexts // size * size, (n_contexts // size + 1) * size) if n]
            raise CannotShare(
                f"{n_contexts} contexts per rollout batch cannot be shared equally by {size} processes: make it "
                f"{' or '.join(map(str, fitting))} (n_contexts, or the number of sub-environments over group_size), or "
                "start another number of processes."
            )
        if model.lookahead and not model.lookahead_deterministic:
            raise CannotShare(
                "lookahead_deterministic=False draws as many random numbers as copies happen to be alive, which "
                "several processes cannot share: use lookahead_deterministic=True, or one process."
            )
        if isinstance(env, BatchedGroupEnv):
            return BatchedPart(env, self._exchange, self._noise)
        assert isinstance(env, VecGroupEnv)
        return VecPart(env, self._exchange, self._noise)

    def collect(self, model: GroupAlgorithm, on_step: Callable[[Step], bool]) -> GroupRollout | None:
        """Collect this process's groups; the numbers of all groups."""
        part, whole = self._part, model._group_env
        if part is None or self._part_of is not whole:
            raise RuntimeError("The environment was changed while training: call learn() again.")
        exchange = self._exchange

        def on_whole_step(step: Step) -> bool:
            with self._noise.paused():  # callbacks may evaluate the policy
                return exchange.all_true(on_step(part.everywhere(step)))

        model._group_env = part
        try:
            with self._noise:
                own = model._collect(on_whole_step)
        finally:
            model._group_env = whole
        part.finish()
        return None if own is None else self._gather(own)

    def _gather(self, own: GroupRollout) -> ShardedRollout:
        numbers = {name: value for name in NUMBERS if (value := getattr(own, name)) is not None}
        if own.voters is not None:
            numbers["everyone"] = own.voters
        if own.step_rewards is not None and isinstance(self._part, VecPart):  # of unequal lengths in some process
            numbers.setdefault("mask", torch.ones_like(own.old_step_log_probs, dtype=torch.bool))
        numbers = dict(sorted(numbers.items(), key=lambda item: item[0] != "scores"))  # rows of scores are groups
        gathered, counts = self._exchange.tensors(numbers)
        rank = self._exchange.rank
        whole = ShardedRollout(own.candidates, first=sum(counts[:rank]), **gathered)  # type: ignore[arg-type]
        decisions = own.lengths.sum() / whole.lengths.sum()
        return replace(whole, own=replace(own, share=decisions))

    def accumulate_gradients(
        self, model: GroupAlgorithm, rollout: GroupRollout, frozen: dict[str, Tensor], weights: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the whole batch, in every process: the sum over the processes' groups."""
        assert isinstance(rollout, ShardedRollout) and rollout.own is not None
        own = {name: rollout.own_rows(value) for name, value in frozen.items()}
        loss, entropy = accumulate_gradients(model, rollout.own, own, rollout.own_rows(weights))
        gradients = [p.grad for p in model.policy.parameters() if p.grad is not None]
        *sums, loss, entropy = self._exchange.sum([*gradients, loss, entropy * rollout.own.share])
        for gradient, total in zip(gradients, sums, strict=True):
            gradient.copy_(total)
        return loss, entropy

    def log_probs(self, model: GroupAlgorithm, rollout: GroupRollout) -> Tensor:
        """Log-probabilities of all candidates under the current policy, each computed by its own process."""
        assert isinstance(rollout, ShardedRollout) and rollout.own is not None
        return self._exchange.tensors({"log_probs": current_log_probs(model, rollout.own)})[0]["log_probs"]


class _Unread(KVWriter):
    """Where a process logs that does not write logs."""

    def write(self, key_values: dict[str, Any], key_excluded: dict[str, tuple[str, ...]], step: int = 0) -> None:
        pass

    def close(self) -> None:
        pass


def join(device: str = "auto") -> str:
    """Join the processes that ``torchrun`` started: initialize ``torch.distributed`` from its environment variables.

    Args:
        device: Where this process trains; ``"auto"``: the GPU of its number on this machine, where each process has
            one, else the CPU.

    Returns:
        The device.

    Raises:
        RuntimeError: If the program was not started by ``torchrun``.
    """
    if "WORLD_SIZE" not in os.environ:
        raise RuntimeError("This program was not started by torchrun: there is no other process to join.")
    local_rank = int(os.environ["LOCAL_RANK"])
    if device == "auto":
        enough = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
        device = "cuda" if enough and torch.cuda.is_available() else "cpu"
    if device == "cuda":
        device = f"cuda:{local_rank}"
    if device.startswith("cuda"):
        torch.cuda.set_device(device)
    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.startswith("cuda") else "gloo")
    return device


def leave() -> None:
    """Wait for the other processes, then part from them. Just to end can take down those who still talk."""
    dist.barrier()
    dist.destroy_process_group()


def distribute(model: Model) -> Model:
    """Let all processes of ``torch.distributed`` train this model together.

    Make the same model in every process, then ``distribute(model).learn(...)`` in all of them. ``n_contexts``, or the
    number of sub-environments, is that of the whole batch. The result is that of one process, up to the rounding of
    sums. :func:`join` first, where the program was started by ``torchrun``.

    Args:
        model: Made or loaded in each process alike; the first process's weights and random state count.

    Returns:
        The model. In all but the first process it neither logs nor saves.

    Raises:
        RuntimeError: If ``torch.distributed`` is not initialized.
    """
    processes = ManyProcesses()
    model._processes = processes
    if not processes.writes:
        model.verbose = 0
        model.set_logger(Logger(folder=None, output_formats=[]))
    return model
