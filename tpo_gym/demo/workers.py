"""Runs jobs in processes of their own."""

from __future__ import annotations

import queue
import signal
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tpo_gym.demo.jobs import Job, Result, run
from tpo_gym.worker_processes import end_with_parent, worker_context


class Event(NamedTuple):
    """What a worker tells of a job, given by its number: that it started, how far it is, or what it gave."""

    job: int
    interactions: int = 0
    error: float | None = None
    result: Result | None = None
    failure: str | None = None


class JobFailed(RuntimeError):
    """A run that ended with an error; the message holds the worker's traceback."""


def _work(tasks: Any, events: Any) -> None:
    end_with_parent()
    torch.set_num_threads(1)
    while (item := tasks.get()) is not None:
        number, job = item

        def report(interactions: int, error: float, number: int = number) -> None:
            events.put(Event(number, interactions, error))

        events.put(Event(number))
        try:
            result = run(job, report)
        except Exception:
            events.put(Event(number, failure=traceback.format_exc()))
        else:
            events.put(Event(number, job.interactions, result.final_error, result=result))


def run_all(jobs: Sequence[Job], n_workers: int) -> Iterator[Event | None]:
    """Run ``jobs`` in ``n_workers`` processes, one thread each, in order.

    Yields:
        Events as they come, ``None`` where none came for a moment. Closing the iterator ends the processes.

    Raises:
        JobFailed: At the first run that ends with an error, or whose process dies.
    """
    context = worker_context()
    tasks, events = context.SimpleQueue(), context.Queue()
    for item in [*enumerate(jobs), *[None] * n_workers]:
        tasks.put(item)
    processes = [context.Process(target=_work, args=(tasks, events), daemon=True) for _ in range(n_workers)]
    # Ctrl-C reaches the whole process group; a child that starts with the signal ignored keeps ignoring it.
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        for process in processes:
            process.start()
        signal.signal(signal.SIGINT, handler)
        remaining = len(jobs)
        while remaining:
            try:
                event = events.get(timeout=0.5)
            except queue.Empty:
                dead = [process.exitcode for process in processes if process.exitcode]
                if dead:
                    raise JobFailed(f"A worker process died (exit code {dead[0]}): out of memory?") from None
                yield None
                continue
            if event.failure is not None:
                job = jobs[event.job]
                raise JobFailed(f"{job.method} on {job.task}, seed {job.seed}, failed:\n{event.failure}")
            remaining -= event.result is not None
            yield event
    finally:
        signal.signal(signal.SIGINT, handler)
        for process in processes:
            process.terminate()
        for process in processes:
            process.join()
