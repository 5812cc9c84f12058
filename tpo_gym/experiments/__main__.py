"""``python -m tpo_gym.experiments``."""

from __future__ import annotations

import argparse
import os
import shlex
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from tpo_gym.experiments.experiment import Experiment
from tpo_gym.experiments.registry import EXPERIMENTS
from tpo_gym.experiments.settings import Settings, is_finished, run_folder
from tpo_gym.worker_processes import warm_up

if TYPE_CHECKING:
    from tpo_gym.experiments.workers import Event, Job


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tpo_gym.experiments",
        description="The paper's experiments: runs what is missing, then writes a report of everything that there is.",
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help="experiments, or 'all'; see --list")
    parser.add_argument("--list", action="store_true", help="show all experiments with their panels and methods")
    parser.add_argument(
        "--scale", choices=("quick", "paper"), default="quick", help="size of the runs (default: quick)"
    )
    parser.add_argument("--seeds", type=int, metavar="N", help="seeds 0 to N-1 (default: as many as the scale has)")
    parser.add_argument("--first-seed", type=int, default=0, metavar="N", help="begin with another seed (default: 0)")
    parser.add_argument("--methods", nargs="+", metavar="METHOD", help="only these methods, by label")
    parser.add_argument("--panels", nargs="+", metavar="PANEL", help="only these panels, by label")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="override settings")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default: auto, a GPU where there is one)")
    parser.add_argument(
        "--out", type=Path, default=Path("results"), help="folder of runs and report (default: results)"
    )
    parser.add_argument("--workers", type=int, default=1, metavar="N", help="processes, one thread each (default: 1)")
    parser.add_argument(
        "--backend", choices=("local", "ray"), default="local", help="who runs: processes here, or Ray (default: local)"
    )
    parser.add_argument(
        "--address", metavar="HOST:PORT", help="with --backend ray: a Ray cluster, which decides how many run at once"
    )
    parser.add_argument(
        "--gpus-per-run", type=float, default=1.0, metavar="X", help="with --backend ray and a GPU device (default: 1)"
    )
    parser.add_argument("--report-only", action="store_true", help="run nothing, report what is there")
    options = parser.parse_args(arguments)
    known = {"all": list(EXPERIMENTS), **{name: [name] for name in EXPERIMENTS}}
    unknown = [name for name in options.names if name not in known]
    if unknown:
        parser.error(f"unknown experiment {', '.join(unknown)}; there are: {', '.join(EXPERIMENTS)}, all")
    if not options.names and not options.list:
        parser.error("name an experiment, or 'all'; --list shows them")
    for name, least in (("seeds", 1), ("workers", 1), ("first_seed", 0)):
        value = getattr(options, name)
        if value is not None and value < least:
            parser.error(f"--{name.replace('_', '-')} must be at least {least}, got {value}")
    if options.address is not None and options.backend != "ray":
        parser.error("--address is that of a Ray cluster: it needs --backend ray")
    options.names = list(dict.fromkeys(name for asked in options.names for name in known[asked]))
    return options


def select(options: argparse.Namespace) -> list[Experiment]:
    """The asked experiments at the asked size.

    Raises:
        ValueError: For a label or a setting that there is not.
    """
    chosen = []
    for name in options.names:
        experiment = EXPERIMENTS[name]
        if options.scale == "quick":
            experiment = experiment.at_quick_scale()
        chosen.append(experiment.only(options.methods, options.panels).override(options.set))
    return chosen


def show_list(console: Console) -> None:
    """Print what there is."""
    for experiment in EXPERIMENTS.values():
        place = f", section {experiment.section}" if experiment.section else ""
        console.print(f"[bold]{experiment.name}[/bold]: {experiment.title}{place}; {experiment.seeds} seeds")
        console.print(f"  methods: {', '.join(m.label for m in experiment.methods)}", highlight=False)
        labels = [panel.label for panel in experiment.panels if panel.label]
        if labels:
            console.print(f"  panels: {'; '.join(labels)}", highlight=False)


def _interrupt(signum: int, frame: object) -> None:
    raise KeyboardInterrupt


def main(arguments: Sequence[str] | None = None) -> int:
    """Run experiments; returns the exit status."""
    options = parse(arguments)
    console = Console()
    if options.list:
        show_list(console)
        return 0
    missing = [name for name in ("matplotlib", "scipy", "markdown") if find_spec(name) is None]
    if missing:
        console.print(f"{', '.join(missing)} is missing: pip install 'tpo-gym\\[experiments]'", style="red")
        return 1
    if options.backend == "ray" and find_spec("ray") is None:
        console.print("ray is missing: pip install 'tpo-gym\\[ray]', or leave out --backend ray", style="red")
        return 1
    try:
        experiments = select(options)
    except ValueError as error:
        console.print(str(error), style="red", markup=False, highlight=False)
        return 2
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    signal.signal(signal.SIGTERM, _interrupt)
    failed = 0
    if not options.report_only:
        try:
            failed = _run_missing(experiments, options, console)
        except KeyboardInterrupt:
            console.print("Stopped. Complete runs are kept; the same command goes on.")
            return 130
    _write_report(experiments, options, console, shlex.join(sys.argv[1:] if arguments is None else arguments), started)
    return 1 if failed else 0


def _run_missing(experiments: Sequence[Experiment], options: argparse.Namespace, console: Console) -> int:
    """Carry out the runs that are not there yet; returns how many failed."""
    missing: dict[Path, tuple[str, Settings, int]] = {}  # experiments share runs with equal settings
    done: set[Path] = set()
    for experiment in experiments:
        for seed in range(options.first_seed, options.first_seed + (options.seeds or experiment.seeds)):
            for cell in experiment.cells():
                folder = run_folder(options.out, cell.settings, seed)
                if is_finished(folder):
                    done.add(folder)
                    continue
                label = " ".join(part for part in (experiment.name, cell.panel, cell.method) if part)
                missing.setdefault(folder, (label, cell.settings, seed))
    console.print(f"{len(missing)} runs to do, {len(done)} are there already.", highlight=False)
    failures = _run(missing, options, console) if missing else 0
    if failures:
        console.print(f"{failures} runs failed, see above.", style="red")
    return failures


def _run(missing: Mapping[Path, tuple[str, Settings, int]], options: argparse.Namespace, console: Console) -> int:
    if options.backend == "local":
        warm_up("tpo_gym.experiments.workers")  # before torch is imported here, so that both do it at once
    from tpo_gym.experiments.build import pick_device
    from tpo_gym.experiments.display import Display
    from tpo_gym.experiments.workers import Job

    device = pick_device(options.device)
    jobs = [Job(label, settings, seed, folder, device) for folder, (label, settings, seed) in missing.items()]
    failures = 0
    with Display(jobs, console) as display:
        for event in _events(jobs, options):
            display.show(event)
            failures += event is not None and event.failure is not None
    return failures


def _events(jobs: Sequence[Job], options: argparse.Namespace) -> Iterator[Event | None]:
    n_workers = min(options.workers, len(jobs))
    if options.backend == "ray":
        from tpo_gym.experiments import ray_workers

        return ray_workers.run_all(jobs, n_workers, options.address, options.gpus_per_run)
    from tpo_gym.experiments import workers

    return workers.run_all(jobs, n_workers)


def _write_report(
    experiments: Sequence[Experiment], options: argparse.Namespace, console: Console, words: str, started: float
) -> None:
    from tpo_gym.experiments.report import make_section, write

    same_size = options.scale == "paper" and not options.set
    sections = [make_section(experiment, options.out, same_size, options.set) for experiment in experiments]
    command = f"python -m tpo_gym.experiments {words}"
    files = write(sections, options.out, command, time.monotonic() - started)
    console.print("Written: " + ", ".join(map(str, files)), highlight=False, soft_wrap=True)
    console.print(f"All runs side by side: [bold]tensorboard --logdir {options.out / 'runs'}[/bold]", soft_wrap=True)


if __name__ == "__main__":
    sys.exit(main())
