"""Many runs, in processes of their own."""

from __future__ import annotations

import contextlib
import queue
import signal
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tpo_gym.agents.stackable import refusal
from tpo_gym.experiments.build import make_model
from tpo_gym.experiments.record import Progress
from tpo_gym.experiments.record_stacked import AT_ONCE
from tpo_gym.experiments.run import Stopped, carry_out, carry_out_together
from tpo_gym.experiments.settings import Settings
from tpo_gym.worker_processes import end_with_parent, worker_context

STACKED_SEEDS = 8
"""A worker stacks the seeds of a bandit where it has so many."""
REPORT_SECONDS = 0.5
"""Least time between two reports of a run; reading the error makes the host wait for the device."""

_events: Any = None
_stop: Any = None


class Job(NamedTuple):
    """A run that is to be carried out."""

    label: str
    settings: Settings
    seed: int
    folder: Path
    device: str


class Event(NamedTuple):
    """What is heard of a job, given by its number."""

    job: int
    updates: int = 0
    error: float | None = None
    seconds: float | None = None
    """Set when the run is complete."""
    failure: str | None = None
    """A traceback, when it failed; the others go on."""


def _initialize(events: Any, stop: Any) -> None:
    global _events, _stop
    _events, _stop = events, stop
    end_with_parent()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides when to end
    torch.set_num_threads(1)
    torch.set_flush_denormal(True)  # the moments of gradients that vanished would slow every step of Adam


def _progress(number: int, tell: Callable[[Event], None], stopped: Callable[[], bool]) -> Progress:
    """Tells of a run now and then."""
    last = 0.0

    def progress(updates: int, error: Tensor | None) -> bool:
        nonlocal last
        if time.monotonic() - last > REPORT_SECONDS:
            last = time.monotonic()
            tell(Event(number, updates, None if error is None else float(error)))
        return not stopped()

    return progress


def attempt(number: int, job: Job, folder: Path, tell: Callable[[Event], None], stopped: Callable[[], bool]) -> None:
    """Carry out a job and tell of it, also where it fails; where it was stopped nothing more is told.

    Args:
        number: The job's number.
        job: The job.
        folder: Where its files go.
        tell: Called with every event.
        stopped: Whether to end early.
    """
    try:
        seconds = carry_out(job.settings, job.seed, folder, job.device, _progress(number, tell, stopped))
    except Stopped:
        return
    except Exception:
        tell(Event(number, failure=traceback.format_exc()))
    else:
        tell(Event(number, job.settings.updates, seconds=seconds))


def _work(numbers: Sequence[int], jobs: Sequence[Job]) -> None:
    """Carry out jobs of one training: together where that serves, else one by one."""
    if len(jobs) > 1 and refusal(make_model(jobs[0].settings, jobs[0].seed, jobs[0].device)) is None:
        _work_together(numbers, jobs)
        return
    for number, job in zip(numbers, jobs, strict=True):
        attempt(number, job, job.folder, _events.put, _stop.is_set)


def _work_together(numbers: Sequence[int], jobs: Sequence[Job]) -> None:
    first = jobs[0]
    seeds, folders = [job.seed for job in jobs], [job.folder for job in jobs]
    progress = [_progress(number, _events.put, _stop.is_set) for number in numbers]
    try:
        seconds = carry_out_together(first.settings, seeds, folders, first.device, progress)
    except Stopped:
        return
    except Exception:
        for number in numbers:
            _events.put(Event(number, failure=traceback.format_exc()))
    else:
        for number in numbers:
            _events.put(Event(number, first.settings.updates, seconds=seconds))


def bundles(jobs: Sequence[Job], n_workers: int) -> list[list[int]]:
    """Jobs, by number, that one worker carries out together: seeds of one training that are faster stacked.

    On a CPU these are bandits with at least ``STACKED_SEEDS`` seeds for each worker (docs/results/train_seeds.md).
    There all seeds are measured at once: callbacks of each would take the time that stacking saves.
    """
    alike: dict[tuple[str, str], list[int]] = {}
    for number, job in enumerate(jobs):
        alike.setdefault((job.settings.digest, job.device), []).append(number)
    found = []
    for (_, device), numbers in alike.items():
        at_once = jobs[numbers[0]].settings.record in AT_ONCE
        size = -(-len(numbers) // n_workers)
        if device == "cpu" and not (at_once and size >= STACKED_SEEDS):
            size = 1
        found += [numbers[i : i + size] for i in range(0, len(numbers), size)]
    return sorted(found)


def run_all(jobs: Sequence[Job], n_workers: int) -> Iterator[Event | None]:
    """Carry out ``jobs`` in ``n_workers`` processes, one thread each, in order.

    Yields:
        Events as they come, ``None`` where none came for a moment. Closing the iterator ends the runs at their next
        step; what is complete is kept.

    Raises:
        RuntimeError: If a process died, for want of memory for example.
    """
    context = worker_context()
    events, stop = context.Queue(), context.Event()
    with ProcessPoolExecutor(n_workers, context, _initialize, (events, stop)) as pool:
        futures: list[Future[None]] = [
            pool.submit(_work, numbers, [jobs[number] for number in numbers]) for numbers in bundles(jobs, n_workers)
        ]
        remaining = len(jobs)
        try:
            while remaining:
                try:
                    event = events.get(timeout=0.5)
                except queue.Empty:
                    broken = [error for f in futures if f.done() and (error := f.exception()) is not None]
                    if broken:
                        raise RuntimeError("A worker process died: out of memory? Try fewer workers.") from broken[0]
                    yield None
                    continue
                remaining -= event.seconds is not None or event.failure is not None
                yield event
        finally:
            stop.set()
            pool.shutdown(wait=False, cancel_futures=True)
            while any(not f.done() for f in futures):
                with contextlib.suppress(queue.Empty):
                    events.get(timeout=0.2)  # a worker cannot end while its events are unread
