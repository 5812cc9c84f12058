"""The command line of language models: settings, configurations, commands, and a run that learns."""

import dataclasses
import json
import shlex
from importlib.util import find_spec

import pytest

pytest.importorskip("trl", reason="needs the extra llm")
pytest.importorskip("reasoning_gym", reason="needs the extra llm")

from tpo_gym.llm.__main__ import main
from tpo_gym.llm.evaluate import bootstrap
from tpo_gym.llm.settings import CONFIGS, RunSettings, config_names, load_settings
from tpo_gym.llm.study import Run, make_report, plan
from tpo_gym.llm.train import LOG, gradient_accumulation_steps, trainer_arguments
from tpo_gym.llm.verl_command import verl_command

PAPER = [
    f"{model}-{task}"
    for model in ("qwen3-1.7b", "r1-distill-1.5b")
    for task in ("gsm8k", "graph_color", "knights_knaves")
]
TINY = [
    *("--config", "tiny-graph_color", "--set"),
    "task_config={min_num_vertices: 3, max_num_vertices: 4, edge_probability: 0.4}",
    *("train_size=20", "eval_size=8", "group_size=4", "prompts_per_step=2", "per_device_batch_size=4"),
    "max_completion_length=6",
]
SMALL_MODEL = ("--hidden-size", "16", "--layers", "1")


@pytest.fixture
def start(tmp_path):
    """A model that has seen a few solutions."""
    folder = str(tmp_path / "start")
    assert main(["warmup", *TINY, "--model", folder, "--steps", "2", "--batch-size", "4", *SMALL_MODEL]) == 0
    return folder


# --- settings


def test_the_papers_runs_have_the_papers_settings():
    assert set(PAPER) <= set(config_names())
    for name in PAPER:
        settings = load_settings(name)
        assert (settings.group_size, settings.prompts_per_step, settings.learning_rate) == (16, 16, 1e-5)
        is_gsm8k = settings.task == "gsm8k"
        assert (settings.lora_rank, settings.kl_coef) == ((32, 1e-3) if is_gsm8k else (0, 0.0))
        assert gradient_accumulation_steps(settings, 4) * settings.per_device_batch_size * 4 == 256
        both = [dataclasses.asdict(load_settings(name, method=method)) for method in ("target_po", "grpo")]
        assert {key for key in both[0] if both[0][key] != both[1][key]} == {"method"}


@pytest.mark.parametrize("name", [path.stem for path in CONFIGS.glob("*.yaml")])
@pytest.mark.parametrize("method", ["target_po", "grpo"])
def test_every_configuration_makes_a_trainer_configuration(name, method, tmp_path):
    from tpo_gym.llm.trl import TargetPOConfig

    settings = load_settings(name, model="some/model", method=method, output=str(tmp_path), report_to="none")
    made = TargetPOConfig(**(trainer_arguments(settings) | {"use_cpu": True}))
    assert made.method == method
    assert made.num_generations == settings.group_size
    assert made.gradient_accumulation_steps * made.per_device_train_batch_size == settings.batch_size


def test_settings_are_layered(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text("model: a\ntask: chain_sum\nlearning_rate: 1e-4\ntrl: {optim: adamw_torch}\n")
    settings = load_settings(path, ["steps=7", "trl.eta=5e-1", "learning_rate=3e-4"], model="b", method=None)
    assert (settings.model, settings.steps, settings.learning_rate) == ("b", 7, 3e-4)
    assert settings.trl == {"optim": "adamw_torch", "eta": 0.5}
    assert settings.method == "target_po"
    settings.save(tmp_path / "again.yaml")
    assert load_settings(tmp_path / "again.yaml") == settings


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["lr=1"], "Unknown settings lr; there are: model, task"),
        (["steps"], "'steps' sets nothing: write NAME=VALUE"),
        (["steps=many"], "steps='many' is not a number"),
        (["steps=0"], "steps=0 must be positive"),
        (["steps=1.5"], "steps=1.5 must be of type int"),
        (["short=3"], "short=3 must be of type bool"),
        (["group_size=1"], "group_size=1 must be at least 2"),
        (["method=ppo"], "method='ppo' is unknown: choose one of target_po, grpo"),
        (["model.a=1"], "'model' is not a dictionary"),
        (["model=null"], "model=None must be of type str"),
        (["model=''"], "No model is given: use --model"),
        (["backend=verl", "short=true"], "short=True gives prompts without a chat template"),
    ],
)
def test_wrong_settings(overrides, message):
    with pytest.raises(ValueError, match=message):
        load_settings("qwen3-1.7b-gsm8k", overrides)


def test_an_unknown_configuration():
    with pytest.raises(FileNotFoundError, match=r"no configuration 'nothing'; use a file or: .*qwen3-1.7b-gsm8k"):
        load_settings("nothing")


def test_completions_must_divide():
    settings = RunSettings(model="m", task="gsm8k", group_size=6, prompts_per_step=1, per_device_batch_size=4)
    with pytest.raises(ValueError, match="= 6 completions do not divide into micro-batches of per_device_batch_size=4"):
        gradient_accumulation_steps(settings, 1)


# --- verl


def overrides_of(command):
    return dict(part.split("=", 1) for part in command[3:])


def test_verls_command(tmp_path, capsys):
    settings = load_settings("qwen3-1.7b-gsm8k", output=str(tmp_path))
    tpo = overrides_of(verl_command(settings, tmp_path / "a", tmp_path / "b"))
    grpo = overrides_of(verl_command(dataclasses.replace(settings, method="grpo"), tmp_path / "a", tmp_path / "b"))
    assert tpo["actor_rollout_ref.rollout.n"] == tpo["data.train_batch_size"] == "16"
    assert tpo["actor_rollout_ref.actor.ppo_mini_batch_size"] == "16"  # prompts: one optimizer step per epoch
    assert tpo["actor_rollout_ref.model.lora_rank"] == "32"
    assert tpo["reward.custom_reward_function.path"] == "pkg://tpo_gym.llm.tasks"
    assert set(tpo) - set(grpo) == {
        "trainer.v1.trainer_mode",
        "actor_rollout_ref.actor.policy_loss.loss_mode",
    }
    assert {key for key in grpo if tpo[key] != grpo[key]} == {"trainer.experiment_name"}
    paper = verl_command(dataclasses.replace(settings, trl={"group_policy": "sum"}), tmp_path / "a", tmp_path / "b")
    assert overrides_of(paper)["+trainer.v1.tpo_sync.group_policy"] == "sum"
    words = ["train", "--config", "qwen3-1.7b-gsm8k", "--backend", "verl", "--output", str(tmp_path), "--dry-run"]
    assert main(words) == 0
    assert overrides_of(shlex.split(capsys.readouterr().out))["trainer.v1.trainer_mode"] == "tpo_sync"
    with pytest.raises(ValueError, match="method='gspo' is not offered on verl"):
        verl_command(dataclasses.replace(settings, method="gspo"), tmp_path, tmp_path)


# --- commands


def test_train_and_eval(start, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(["train", *TINY, "--model", start, "--steps", "2", "--output", str(run), "--method", "grpo"]) == 0
    log = json.loads((run / LOG).read_text())
    assert [row["step"] for row in log if "reward" in row] == [1, 2]
    assert {"rewards/reward/mean", "rewards/exact_match/mean"} <= log[0].keys()
    assert load_settings(run / "settings.yaml").method == "grpo"
    result = tmp_path / "eval.json"
    assert main(["eval", *TINY, "--model", str(run), "--samples", "2", "--output", str(result)]) == 0
    written = json.loads(result.read_text())
    assert (written["questions"], written["samples"], len(written["per_question"]["score"])) == (8, 2, 8)
    interval = written["exact_match"]
    assert 0 <= interval["low"] <= interval["mean"] <= interval["high"] <= 1
    assert '"exact_match"' in capsys.readouterr().out


def test_adapters_are_trained_and_evaluated(start, tmp_path):
    run = str(tmp_path / "run")
    assert main(["train", *TINY, "lora_rank=2", "--model", start, "--steps", "1", "--output", run]) == 0
    assert (tmp_path / "run" / "adapter_config.json").is_file()
    assert main(["eval", *TINY, "--model", run]) == 0


def test_a_study_goes_on_where_it_stopped(tmp_path, capsys):
    words = ["study", *TINY, "--output", str(tmp_path / "study"), "--steps", "1", "--samples", "1", *SMALL_MODEL]
    words += ["--warmup-steps", "2", "--warmup-batch-size", "4", "--chain-of-thought", "0.5"]
    small = ["--methods", "target_po", "--learning-rates", "1e-3", "--seeds", "1"]
    assert main([*words, *small]) == 0
    out = capsys.readouterr().out
    assert f"warming up {tmp_path / 'study' / 'start'}" in out
    assert "run 1 of 1: target_po-0.001-seed0" in out
    assert main([*words, *small, "--methods", "target_po", "grpo"]) == 0
    out = capsys.readouterr().out
    assert "run 2 of 2: grpo-0.001-seed0" in out
    assert "run 1 of 2" not in out
    assert "warming up" not in out
    report = json.loads((tmp_path / "study" / "study.json").read_text())
    assert set(report["chosen"]) == {"target_po", "grpo"}
    assert "| grpo | 0.001 |" in (tmp_path / "study" / "study.md").read_text()
    assert (tmp_path / "study" / "study.png").is_file() == (find_spec("matplotlib") is not None)
    assert main([*words, *small, "--set", "group_size=8"]) == 2
    assert "has other settings than these" in capsys.readouterr().err


def test_errors_are_shown(capsys):
    assert main(["train", "--task", "gsm8k"]) == 2
    assert "No model is given" in capsys.readouterr().err
    assert main(["eval", "--model", "m", "--task", "nonsense"]) == 2
    capsys.readouterr()
    assert main(["warmup", "--model", "m", "--task", "nonsense"]) == 2
    assert "Reasoning Gym has no generator 'nonsense'" in capsys.readouterr().err


# --- numbers


def test_the_interval_of_a_mean():
    values = [1.0] * 30 + [0.0] * 70
    mean, low, high = bootstrap(values)
    assert mean == pytest.approx(0.3)
    # The normal approximation: 0.3 -/+ 1.96 * sqrt(0.3 * 0.7 / 100)
    assert (low, high) == (pytest.approx(0.210, abs=0.02), pytest.approx(0.390, abs=0.02))
    assert bootstrap([0.5]) == (0.5, 0.5, 0.5)
    with pytest.raises(ValueError, match="no values"):
        bootstrap([])


def test_learning_rates_are_chosen_on_validation_and_reported_on_test(tmp_path):
    def write(folder, validation, test):
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(
            json.dumps({"validation_score": validation, "test_exact": test, "test_exact_greedy": test})
        )

    for method, rate, seed in (("grpo", r, s) for r in (1e-3, 1e-4) for s in (0, 1)):
        good = rate == 1e-4
        name = Run(method, rate, seed).name
        write(tmp_path / "runs" / name, [1.0, 0.5] if good else [0.5, 0.0], [0.25, 0.25 + seed] if good else [1, 1])
    (tmp_path / "start.json").write_text(json.dumps({"test_exact": [0.5], "test_exact_greedy": [0.0]}))
    report = make_report(tmp_path, ["grpo"], [1e-3, 1e-4], 2)
    assert report["chosen"]["grpo"]["learning_rate"] == 1e-4
    assert report["chosen"]["grpo"]["test"] == [0.25, 0.75]
    assert report["chosen"]["grpo"]["interval"]["mean"] == 0.5
    assert report["start"] == {"test": 0.5, "test_greedy": 0.0}


def test_every_method_gets_the_same_grid():
    runs = plan(["target_po", "grpo"], [1e-4, 1e-3], 3)
    cells = {
        method: {(run.learning_rate, run.seed) for run in runs if run.method == method}
        for method in ("target_po", "grpo")
    }
    assert len(set(runs)) == 12
    assert cells["target_po"] == cells["grpo"]
