"""How fast is it: against the author's artifact, against SB3's own collection, and as the batch grows.

    make bench                                                                # our side alone
    python scripts/benchmark.py --artifact PATH --artifact-python PYTHON      # beside the artifact, in its environment

Every comparison is a ratio of the two sides' times in one run on one machine: both stand ready in processes of their
own and take turns. Writes `benchmark.json` and `benchmark.md` to `--out` (docs/results). On an idle machine.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import benchmark_sides as sides
import numpy as np

import tpo_gym  # noqa: F401  (registers the environments)

UPDATES = {"terminal_h10": 8, "terminal_h8": 2, "tokens_v16": 15, "dg_h10": 40, "ppo_h10": 20}
UPDATES |= {"mnist_1": 3000, "mnist_20": 4000}
LONG = {"terminal_h10": 2000, "terminal_h8": 1000}
TARGETS = {
    "terminal_h10": 4,
    "terminal_h8": 6,
    "tokens_v16": 10,
    "dg_h10": 2,
    "ppo_h10": 2,
    "mnist_1": 1,
    "mnist_20": 1.4,
}
BESIDE: dict[str, tuple[str, ...]] = {
    "mnist_1": ("compiled", "shortest"),
    **dict.fromkeys(("tokens_v16", "dg_h10", "ppo_h10", "mnist_20"), ("compiled",)),
}
"""What is also timed: see `benchmark_report.BESIDE`."""
LONG_TARGETS = {"terminal_h10": 8, "terminal_h8": 12}
TABULAR = {"bandit": "tabular_single", "contextual_bandit": "tabular_multi"}
NAMES = {
    "terminal_h10": "terminal, H=10, V=2, B=100, K=8, TPO",
    "terminal_h8": "terminal, H=8, V=2, B=256, K=32, TPO",
    "tokens_v16": "token level, H=10, V=16, B=100, K=8, TPO",
    "dg_h10": "DG, H=10, V=2, B=100",
    "ppo_h10": "PPO (critic-free), H=10, V=2, B=100",
    "mnist_1": "MNIST, TPO, 1 seed",
    "mnist_20": "MNIST, TPO, 20 seeds (stacked, a worker per processor), per seed",
    "bandit": "`bandit`, 100 seeds, 4 methods, whole process",
    "contextual_bandit": "`contextual_bandit`, 100 seeds, whole process",
}
GROWTH = [(10, 10, 10), (32, 32, 10), (100, 100, 10), (316, 316, 10)]
"""B, K, H with products of about 10^3 to 10^6."""
GROWTH_BATCH = 2048
SECTIONS = ("cases", "learn", "profile", "environments", "growth")


class Process:
    """One side of a comparison, waiting for its turns."""

    def __init__(self, command: Sequence[str]) -> None:
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self._expect("ready")

    def _expect(self, wanted: str | None = None) -> str:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            if wanted is None or line.strip() == wanted:
                return line
        raise RuntimeError(f"{self._process.args!r} ended with code {self._process.wait()}")

    def run(self, n: int) -> float:
        """Seconds per update of ``n`` updates."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{n}\n")
        self._process.stdin.flush()
        return float(json.loads(self._expect()))

    def end(self) -> None:
        """Let it go."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()


def flops(case: str) -> float:
    """Matrix-product operations that one update needs: prompts once per group, each token once, four epochs.

    A block has ``12 d²`` weights; a forward pass takes 2 operations per weight, a backward pass 4.
    """
    if case in sides.MNIST_CASES:
        weights = 784 * 50 + 50 * 50 + 50 * 10
        return 100 * 2 * (3 * weights - 784 * 50)  # no gradient for the images
    c = sides.TOKEN_CASES[case]
    sequences = c["b"] if c["reward"] != "terminal" else c["b"] * c["k"]
    tokens = c["b"] * c["h"] + sequences * (c["h"] - 1)
    epochs = 1 if c["algorithm"] == "DG" else 4
    return tokens * 2 * 2 * 12 * 64**2 * (1 + 3 * epochs)


def matmul_rate() -> float:
    """Operations per second of float32 matrix products on all cores."""
    import torch

    a, times = torch.randn(1024, 1024), []
    for _ in range(20):
        start = time.perf_counter()
        a @ a
        times.append(time.perf_counter() - start)
    return 2 * 1024**3 / min(times)


def compare(case: str, rounds: int, artifact: tuple[str, Path] | None, data: Path, long: bool) -> dict[str, Any]:
    """Both sides of a case, in turns."""
    n, script = UPDATES[case], str(Path(__file__).with_name("benchmark_sides.py"))
    ours = Process([sys.executable, script, "ours", case, str(n)])
    theirs = None
    if artifact is not None:
        python, path = artifact
        theirs = Process([python, script, "artifact", case, str(n), str(path), str(data)])
    waiting: dict[str, Process | None] = {"ours": ours, "artifact": theirs}
    for side in BESIDE.get(case, ()):
        waiting[side] = Process([sys.executable, script, side, case, str(n)])
    times: dict[str, list[float]] = {"ours": [], "artifact": []}
    for _ in range(rounds):
        for side, process in waiting.items():
            if process is not None:
                times.setdefault(side, []).append(process.run(n))
    for process in waiting.values():
        if process is not None:
            process.end()
    entry: dict[str, Any] = {"updates": n, "seconds": times, "flops": flops(case)}
    if long and case in LONG:
        fresh = Process([sys.executable, script, "ours", case, "1"])
        entry["long"] = {"updates": LONG[case], "seconds": fresh.run(LONG[case])}
        fresh.end()
    return entry


def whole_process(name: str, rounds: int, artifact: tuple[str, Path] | None) -> dict[str, Any]:
    """A tabular experiment from the shell to its figure, in turns."""
    times: dict[str, list[float]] = {"ours": [], "artifact": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as out:
            workers = str(os.cpu_count() or 1)
            command = [sys.executable, "-m", "tpo_gym.experiments", name, "--scale", "paper", "--workers", workers]
            command += ["--out", out]
            times["ours"].append(_seconds(command, {}))
        if artifact is None:
            continue
        with tempfile.TemporaryDirectory() as out:
            python, path = artifact
            command = [python, "-m", "tpo.cli", TABULAR[name], "--no-wandb", "--save-dir", out]
            environment = {"PYTHONPATH": str(path / "src"), "JAX_COMPILATION_CACHE_DIR": out}
            times["artifact"].append(_seconds(command, environment))
    return {"seconds": times}


def _seconds(command: Sequence[str], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, env={**os.environ, **environment}, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def through_learn(case: str, rounds: int) -> dict[str, Any]:
    """`learn`, also with an entry in TensorBoard for every update, over the same updates without it."""
    n = max(4, UPDATES[case] // 2)

    def model(**kwargs: Any) -> Any:
        return sides.mnist_model(**kwargs) if case in sides.MNIST_CASES else sides.token_model(case, **kwargs)

    with tempfile.TemporaryDirectory() as logs:
        logged = sides.learner(model(tensorboard_log=logs))
        ways = {"learn": sides.learner(model()), "bare": sides.bare(model()), "logged": logged}
        times: dict[str, list[float]] = {way: [] for way in ways}
        for run in ways.values():
            run(2)
        for _ in range(rounds):
            for way, run in ways.items():
                times[way].append(run(n))
    return {"seconds": times}


KINDS = {
    "matrix products": ("addmm", "aten::mm", "bmm", "matmul"),
    "attention": ("scaled_dot_product",),
    "GELU": ("gelu",),
    "layer norm": ("layer_norm",),
    "gather, scatter, copy, concatenate": ("index", "embedding", "copy_", "cat", "gather", "scatter", "unique", "sort"),
    "optimizer": ("Optimizer", "adam", "lerp"),
}


def profile(case: str) -> dict[str, float]:
    """Milliseconds of an update by kind of operation, from torch's profiler, on one thread.

    Shares of the profiled time are applied to the time without the profiler, which costs time itself.
    """
    import torch
    from torch.profiler import profile as torch_profile

    torch.set_num_threads(1)
    model = sides.mnist_model() if case in sides.MNIST_CASES else sides.token_model(case)
    update, n = sides.bare(model), 3
    update(n)
    seconds = min(update(n) for _ in range(3))
    with torch_profile() as profiler:
        start = time.perf_counter()
        update(n)
        profiled = time.perf_counter() - start
    found: dict[str, float] = dict.fromkeys([*KINDS, "other operations"], 0.0)
    for event in profiler.key_averages():
        kind = next((k for k, words in KINDS.items() if any(word in event.key for word in words)), "other operations")
        found[kind] += event.self_cpu_time_total / 1e6
    found["Python, between operations"] = max(0.0, profiled - sum(found.values()))
    return {kind: value / profiled * seconds * 1e3 for kind, value in found.items()} | {"sum": seconds * 1e3}


def environments() -> dict[str, float]:
    """Steps per second of the batched environments alone, and of SB3's collection over a `DummyVecEnv`'s."""
    import gymnasium as gym
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.env_util import make_vec_env as sb3_vec_env

    from tpo_gym import make_vec_env

    found: dict[str, float] = {}
    for env_id, n_envs in (("tpo_gym/TokenReversal-v0", 4096), ("tpo_gym/MNISTBandit-v0", 100)):
        env: Any = gym.make_vec(env_id, num_envs=n_envs)
        env.reset(seed=0)
        actions = [torch.randint(env.single_action_space.n, (n_envs,)) for _ in range(8)]
        rates = []
        for _ in range(5):
            start, steps = time.perf_counter(), 300
            for i in range(steps):
                env.step(actions[i % 8])
            rates.append(steps * n_envs / (time.perf_counter() - start))
        found[f"{env_id}, {n_envs} sub-environments: steps/s"] = statistics.median(rates)
    for env_id in ("tpo_gym/TokenReversal-v0", "tpo_gym/MNISTBandit-v0"):
        rates_by: dict[str, list[float]] = {}
        for name, vec in (("ours", make_vec_env(env_id, n_envs=100)), ("dummy", sb3_vec_env(env_id, n_envs=100))):
            rates_by[name] = [_collection_rate(PPO("MlpPolicy", vec, n_steps=20, device="cpu")) for _ in range(5)]
        ratio = statistics.median(rates_by["ours"]) / statistics.median(rates_by["dummy"])
        found[f"{env_id}: SB3 PPO's collection, 100 sub-environments, over DummyVecEnv's"] = ratio
    return found


def _collection_rate(model: Any) -> float:
    from stable_baselines3.common.callbacks import CallbackList

    _, callback = model._setup_learn(1, CallbackList([]))
    start = time.perf_counter()
    for _ in range(5):
        model.collect_rollouts(model.env, callback, model.rollout_buffer, model.n_steps)
    return 5 * model.n_steps * model.n_envs / (time.perf_counter() - start)


def _in_fresh_process(case: str) -> dict[str, float]:
    command = [sys.executable, __file__, "--profile", case]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return found


def grow(contexts: int, group_size: int, length: int, batch_size: int | None) -> dict[str, Any]:
    """Time and peak memory of an update, in a process of its own."""
    command = [sys.executable, __file__, "--grow", *map(str, (contexts, group_size, length, batch_size or 0))]
    return json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def _grow_here(contexts: int, group_size: int, length: int, batch_size: int) -> None:
    import gymnasium as gym

    from tpo_gym import TPO

    env: Any = gym.make_vec(
        "tpo_gym/TokenReversal-v0",
        num_envs=contexts * group_size,
        sequence_length=length,
        vocab_size=8,
        reward="terminal",
    )
    model = TPO("TransformerPolicy", env, group_size=group_size, batch_size=batch_size or None, seed=0)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    seconds = sides.learner(model)(2)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({"seconds": seconds, "peak_mib": peak / 1024, "before_mib": before / 1024}))


def machine() -> dict[str, str]:
    """Where this was measured."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":")[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    versions = {name: version(name) for name in ("torch", "numpy", "gymnasium", "stable-baselines3")}
    return {"cpu": model, "cores": str(os.cpu_count()), "python": platform.python_version(), **versions}


def export_mnist(path: Path) -> None:
    """The package's MNIST in the form that the artifact's side loads."""
    import gymnasium as gym

    arrays = {}
    for split, prefix in (("train", ""), ("test", "test_")):
        env: Any = gym.make_vec("tpo_gym/MNISTBandit-v0", num_envs=1, split=split)
        arrays[f"{prefix}x"] = env.unwrapped.features().numpy().reshape(-1, sides.N_PIXELS)
        arrays[f"{prefix}y"] = env.unwrapped.dataset.labels.numpy().astype(np.int32)
    np.savez(path, **arrays)


def main() -> None:
    """Measure what was asked for and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=[], help=f"of {', '.join(NAMES)}; default: all")
    parser.add_argument("--artifact", type=Path, help="checkout of the author's artifact")
    parser.add_argument("--artifact-python", default=sys.executable, help="interpreter of its environment")
    parser.add_argument("--rounds", type=int, default=5, help="turns of each side")
    parser.add_argument("--long", action="store_true", help="also average over whole runs (minutes)")
    parser.add_argument("--only", nargs="*", choices=SECTIONS)
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    parser.add_argument("--profile", help=argparse.SUPPRESS)
    parser.add_argument("--grow", nargs=4, type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.grow:
        _grow_here(*arguments.grow)
        return
    if arguments.profile:
        print(json.dumps(profile(arguments.profile)))
        return
    from benchmark_report import write

    file = arguments.out / "benchmark.json"
    results: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    results.update(machine=machine(), matmul_rate=matmul_rate(), date=time.strftime("%Y-%m-%d"))
    artifact = None if arguments.artifact is None else (arguments.artifact_python, arguments.artifact)
    wanted = arguments.only or SECTIONS
    cases = arguments.cases or list(NAMES)

    def keep(section: str, name: str, value: Any) -> None:
        results.setdefault(section, {})[name] = value
        print(f"{section}, {name}: {json.dumps(value)[:300]}", flush=True)
        write(results, arguments.out)

    with tempfile.TemporaryDirectory() as scratch:
        data = Path(scratch) / "mnist.npz"
        if artifact is not None and any(case in sides.MNIST_CASES for case in cases):
            export_mnist(data)
        for case in cases if "cases" in wanted else ():
            if case in TABULAR:
                keep("cases", case, whole_process(case, arguments.rounds, artifact))
            else:
                keep("cases", case, compare(case, arguments.rounds, artifact, data, arguments.long))
    if "learn" in wanted:
        for case in ("terminal_h10", "tokens_v16", "mnist_1"):
            keep("learn", case, through_learn(case, arguments.rounds))
    if "profile" in wanted:
        for case in ("terminal_h10", "tokens_v16", "ppo_h10", "mnist_1"):
            keep("profile", case, _in_fresh_process(case))
    if "environments" in wanted:
        for name, value in environments().items():
            keep("environments", name, value)
    if "growth" in wanted:
        for size in GROWTH:
            for batch_size in (GROWTH_BATCH, None):
                if batch_size is None and np.prod(size) > 200_000:
                    continue  # all at once: gigabytes
                keep(
                    "growth",
                    f"{size} {batch_size}",
                    {"size": size, "batch_size": batch_size, **grow(*size, batch_size)},
                )


if __name__ == "__main__":
    main()
