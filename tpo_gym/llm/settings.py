"""What a run is made of: one flat set of settings, from a YAML file, then the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from tpo_gym.llm.weights import METHODS
from tpo_gym.values import read_value

CONFIGS = Path(__file__).parent / "configs"
BACKENDS = ("trl", "verl")
_POSITIVE: tuple[str, ...] = (
    *("group_size", "prompts_per_step", "steps", "epochs", "learning_rate", "max_prompt_length"),
    *("max_completion_length", "per_device_batch_size", "n_devices", "n_machines", "train_size", "eval_size"),
)


@dataclass
class RunSettings:
    """Settings of a training run.

    Args:
        model: A name on the hub, or a folder.
        task: ``"gsm8k"``, or a generator of Reasoning Gym.
        method: ``"target_po"``, ``"grpo"``; on TRL also ``"gspo"`` and ``"group_pg"``.
        backend: ``"trl"`` or ``"verl"``.
        output: Folder of the run.
        task_config: The generator's settings.
        task_seed: The generator's seed; the same for all runs that are compared.
        source: GSM8K: ``"hub"``, ``"sample"`` or a JSON-lines file.
        eval_source: GSM8K: a JSON-lines file of held-out problems.
        min_credit: Scores below it count as 0.
        short: Questions of one line, as plain text.
        train_size: Questions to train on.
        eval_size: Held-out questions.
        group_size: Completions per question, the paper's K.
        prompts_per_step: Questions per optimizer step.
        steps: Rollout batches; each is used for ``epochs`` optimizer steps.
        epochs: Optimizer steps per rollout batch.
        learning_rate: Of AdamW, constant after ``warmup_steps``.
        warmup_steps: Optimizer steps in which the learning rate rises.
        kl_coef: Weight of the penalty on the divergence from the model at the start.
        temperature: Of sampling.
        max_prompt_length: In tokens (verl).
        max_completion_length: In tokens.
        lora_rank: Rank of the adapters; 0 trains all weights.
        lora_alpha: Scale of the adapters.
        dtype: Type of the loaded weights. ``"float32"`` where they are trained; below adapters ``"bfloat16"`` will do.
        bf16: Compute in bfloat16 where the device can.
        chat_template_kwargs: For the chat template, such as ``{"enable_thinking": False}``.
        per_device_batch_size: Completions per micro-batch and device.
        n_devices: Devices per machine (verl; on TRL, ``accelerate launch`` decides).
        n_machines: Machines (verl).
        vllm: ``"none"``, ``"colocate"`` or ``"server"``: who generates on TRL.
        vllm_server: Address of ``trl vllm-serve``.
        eval_every: Steps between evaluations on held-out questions; 0: none while training.
        save_every: Steps between checkpoints; 0: only the last model is kept.
        seed: Of sampling and of the order of questions.
        report_to: Where logs go: ``"none"``, ``"tensorboard"``, ``"wandb"``.
        trl: Further arguments of ``TargetPOConfig``.
        verl: Further Hydra overrides, ``name: value``.

    Raises:
        ValueError: For a setting that cannot be served.
    """

    model: str = ""
    task: str = ""
    method: str = "target_po"
    backend: str = "trl"
    output: str = "run"

    task_config: dict[str, Any] = field(default_factory=dict)
    task_seed: int = 0
    source: str = "hub"
    eval_source: str | None = None
    min_credit: float = 0.0
    short: bool = False
    train_size: int = 5000
    eval_size: int = 200

    group_size: int = 16
    prompts_per_step: int = 16
    steps: int = 100
    epochs: int = 1
    learning_rate: float = 1e-5
    warmup_steps: int = 0
    kl_coef: float = 0.0
    temperature: float = 1.0
    max_prompt_length: int = 512
    max_completion_length: int = 1024

    lora_rank: int = 0
    lora_alpha: int = 64
    dtype: str = "float32"
    bf16: bool = True
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)

    per_device_batch_size: int = 8
    n_devices: int = 4
    n_machines: int = 1
    vllm: str = "none"
    vllm_server: str = "http://localhost:8000"
    eval_every: int = 0
    save_every: int = 0
    seed: int = 0
    report_to: str = "none"
    trl: dict[str, Any] = field(default_factory=dict)
    verl: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            setattr(self, item.name, _convert(item, getattr(self, item.name)))
        for name in ("model", "task"):
            if not getattr(self, name):
                raise ValueError(f"No {name} is given: use --{name}, or a configuration that names one.")
        for name, choices in (("method", METHODS), ("backend", BACKENDS), ("vllm", ("none", "colocate", "server"))):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is unknown: choose one of {', '.join(choices)}.")
        for name in _POSITIVE:
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)} must be positive.")
        if self.group_size < 2:
            raise ValueError(f"group_size={self.group_size} must be at least 2: completions of a group are compared.")
        if self.backend == "verl" and self.short:
            raise ValueError("short=True gives prompts without a chat template, which verl needs: use the TRL backend.")

    @property
    def batch_size(self) -> int:
        """Completions per optimizer step, over all devices."""
        return self.group_size * self.prompts_per_step

    def save(self, path: Path) -> None:
        """Writes the settings as YAML, to be loaded again."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(yaml.safe_dump(dataclasses.asdict(self), sort_keys=False))


def load_settings(config: str | Path | None = None, overrides: Sequence[str] = (), **given: Any) -> RunSettings:
    """Settings from a file, then ``NAME=VALUE`` texts, then arguments that are not None.

    Args:
        config: A YAML file, or the name of one of the package's configurations; see :func:`config_names`.
        overrides: As on the command line; values are YAML, with numbers such as ``3e-4`` too, and
            ``trl.optim=adamw_torch`` sets a key of a dictionary.
        **given: Settings by name; None leaves the one in the file.

    Raises:
        FileNotFoundError: There is no such configuration.
        ValueError: A setting is unknown or has a value that cannot be served.
    """
    values = _read(config) if config is not None else {}
    for text in overrides:
        name, found, value = text.partition("=")
        if not found:
            raise ValueError(f"{text!r} sets nothing: write NAME=VALUE.")
        first, dot, key = name.partition(".")
        if not dot:
            values[first] = _value(value)
        elif isinstance(values.setdefault(first, {}), dict):
            values[first] = {**values[first], key: _value(value)}
        else:
            raise ValueError(f"{name!r} cannot be set: {first!r} is not a dictionary.")
    values.update({name: value for name, value in given.items() if value is not None})
    names = [item.name for item in dataclasses.fields(RunSettings)]
    unknown = sorted(set(values) - set(names))
    if unknown:
        raise ValueError(f"Unknown settings {', '.join(unknown)}; there are: {', '.join(names)}.")
    return RunSettings(**values)


def _value(text: str) -> Any:
    value = read_value(text)
    return yaml.safe_load(text) if isinstance(value, str) else value  # YAML takes 3e-4 for a text


def config_names() -> list[str]:
    """The package's configurations."""
    return sorted(path.stem for path in CONFIGS.glob("*.yaml"))


def _read(config: str | Path) -> dict[str, Any]:
    named = CONFIGS / f"{config}.yaml"
    path = named if named.is_file() else Path(config)
    if not path.is_file():
        raise FileNotFoundError(
            f"There is no configuration {str(config)!r}; use a file or: {', '.join(config_names())}."
        )
    values = yaml.safe_load(path.read_text("utf-8")) or {}
    if not isinstance(values, dict):
        raise ValueError(f"{path} must hold settings, one 'name: value' a line, not a {type(values).__name__}.")
    return values


def _convert(item: dataclasses.Field[Any], value: Any) -> Any:
    """The value in the field's type; YAML reads ``1e-5`` as a text."""
    wanted = str(item.type)
    try:
        if wanted == "float" and not isinstance(value, bool):
            return float(value)
        if wanted == "int" and not isinstance(value, bool) and int(value) == float(value):
            return int(value)
    except (TypeError, ValueError) as error:
        raise ValueError(f"{item.name}={value!r} is not a number.") from error
    kinds: dict[str, Any] = {"str": str, "str | None": (str, type(None)), "bool": bool, "dict[str, Any]": Mapping}
    if not isinstance(value, kinds.get(wanted, ())):
        raise ValueError(f"{item.name}={value!r} must be of type {wanted}.")
    return dict(value) if wanted == "dict[str, Any]" else value
