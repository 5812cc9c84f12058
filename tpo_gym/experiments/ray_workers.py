"""Many runs on Ray: on this machine, or on a cluster. Does what :mod:`tpo_gym.experiments.workers` does."""

from __future__ import annotations

import os
import signal
import tempfile
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from tpo_gym.agents.checkpoint_file import replace_file
from tpo_gym.experiments.workers import Event, Job, attempt

WAIT_SECONDS = 0.5
"""How long to wait for news before saying that there is none."""
STOP_SECONDS = 10.0
"""How long to wait for runs that were told to stop."""
LAST = "settings.json"
"""The file whose presence says that a run is complete."""


class Board:
    """Collects what runs tell. An actor: one object that all machines reach."""

    def __init__(self) -> None:
        self._events: list[Event] = []

    def tell(self, event: Event) -> None:
        """Add an event."""
        self._events.append(event)

    def hear(self) -> list[Event]:
        """The events since this was last asked."""
        events, self._events = self._events, []
        return events


def _work(board: Any, number: int, job: Job) -> tuple[Event | None, dict[str, bytes]]:
    """Carry out a job wherever Ray puts it; its last event, and its files, for no folder need be shared."""
    torch.set_num_threads(1)
    last: Event | None = None

    def tell(event: Event) -> None:
        nonlocal last
        if event.seconds is None and event.failure is None:
            board.tell.remote(event)
        else:
            last = event

    with tempfile.TemporaryDirectory() as folder:
        attempt(number, job, Path(folder), tell, lambda: False)
        return last, {path.name: path.read_bytes() for path in Path(folder).iterdir() if path.is_file()}


def run_all(
    jobs: Sequence[Job], n_workers: int, address: str | None = None, gpus_per_run: float = 1.0
) -> Iterator[Event | None]:
    """Carry out ``jobs`` on Ray, each on one core, in order.

    Args:
        jobs: The jobs. Their files come back to this machine, into the jobs' folders.
        n_workers: Runs at once, without ``address``: a Ray of its own is started on this machine and ended with it.
        address: A running cluster, whose resources decide how many run at once. Its machines need this package.
        gpus_per_run: What a run on a GPU takes of one.

    Yields:
        Events as they come, ``None`` where none came for a moment. Closing the iterator ends the runs; what is complete
        is kept. A run whose process or machine dies is repeated elsewhere (Ray's rule), and fails in the end.

    Raises:
        ConnectionError: If there is no cluster at ``address``.
    """
    import ray

    _connect(ray, n_workers, address)
    on_gpu = any(job.device != "cpu" for job in jobs)
    work = ray.remote(num_cpus=1, num_gpus=gpus_per_run if on_gpu else 0)(_work)
    board = ray.remote(num_cpus=0)(Board).remote()
    numbers = {work.remote(board, number, job): number for number, job in enumerate(jobs)}
    pending = list(numbers)
    try:
        while pending:
            done, pending = ray.wait(pending, timeout=WAIT_SECONDS)
            heard = ray.get(board.hear.remote())
            yield from heard
            for task in done:
                yield _finish(ray, task, numbers[task], jobs)
            if not done and not heard:
                yield None
    finally:
        for task in pending:
            ray.cancel(task)  # raises KeyboardInterrupt in a run that has begun
        if pending:
            ray.wait(pending, num_returns=len(pending), timeout=STOP_SECONDS)
        ray.kill(board)
        ray.shutdown()


def _connect(ray: Any, n_workers: int, address: str | None) -> None:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # nothing is reported to anyone unless the user wants it
    own = {"num_cpus": n_workers, "include_dashboard": False} if address is None else {}
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM)
    ray.init(address or "local", log_to_driver=False, logging_level="ERROR", **own)
    if main:
        signal.signal(signal.SIGTERM, handler)  # Ray's own would end the program at once


def _finish(ray: Any, task: Any, number: int, jobs: Sequence[Job]) -> Event:
    """The last event of a task that is done, after its files are in place."""
    try:
        event, files = ray.get(task)
    except ray.exceptions.RayError as error:
        return Event(number, failure=f"Ray could not carry it out: {error}")
    if event.seconds is not None:
        folder = jobs[number].folder
        for old in folder.glob("events.out.tfevents.*"):
            old.unlink()  # of an interrupted run
        for name in sorted(files, key=lambda name: name == LAST):
            replace_file(folder / name, files[name])
    return event
