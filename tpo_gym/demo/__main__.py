"""``python -m tpo_gym.demo``."""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from tpo_gym.worker_processes import warm_up


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tpo_gym.demo",
        description="TPO beside GRPO and Stable-Baselines3's PPO: sparse token reversal, and MNIST from bandit "
        "feedback. About five minutes on two CPU cores. Ends with a table, a figure and TensorBoard runs.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--quick", action="store_true", help="a few updates and one seed: shows that everything works")
    parser.add_argument("--seeds", type=_positive(int), default=2, help="runs of every method, with seeds 0, 1, ...")
    parser.add_argument("--workers", type=_positive(int), default=2, help="processes, one CPU thread each")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for everything that is written")
    parser.add_argument(
        "--budget-scale", type=_positive(float), default=1.0, help="multiply every method's interactions by this"
    )
    return parser.parse_args(arguments)


def _positive(kind: type[int] | type[float]) -> Any:
    def convert(text: str) -> float:
        value = kind(text)
        if not value > 0:
            raise argparse.ArgumentTypeError(f"must be positive, got {text}")
        return value

    convert.__name__ = kind.__name__  # argparse's word for it in errors
    return convert


def _tensorboard() -> str:
    """How to call the TensorBoard of this interpreter."""
    script = Path(sys.executable).with_name("tensorboard")
    found = shutil.which("tensorboard")
    if not script.exists() or (found is not None and Path(found) == script):
        return "tensorboard"
    return str(script.relative_to(Path.cwd())) if script.is_relative_to(Path.cwd()) else str(script)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the demo; returns the exit status."""
    options = parse(arguments)
    # Everything below loads torch; --help need not wait for it.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    warm_up("tpo_gym.demo.workers")
    from tpo_gym.demo import report
    from tpo_gym.demo.display import Display
    from tpo_gym.demo.jobs import SETTINGS, TASKS, Job
    from tpo_gym.demo.workers import JobFailed, run_all

    console = Console()
    jobs = []
    for name, task in TASKS.items():
        updates = task.quick_updates if options.quick else max(1, round(task.updates * options.budget_scale))
        for method in task.methods:
            for seed in range(1 if options.quick else options.seeds):
                folder = options.out / name / method.replace(" ", "-") / f"seed-{seed}"
                jobs.append(Job(name, method, seed, updates * task.per_update, folder))

    for name, task in TASKS.items():
        console.print(f"[bold]{task.title}[/bold]")
        for method in (method for key, method in SETTINGS if key == name):
            console.print(f"  [cyan]{method}[/cyan]: {SETTINGS[name, method]}", highlight=False)
    console.print(report.BUDGET_NOTE)
    if not report.HAVE_MATPLOTLIB:
        console.print("[yellow]matplotlib is missing, so no figure is drawn: pip install 'tpo-gym[plots]'[/yellow]")

    started = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    results = []
    try:
        with Display(jobs, console) as display:
            for event in run_all(jobs, min(options.workers, len(jobs))):
                display.show(event)
                if event is not None and event.result is not None:
                    results.append(event.result)
    except KeyboardInterrupt:
        console.print(f"Stopped; {len(results)} of {len(jobs)} runs had ended, nothing was written but their logs.")
        return 130
    except JobFailed as error:
        console.print(str(error), markup=False, highlight=False, style="red", soft_wrap=True)
        return 1
    seconds = time.monotonic() - started

    command = shlex.join(["python", "-m", "tpo_gym.demo", *(sys.argv[1:] if arguments is None else arguments)])
    files = report.save(results, options.out, command, options.workers, seconds)
    for table in report.terminal_tables(results):
        console.print(table)
    for task in TASKS.values():
        console.print(f"Error of {task.title}: {task.measure}.", highlight=False)
    console.print(f"Wall time: {seconds / 60:.1f} minutes on {report.machine()}.", highlight=False)
    console.print("Written: " + ", ".join(map(str, files)), highlight=False, soft_wrap=True)
    command = f"{_tensorboard()} --logdir {shlex.quote(str(options.out))}"
    console.print(f"All runs side by side: [bold]{command}[/bold]", highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
