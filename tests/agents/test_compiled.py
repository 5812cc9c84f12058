"""A compiled loss gives the same training; where it cannot be compiled, training goes on."""

import gymnasium as gym
import pytest
import torch

from tpo_gym.agents import GRPO, TPO

DEVICES = [
    "cpu",
    pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")),
]


def make(cls, case, device):
    if case == "bandit":
        env = gym.make_vec("tpo_gym/ContextualBandit-v0", num_envs=20, device=device)
        return cls("MlpPolicy", env, candidates="all_actions", seed=0, device=device)
    env = gym.make_vec("tpo_gym/TokenReversal-v0", num_envs=20, sequence_length=3, reward="terminal", device=device)
    policy_kwargs = dict(optimizer_class=torch.optim.SGD)  # Muon's bfloat16 would blow up the last digit
    return cls("TransformerPolicy", env, group_size=4, seed=0, device=device, policy_kwargs=policy_kwargs)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("case", ["bandit", "sequences"])
@pytest.mark.parametrize("cls", [TPO, GRPO])
def test_a_compiled_loss_trains_alike(cls, case, device):
    plain = make(cls, case, device)
    plain.policy.fixed_shapes = True
    interactions = 3 * plain.env.num_envs * plain._group_env.env.horizon
    plain.learn(interactions)
    compiled = make(cls, case, device)
    compiled.compile(**({"backend": "aot_eager"} if device == "cpu" else {}))
    compiled.learn(interactions)
    assert compiled._compiled_loss._compiled is not None
    for a, b in zip(plain.policy.parameters(), compiled.policy.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_where_compilation_fails_training_goes_on():
    def broken(graph, inputs):
        raise RuntimeError("no compiler here")

    plain = make(TPO, "bandit", "cpu")
    plain.learn(40)
    compiled = make(TPO, "bandit", "cpu")
    compiled.compile(backend=broken)
    with pytest.warns(UserWarning, match="torch.compile failed .*goes on without it"):
        compiled.learn(40)
    for a, b in zip(plain.policy.parameters(), compiled.policy.parameters(), strict=True):
        assert torch.equal(a, b)


def test_a_compiled_model_is_saved_as_any_other(tmp_path):
    model = make(TPO, "bandit", "cpu")
    model.compile(backend="eager")
    model.learn(20)
    model.save(tmp_path / "model")
    loaded = TPO.load(tmp_path / "model")
    assert loaded._compiled_loss is None
