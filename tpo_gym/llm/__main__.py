"""``python -m tpo_gym.llm``: warm a small model up, train, evaluate, and compare methods."""

from __future__ import annotations

import argparse
import json
import shlex
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tpo_gym.llm.settings import BACKENDS, RunSettings, config_names, load_settings
from tpo_gym.llm.weights import METHODS

_NEEDED = ("trl", "peft", "datasets", "transformers")


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tpo_gym.llm",
        description="Target Policy Optimization for language models, on TRL and on verl.",
        epilog="Configurations of the package: " + ", ".join(config_names()),
    )
    commands = parser.add_subparsers(dest="command", required=True)
    common = _common()
    command = commands.add_parser("warmup", parents=[common], help="make a small model and train it on solutions")
    _add_warmup(command)
    command = commands.add_parser("train", parents=[common], help="reinforcement learning with verifiable rewards")
    _add_method(command)
    command.add_argument("--dry-run", action="store_true", help="show the settings, and verl's command, and stop")
    command = commands.add_parser("eval", parents=[common], help="exact matches on held-out questions")
    command.add_argument(
        "--samples", type=int, default=0, metavar="N", help="sampled answers each (default: 0, greedy)"
    )
    command.add_argument("--batch-size", type=int, default=64, metavar="N", help="answers at once (default: 64)")
    command.add_argument("--trained-on", action="store_true", help="questions of the training part instead")
    command.add_argument("--device", help="default: a GPU where there is one")
    command = commands.add_parser("study", parents=[common], help="methods x learning rates x seeds, tuned alike")
    command.add_argument("--methods", nargs="+", choices=METHODS, default=["target_po", "grpo"])
    command.add_argument("--learning-rates", nargs="+", type=float, default=[3e-5, 1e-4, 3e-4], metavar="RATE")
    command.add_argument("--seeds", type=int, default=3, metavar="N", help="seeds 0 to N-1 (default: 3)")
    command.add_argument("--samples", type=int, default=4, metavar="N", help="sampled answers each (default: 4)")
    _add_warmup(command, prefix="warmup-")
    return parser.parse_args(arguments)


def _common() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--config", metavar="NAME", help="a configuration of the package, or a YAML file")
    parser.add_argument("--model", help="a name on the hub, or a folder; warmup: the folder to save to")
    parser.add_argument("--task", help="gsm8k, or a generator of Reasoning Gym: graph_color, knights_knaves, ...")
    parser.add_argument("--output", metavar="DIR", help="folder of the run; eval: file of the result")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--steps", type=int, metavar="N", help="rollout batches; warmup: optimizer steps")
    parser.add_argument("--set", nargs="+", action="extend", default=[], metavar="NAME=VALUE", help="any other setting")
    return parser


def _add_method(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--method", choices=METHODS)
    parser.add_argument("--backend", choices=BACKENDS)
    parser.add_argument("--learning-rate", type=float, metavar="RATE")


def _add_warmup(parser: argparse.ArgumentParser, prefix: str = "") -> None:
    if prefix:
        parser.add_argument(f"--{prefix}steps", type=int, default=400, metavar="N", help="default: 400")
    parser.add_argument(f"--{prefix}batch-size", type=int, default=64, metavar="N", help="default: 64")
    parser.add_argument(f"--{prefix}learning-rate", type=float, default=2e-3, metavar="RATE", help="default: 2e-3")
    parser.add_argument("--hidden-size", type=int, default=128, metavar="N", help="default: 128")
    parser.add_argument("--layers", type=int, default=5, metavar="N", help="default: 5, a million parameters")
    parser.add_argument(
        "--chain-of-thought", type=float, default=0.0, metavar="FRACTION", help="of solutions in steps (default: 0)"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; returns the exit status."""
    options = parse(arguments)
    on_verl = options.command == "train" and options.backend == "verl"
    missing = [name for name in (("datasets",) if on_verl else _NEEDED) if find_spec(name) is None]
    if missing:
        print(f"{', '.join(missing)} is missing: pip install 'tpo-gym[llm]'", file=sys.stderr)
        return 1
    try:
        return {"warmup": _warmup, "train": _train, "eval": _eval, "study": _study}[options.command](options)
    except (ValueError, OSError, ImportError) as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 2


def _settings(options: argparse.Namespace, **given: Any) -> RunSettings:
    named = {name: getattr(options, name) for name in ("model", "task", "output", "seed", "steps")}
    return load_settings(options.config, options.set, **{**named, **given})


def _warmup(options: argparse.Namespace) -> int:
    from tpo_gym.llm.warmup import warmup

    folder = warmup(
        _settings(options, steps=None),
        steps=options.steps or 400,
        batch_size=options.batch_size,
        learning_rate=options.learning_rate,
        hidden_size=options.hidden_size,
        layers=options.layers,
        chain_of_thought=options.chain_of_thought,
    )
    print(f"Saved: {folder}")
    return 0


def _train(options: argparse.Namespace) -> int:
    settings = _settings(options, method=options.method, backend=options.backend, learning_rate=options.learning_rate)
    if settings.backend == "verl":
        return _train_on_verl(settings, options.dry_run)
    if options.dry_run:
        from tpo_gym.llm.train import trainer_arguments

        print(json.dumps(trainer_arguments(settings), indent=1))
        return 0
    from tpo_gym.llm.train import train

    print(f"Saved: {train(settings)}")
    return 0


def _train_on_verl(settings: RunSettings, dry_run: bool) -> int:
    from tpo_gym.llm.verl_command import run_on_verl, verl_command

    if dry_run:
        folder = Path(settings.output) / "data"
        print(shlex.join(verl_command(settings, folder / "train.parquet", folder / "test.parquet")))
        return 0
    if find_spec("verl") is None:
        print("verl is missing: it needs an environment of its own, see docs/language-models.md", file=sys.stderr)
        return 1
    return run_on_verl(settings)


def _eval(options: argparse.Namespace) -> int:
    from tpo_gym.llm.evaluate import evaluate, write_result

    settings = _settings(options)
    result = evaluate(
        settings,
        samples=options.samples,
        batch_size=options.batch_size,
        held_out=not options.trained_on,
        device=options.device,
    )
    shown = {name: value for name, value in result.items() if name not in ("examples", "per_question")}
    print(json.dumps(shown, indent=1))
    if options.output:
        write_result(result, Path(options.output))
    return 0


def _study(options: argparse.Namespace) -> int:
    from tpo_gym.llm.study import as_markdown, study

    output = options.output or "study"
    settings = _settings(options, output=output, model=options.model or str(Path(output) / "start"))
    warmup_arguments = {
        "steps": options.warmup_steps,
        "batch_size": options.warmup_batch_size,
        "learning_rate": options.warmup_learning_rate,
        "hidden_size": options.hidden_size,
        "layers": options.layers,
        "chain_of_thought": options.chain_of_thought,
    }
    report = study(
        settings,
        methods=options.methods,
        learning_rates=options.learning_rates,
        seeds=options.seeds,
        samples=options.samples,
        warmup_arguments=None if options.model else warmup_arguments,
    )
    print(as_markdown(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
