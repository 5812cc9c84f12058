"""Shows how far the runs are: bars in a terminal, plain lines elsewhere."""

from __future__ import annotations

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from tpo_gym.demo.jobs import Job
from tpo_gym.demo.workers import Event

PLAIN_SECONDS = 15.0


class Display:
    """A bar for everything and one for each running job; where output is no terminal, a line now and then.

    Args:
        jobs: All jobs.
        console: Where to write.
    """

    def __init__(self, jobs: Sequence[Job], console: Console) -> None:
        self._jobs = jobs
        self._console = console
        self._done = [0] * len(jobs)  # interactions of each job
        self._errors: dict[int, float] = {}  # current error of each running job
        self._bars: dict[int, TaskID] = {}
        self._started = self._last_line = time.monotonic()
        self._total = sum(job.interactions for job in jobs)
        self._progress: Progress | None = None
        if console.is_terminal:
            self._progress = Progress(
                TextColumn("{task.description}"),
                BarColumn(bar_width=24),
                TextColumn("{task.percentage:>3.0f} %"),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                console=console,
            )
            self._overall = self._progress.add_task("[bold]all runs", total=self._total, status="")

    def __enter__(self) -> Display:
        if self._progress is not None:
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()

    def show(self, event: Event | None) -> None:
        """Bring the display up to date; ``None`` only lets a due line out."""
        if event is None:
            self._heartbeat()
            return
        job, name = self._jobs[event.job], self._name(event.job)
        self._done[event.job] = event.interactions
        if event.result is not None:
            self._errors.pop(event.job, None)
            self._close_bar(event.job)
            self._print(f"done   {name}: error {event.result.final_error:.1%} after {event.result.seconds:.0f} s")
        elif event.error is None:
            self._open_bar(event.job, name, job.interactions)
        else:
            self._errors[event.job] = event.error
            self._move_bar(event.job, job)
        if self._progress is not None:
            finished = sum(done == job.interactions for done, job in zip(self._done, self._jobs, strict=True))
            self._progress.update(
                self._overall, completed=sum(self._done), status=f"{finished} of {len(self._jobs)} runs done"
            )
        self._heartbeat()

    def _name(self, number: int) -> str:
        job = self._jobs[number]
        return f"{job.task:8} {job.method:9} seed {job.seed}"

    def _print(self, line: str) -> None:
        # Not through rich's layout, which would break long lines where output is no terminal.
        if self._progress is not None:
            self._progress.console.print(line, highlight=False)
        else:
            minutes, seconds = divmod(int(time.monotonic() - self._started), 60)
            print(f"{minutes:2}:{seconds:02} {sum(self._done) / self._total:4.0%}  {line}", flush=True)

    def _open_bar(self, number: int, name: str, total: int) -> None:
        if self._progress is not None:
            self._bars[number] = self._progress.add_task(name, total=total, status="starts")
        else:
            self._print(f"start  {name}")

    def _move_bar(self, number: int, job: Job) -> None:
        if self._progress is not None:
            status = f"{self._done[number]:>9,} interactions, error {self._errors[number]:6.1%}"
            self._progress.update(self._bars[number], completed=self._done[number], status=status)

    def _close_bar(self, number: int) -> None:
        if self._progress is not None:
            self._progress.remove_task(self._bars.pop(number))

    def _heartbeat(self) -> None:
        if self._progress is not None or time.monotonic() - self._last_line < PLAIN_SECONDS:
            return
        self._last_line = time.monotonic()
        for number, error in self._errors.items():
            done, total = self._done[number], self._jobs[number].interactions
            self._print(f"at     {self._name(number)}: {done:,} of {total:,} interactions, error {error:.1%}")
