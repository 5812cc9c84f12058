"""What TargetPOConfig and TargetPOTrainer refuse, and when they warn."""

import runpy
import warnings
from pathlib import Path

import pytest

from tpo_gym import llm

trl, peft, _ = (pytest.importorskip(name, reason="needs the extra llm") for name in ("trl", "peft", "datasets"))

WORKER = Path(__file__).with_name("trl_worker.py")


@pytest.fixture(scope="module")
def worker():
    return runpy.run_path(str(WORKER))


def config(tmp_path, **settings):
    return llm.TargetPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to="none", **settings)


BAD = {
    "more generations": (
        {"steps_per_generation": 4, "gradient_accumulation_steps": 2},
        "steps_per_generation is 4 and gradient_accumulation_steps 2.*set num_iterations",
    ),
    "generation_batch_size": (
        {"generation_batch_size": 32, "gradient_accumulation_steps": 2},
        "steps_per_generation is 4 and gradient_accumulation_steps 2",
    ),
    "truncated": ({"mask_truncated_completions": True}, "mask_truncated_completions=True.*log-probability 0"),
    "vllm": (
        {"use_vllm": True, "vllm_importance_sampling_correction": True},
        "vllm_importance_sampling_correction=True.*Set it to False",
    ),
    "top entropy": ({"top_entropy_quantile": 0.2}, "top_entropy_quantile=0.2 has no effect.*Leave it at 1.0"),
    "off-policy": ({"off_policy_mask_threshold": 0.5}, "off_policy_mask_threshold=0.5 has no effect.*siblings"),
    "loss": ({"loss_type": "grpo"}, "loss_type='grpo' has no effect.*choose `method`.*Leave it at 'dapo'"),
    "epsilon": ({"epsilon": 0.1}, "epsilon=0.1 has no effect.*`clip_range`"),
    "scale": ({"scale_rewards": "none"}, "scale_rewards='none' has no effect.*`std_floor`"),
    "bias": ({"use_bias_correction_kl": True}, "use_bias_correction_kl=True has no effect"),
    "entropy": ({"entropy_coef": 0.01}, "entropy_coef=0.01 has no effect"),
    "method": ({"method": "tpo"}, "Unknown method 'tpo'"),
    "policy": ({"group_policy": "max"}, "Unknown group_policy 'max'"),
    "eta": ({"eta": -1.0}, "eta must be positive, got -1.0"),
    "normalization": ({"kl_normalization": "batch"}, "Unknown kl_normalization 'batch'"),
    "groups": ({"num_generations": 3}, "must be divisible by num_generations"),
}


@pytest.mark.parametrize(("settings", "message"), BAD.values(), ids=BAD.keys())
def test_settings_that_would_break_a_group_or_do_nothing(tmp_path, settings, message):
    with pytest.raises(ValueError, match=f"(?s){message}"):
        config(tmp_path, **settings)


def test_the_defaults_are_accepted(tmp_path):
    accepted = config(tmp_path)
    assert (accepted.method, accepted.group_policy, accepted.learning_rate) == ("target_po", "ratio", 1e-5)
    assert accepted.weight_options().eta == 1.0


def test_settings_from_a_command_line(tmp_path):
    arguments = (
        f"--output_dir {tmp_path} --method grpo --group_policy sum --clip_range 0.1 --eta 0.5 --bf16 False --use_cpu"
    )
    (parsed,) = trl.TrlParser(llm.TargetPOConfig).parse_args_and_config(arguments.split())
    assert (parsed.method, parsed.group_policy, parsed.clip_range, parsed.eta) == ("grpo", "sum", 0.1, 0.5)


def test_another_configuration(worker, tmp_path):
    arguments = trl.GRPOConfig(output_dir=str(tmp_path), bf16=False, use_cpu=True, report_to="none")
    with pytest.raises(TypeError, match="args must be a TargetPOConfig, got GRPOConfig"):
        llm.TargetPOTrainer(worker["model"](), worker["reward"], arguments)


def test_dropout(worker, tmp_path):
    adapter = peft.LoraConfig(r=2, lora_dropout=0.1, target_modules=["q_proj"])
    with pytest.raises(ValueError, match=r"lora_dropout.* has dropout 0.1.*Set lora_dropout=0.0"):
        worker["run"](tmp_path, lora=adapter)
    steps, _ = worker["run"](tmp_path, lora=adapter, disable_dropout=True, steps=1)
    assert len(steps) == 1
    noisy = worker["model"]()
    noisy.model.layers[1].self_attn.attention_dropout = 0.2
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn has dropout 0.2"):
        worker["run"](tmp_path, source=noisy)


@pytest.mark.parametrize(("value", "named"), [(float("nan"), "nan"), (None, "nan"), (float("inf"), "inf")])
def test_scores_that_are_not_finite(worker, tmp_path, value, named):
    def broken(completions, **_):
        return [value if row == 11 else float(len(text)) for row, text in enumerate(completions)]

    with pytest.raises(ValueError, match=rf"'broken' gave {named}.*for completion 3 of group 1"):
        worker["run"](tmp_path, reward_funcs=broken)


def test_a_group_without_any_score(worker, tmp_path):
    def partial(completions, **_):
        return [1.0] * 8 + [None] * 8

    with pytest.raises(ValueError, match="No reward function gave group 1 a score"):
        worker["run"](tmp_path, reward_funcs=partial)


def test_a_function_may_apply_to_some_prompts_only(worker, tmp_path):
    def second_group(completions, **_):
        return [None] * 8 + [2.0] * 8

    _, trainer = worker["run"](tmp_path, reward_funcs=[worker["reward"], second_group], steps=1)
    own = worker["reward"](list(trainer._logs["completion"]))
    assert trainer._rollout.scores.tolist() == own[:8] + [value + 2.0 for value in own[8:]]


def test_rewards_are_weighted(worker, tmp_path):
    def two(completions, **_):
        return [2.0] * len(completions)

    _, trainer = worker["run"](tmp_path, reward_funcs=[worker["reward"], two], reward_weights=[1.0, 0.5], steps=1)
    texts = list(trainer._logs["completion"])
    assert trainer._rollout.scores.tolist() == [value + 1.0 for value in worker["reward"](texts)]


def test_saturation_is_told_once(worker, tmp_path):
    """A temperature so high that the target hardly differs from p_old stands for candidates tens of nats apart."""
    saturated = {"group_policy": "sum", "eta": 1e3, "saturation_patience": 2, "steps": 4}
    with pytest.warns(UserWarning, match=r"TV\(q, p_old\) has stayed below 0.01 for 2 rollout") as caught:
        worker["run"](tmp_path, **saturated)
    assert sum("TV(q, p_old)" in str(warning.message) for warning in caught) == 1
    for quiet in ({"saturation_patience": 0}, {"eta": 1.0, "group_policy": "ratio"}):
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=r"TV\(q, p_old\)")
            worker["run"](tmp_path, **{**saturated, **quiet})
