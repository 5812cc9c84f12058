"""Shows how far the runs are: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from tpo_gym.experiments.workers import Event, Job

PLAIN_SECONDS = 30.0


class Display:
    """A bar for everything, one for each experiment and one for each running job.

    Args:
        jobs: All jobs; the first word of a label is the experiment.
        console: Where to write.
    """

    def __init__(self, jobs: Sequence[Job], console: Console) -> None:
        self._jobs = jobs
        self._done = [0] * len(jobs)
        self._finished = 0
        self._errors: dict[int, float] = {}
        self._started = self._last_line = time.monotonic()
        self._plain = not console.is_terminal
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=self._plain,
        )
        self._overall = self._add("[bold]all runs", sum(job.settings.updates for job in jobs))
        totals: dict[str, int] = {}
        for job in jobs:
            totals[_experiment(job)] = totals.get(_experiment(job), 0) + job.settings.updates
        self._bars = {name: self._add(name, total) for name, total in totals.items()}
        self._running: dict[int, TaskID] = {}

    def _add(self, name: str, total: int) -> TaskID:
        return self._progress.add_task(name, total=total, status="")

    def __enter__(self) -> Display:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def show(self, event: Event | None) -> None:
        """Bring the display up to date; ``None`` only lets a due line out."""
        if event is not None:
            job = self._jobs[event.job]
            ended = event.seconds is not None or event.failure is not None
            updates = job.settings.updates if ended else event.updates
            for task in (self._overall, self._bars[_experiment(job)]):
                self._progress.advance(task, updates - self._done[event.job])
            self._done[event.job] = updates
            if event.error is not None:
                self._errors[event.job] = event.error
            self._end(event, job) if ended else self._move(event.job, job)
        self._heartbeat()

    def _move(self, number: int, job: Job) -> None:
        if number not in self._running:
            self._running[number] = self._add(f"  {job.label}, seed {job.seed}", job.settings.updates)
        status = f"error {self._errors[number]:.1%}" if number in self._errors else ""
        self._progress.update(self._running[number], completed=self._done[number], status=status)

    def _end(self, event: Event, job: Job) -> None:
        self._finished += 1
        self._errors.pop(event.job, None)
        if event.job in self._running:
            self._progress.remove_task(self._running.pop(event.job))
        self._progress.update(self._overall, status=f"{self._finished} of {len(self._jobs)} runs")
        if event.failure is not None:
            self._line(f"FAILED {job.label}, seed {job.seed}:\n{event.failure}")
        elif self._plain:
            self._line(f"done {job.label}, seed {job.seed}: {event.seconds:.0f} s")

    def _line(self, text: str) -> None:
        minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
        share = f"{minutes:3}:{seconds:02} {self._finished}/{len(self._jobs)}"
        # Not through rich's layout, which would break long lines.
        self._progress.console.out(f"{share}  {text}", highlight=False)

    def _heartbeat(self) -> None:
        if not self._plain or time.monotonic() - self._last_line < PLAIN_SECONDS:
            return
        self._last_line = time.monotonic()
        for number, error in self._errors.items():
            job = self._jobs[number]
            done, total = self._done[number], job.settings.updates
            self._line(f"at {job.label}, seed {job.seed}: {done:,} of {total:,} updates, error {error:.1%}")


def _experiment(job: Job) -> str:
    return job.label.split()[0]
