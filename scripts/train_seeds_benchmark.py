"""Stacked or workers: what an update of `train_seeds` takes, by task and number of seeds.

    python scripts/train_seeds_benchmark.py                      # writes docs/results/train_seeds.md

Processor time of one thread, because other programs on the machine stretch wall time; the ways take turns, and of each
the fastest turn counts. The time of an update is the difference between a long and a short training, so what it takes
to start is apart from it. A worker does what a single run does, so its time per update is that of "single", divided by
the number of workers that run side by side. Operations are what torch dispatches in one update of all seeds, without
views: on a GPU each of them is at least one launch.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path
from typing import Any

import gymnasium as gym
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tpo_gym import TPO, train_seeds
from tpo_gym.agents import NormalizedStep

BEGIN, END = "<!-- table: begin -->", "<!-- table: end -->"
LENGTH = {"sequence_length": 10}
# Name: interactions of one update, updates of a long training, arguments.
CASES: dict[str, tuple[int, int, dict[str, Any]]] = {
    "MNIST bandit, B=100, MLP 784-50-50-10": (
        100,
        100,
        dict(
            env="tpo_gym/MNISTBandit-v0",
            policy="MlpPolicy",
            policy_kwargs={"net_arch": [50, 50]},
            n_contexts=100,
            n_epochs=1,
        ),
    ),
    "bandit, 100 actions, B=100, table": (
        100,
        200,
        dict(
            env="tpo_gym/Bandit-v0",
            policy="TabularPolicy",
            policy_kwargs={"optimizer_class": NormalizedStep},
            n_contexts=100,
            n_epochs=1,
        ),
    ),
    "contextual bandit, exact, table": (
        100,
        200,
        dict(
            env="tpo_gym/ContextualBandit-v0",
            policy="TabularPolicy",
            candidates="exact",
            n_epochs=1,
        ),
    ),
    "token level, H=10, V=2, B=100, K=8, transformer": (
        1000,
        4,
        dict(
            env="tpo_gym/TokenReversal-v0",
            env_kwargs=LENGTH,
            policy="TransformerPolicy",
            n_contexts=100,
        ),
    ),
    "terminal, H=10, V=2, B=100, K=8, transformer": (
        8000,
        2,
        dict(
            env="tpo_gym/TokenReversal-v0",
            env_kwargs={**LENGTH, "reward": "terminal"},
            policy="TransformerPolicy",
            n_contexts=100,
        ),
    ),
}


class _Count(TorchDispatchMode):
    """Counts what torch dispatches; views, which launch nothing, are left out."""

    def __init__(self) -> None:
        super().__init__()
        self.n = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        self.n += not func.is_view
        return func(*args, **(kwargs or {}))


def train(case: str, seeds: int | None, updates: int, device: str, backend: str = "stacked") -> None:
    """Train this many seeds for this many updates; ``None``: a single run."""
    per_update, _, arguments = CASES[case]
    total = updates * per_update
    if seeds is not None:
        train_seeds(TPO, seeds=range(seeds), total_timesteps=total, backend=backend, device=device, **arguments)
        return
    own = dict(arguments)
    env: Any = gym.make(own.pop("env"), **own.pop("env_kwargs", {}))
    TPO(own.pop("policy"), env, seed=0, device=device, **own).learn(total)


def seconds(case: str, seeds: int | None, updates: int, device: str) -> float:
    """Processor time of a training; on a GPU wall time."""
    clock = time.process_time if device == "cpu" else time.perf_counter
    start = clock()
    train(case, seeds, updates, device)
    return clock() - start


def operations(case: str, seeds: int | None, device: str) -> int:
    """Operations of one update of all seeds."""

    def count(updates: int) -> int:
        with _Count() as counter:
            train(case, seeds, updates, device)
        return counter.n

    return count(2) - count(1)


def measure(case: str, seeds: list[int], rounds: int, device: str) -> list[str]:
    """Rows of the table for one task."""
    ways: list[int | None] = [None, *seeds]
    long = 1 + CASES[case][1]
    taken: dict[int | None, tuple[list[float], list[float]]] = {way: ([], []) for way in ways}
    train(case, None, 1, device)  # reads the data
    for _ in range(rounds):
        for way in ways:
            for updates, times in zip((1, long), taken[way], strict=True):
                times.append(seconds(case, way, updates, device))
    rows = []
    for way, (short, times) in taken.items():
        update, n = 1000 * (min(times) - min(short)) / (long - 1), way or 1
        name = "single" if way is None else f"{n} stacked"
        rows.append(f"| {case} | {name} | {update:.3g} | {update / n:.3g} | {operations(case, way, device):,} |")
        print(rows[-1], flush=True)
    return rows


def start_of_workers() -> float:
    """Wall time of a training in two workers that does next to nothing."""
    start = time.perf_counter()
    train("bandit, 100 actions, B=100, table", 2, 1, "cpu", "workers")
    return time.perf_counter() - start


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[4, 20])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", default="", help="tasks whose name contains this")
    parser.add_argument("--out", type=Path, default=Path("docs/results/train_seeds.md"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for case in CASES:
        if arguments.only in case:
            rows += measure(case, arguments.seeds, arguments.rounds, arguments.device)
    machine = f"{os.cpu_count()} processors ({platform.machine()}), load {os.getloadavg()[0]:.1f}"
    if arguments.device != "cpu":
        machine += f", {torch.cuda.get_device_name(arguments.device)}"
    seeds = " ".join(map(str, arguments.seeds))
    table = "\n".join(
        [
            BEGIN,
            f"`python scripts/train_seeds_benchmark.py --seeds {seeds} --rounds {arguments.rounds} "
            f"--device {arguments.device}`; torch {torch.__version__}, {machine}. Starting two workers took "
            f"{start_of_workers():.0f} s (wall time).",
            "",
            "| task | seeds | ms per update | ms per update and seed | operations per update |",
            "|---|---|---:|---:|---:|",
            *rows,
            END,
        ]
    )
    text = arguments.out.read_text(encoding="utf-8") if arguments.out.exists() else f"{BEGIN}{END}"
    before, _, rest = text.partition(BEGIN)
    arguments.out.write_text(before + table + rest.partition(END)[2], encoding="utf-8")


if __name__ == "__main__":
    main()
