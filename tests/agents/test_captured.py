"""Updates that are recorded and replayed, or compiled, are those that would have been computed."""

import copy
import warnings

import gymnasium as gym
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback, CallbackList, ConvertCallback, ProgressBarCallback
from stable_baselines3.common.logger import KVWriter, Logger
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F

from tpo_gym import train_seeds
from tpo_gym.agents import (
    DG,
    GRPO,
    REINFORCE,
    TPO,
    ActorPolicy,
    CrossEntropy,
    GroupPG,
    MuonAdamW,
    captured,
    stacked,
)
from tpo_gym.agents.callbacks import ResumeCallback, listens
from tpo_gym.agents.captured import Captured
from tpo_gym.agents.captured_step import CapturedStep
from tpo_gym.agents.decompositions import FASTER_COMPILED
from tpo_gym.agents.resume_state import capture, completed, restore
from tpo_gym.agents.stack_observer import StackObserver
from tpo_gym.agents.stackable import repeats
from tpo_gym.draws import drawn

CALLED = {"backend": "eager"}
"""The recorded operations are called by torch.compile's simplest backend, one by one."""


@pytest.fixture(autouse=True)
def no_failure():
    torch.compiler.reset()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="torch.compile failed")
        yield


class Silent(BaseCallback):
    def _on_step(self):
        return True


class Looking(ActorPolicy):
    """Looks at its numbers, which a recording cannot repeat."""

    def all_log_probs(self, obs, **kwargs):
        log_probs = super().all_log_probs(obs, **kwargs)
        return log_probs * 1.0 if float(log_probs.detach().sum()) < 0 else log_probs


Looking.__module__ = "tpo_gym.agents.policies"  # as if it were one of ours


class Annealed(TPO):
    """Somebody's own algorithm, whose objective changes."""

    def freeze(self, rollout):
        self.eta = 1.0 + 0.1 * self._iteration
        return super().freeze(rollout)


def make(cls=TPO, policy="MlpPolicy", candidates="all_actions", device="cpu", options=None, **kwargs):
    env = gym.make_vec("tpo_gym/ContextualBandit-v0", num_envs=6, num_contexts=6, num_actions=4, device=device)
    model = cls(policy, env, candidates=candidates, seed=0, device=device, **{"learning_rate": 0.05, **kwargs})
    if options is not None:
        model.compile(**options)
    return model


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.policy.parameters()])


def trained_alike(make, learn):
    """A plain model and one whose operations are called, one after the other: both seed the program's generators."""
    models = []
    for options in (None, CALLED):
        models.append(make(options))
        learn(models[-1])
    return models


class Keeping(KVWriter):
    """Keeps what is logged, without times."""

    def __init__(self, lines):
        self.lines = lines

    def write(self, key_values, key_excluded, step=0):
        self.lines.append({key: value for key, value in key_values.items() if not key.startswith("time/")})

    def close(self):
        pass


def is_replayed(model):
    return model._recorded is not None and model._recorded._whole._compiled is not None


# A function.


def test_a_replay_computes_with_the_numbers_that_are_there(device):
    weight = torch.ones(3, device=device, requires_grad=True)
    count = torch.zeros((), device=device)
    calls = []

    def function(x):
        calls.append(1)
        count.add_(1)
        noise = drawn(lambda: torch.rand(3, device=device))
        (gradient,) = torch.autograd.grad(((weight * x + noise) ** 2).sum(), weight)
        return {"gradient": gradient.contiguous(), "rest": (noise.clone(), [count.clone(), None])}

    replay, noises = Captured(function), []
    for i in range(4):
        x = torch.randn(3, device=device)
        result = replay(x)
        noise, (counted, nothing) = result["rest"]
        torch.testing.assert_close(result["gradient"], 2 * (weight * x + noise).detach() * x)
        assert float(counted) == float(count) == i + 1
        assert nothing is None
        noises.append(noise)
        with torch.no_grad():
            weight.sub_(0.1)
    assert len(calls) == 1
    assert len({float(noise[0]) for noise in noises}) == 4


@pytest.mark.parametrize("approximate", ["tanh", "none"])
def test_what_is_compiled_instead_of_gelu_is_the_same_function(approximate):
    def function(x):
        y = F.gelu(x, approximate=approximate)
        return y, torch.autograd.grad((y * x.cos()).sum(), x)[0]

    x = torch.linspace(-30, 30, 601, dtype=torch.float64).requires_grad_()
    graph = make_fx(function, FASTER_COMPILED)(x)
    for got, wanted in zip(graph(x), function(x), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-14)
    assert ("gelu" in graph.code) == (approximate == "none")


def test_what_is_compiled_instead_of_rows_added_up_and_taken_is_the_same_function():
    images = torch.randint(256, (7, 2, 3), dtype=torch.uint8)
    floats = torch.rand(7, 3)

    def function(table, rows, some):
        taken = F.embedding(rows, table).sin()
        (gradient,) = torch.autograd.grad(taken.square().sum(), table)
        return gradient, images.index_select(0, some), floats.index_select(0, some), images.index_select(1, rows[0])

    table = torch.rand(5, 4, dtype=torch.float64, requires_grad=True)
    inputs = table, torch.tensor([[0, 1], [1, 1], [0, 1]]), torch.tensor([6, 0, 0])
    graph = make_fx(function, FASTER_COMPILED)(*inputs)
    others = table, torch.tensor([[1, 1], [0, 0], [1, 0]]), torch.tensor([3, 5, 3])
    results = zip(graph(*others), function(*others), strict=True)
    assert all(torch.equal(got, wanted) for got, wanted in results)
    assert (graph.code.count("tpo_gym.sum_rows"), graph.code.count("tpo_gym.take_rows")) == (1, 1)


def test_where_the_compiler_fails_the_recorded_operations_are_called(monkeypatch):
    def broken(*_):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch._inductor, "compile", broken)
    replay = Captured(lambda x: (x * 2).sin(), {})
    x = torch.rand(3)
    replay(x)
    with pytest.warns(UserWarning, match="torch.compile failed .*no compiler.*goes on without it"):
        assert torch.equal(replay(-x), (-2 * x).sin())
    assert torch.equal(replay(x), (2 * x).sin())


@pytest.mark.slow
def test_the_default_compiler_computes_the_same_function():
    table = torch.rand(5, 4, requires_grad=True)
    images = torch.randint(256, (7, 12), dtype=torch.uint8)

    def function(rows):
        y = F.gelu(F.embedding(rows, table), approximate="tanh")
        (gradient,) = torch.autograd.grad(y.square().sum(), table)
        return gradient, images.index_select(0, rows).float() / 255

    replay = Captured(function, {})
    for _ in range(3):
        rows = torch.randint(5, (9,))
        for got, wanted in zip(replay(rows), function(rows), strict=True):
            torch.testing.assert_close(got, wanted)
    assert replay._compiled is not None


def test_random_numbers_are_those_that_would_have_been_drawn():
    def function():
        return drawn(lambda: torch.rand(2)) + drawn(lambda: torch.randint(10, (2,)))

    torch.manual_seed(0)
    wanted = [function() for _ in range(3)]
    replay = Captured(function)
    torch.manual_seed(0)
    assert all(torch.equal(replay(), values) for values in wanted)


def test_one_hot_is_recorded_although_it_looks():
    numbers = torch.tensor([2, 0])
    replay = Captured(lambda: F.one_hot(numbers, 3))
    for _ in range(2):
        assert torch.equal(replay(), F.one_hot(numbers, 3))
        numbers.copy_(torch.tensor([1, 1]))


@pytest.mark.parametrize("undeclared", [True, False])
def test_what_cannot_be_recorded_is_called(undeclared):
    count, generator = torch.zeros(()), torch.Generator().manual_seed(0)

    def function():
        count.add_(1)
        noise = drawn(lambda: torch.rand((), generator=generator))
        if undeclared:
            return noise + count + 0 * torch.rand(())
        return noise + float(noise + count)

    def keep():
        before, state = count.clone(), generator.get_state()
        return lambda: (count.copy_(before), generator.set_state(state))

    wanted = [function() for _ in range(3)]
    count.zero_()
    generator.manual_seed(0)
    replay = Captured(function, keep=keep)
    assert all(torch.equal(replay(), value) for value in wanted)
    told = Captured(function, CALLED, keep)
    with pytest.warns(UserWarning, match="torch.compile failed .*goes on without it"):
        told()


# A single run.


@pytest.mark.parametrize("n_epochs", [1, 3])
@pytest.mark.parametrize(
    ("cls", "candidates"),
    [
        *((TPO, "all_actions"), (TPO, "exact"), (GRPO, "all_actions"), (DG, "exact")),
        *((CrossEntropy, "all_actions"), (GroupPG, "all_actions"), (REINFORCE, "all_actions")),
    ],
)
def test_a_replayed_run_has_the_same_weights(cls, candidates, n_epochs, device):
    plain, replayed = trained_alike(
        lambda options: make(
            cls, candidates=candidates, n_epochs=n_epochs, device=device, max_grad_norm=0.1, options=options
        ),
        lambda model: model.learn(30).learn(24, reset_num_timesteps=False),
    )
    assert is_replayed(replayed)
    assert torch.equal(weights(plain), weights(replayed))
    assert plain.num_timesteps == replayed.num_timesteps == 54
    assert list(plain.ep_info_buffer)[-1]["r"] == list(replayed.ep_info_buffer)[-1]["r"]
    assert torch.equal(plain.rollout.scores, replayed.rollout.scores)


def test_images_and_an_entropy_bonus():
    def make(options):
        arguments = dict(n_contexts=8, n_epochs=2, ent_coef=0.1, seed=0, device="cpu")
        model = TPO("MlpPolicy", "tpo_gym/MNISTBandit-v0", **arguments)
        if options is not None:
            model.compile(**options)
        return model

    plain, replayed = trained_alike(make, lambda model: model.learn(48))
    assert is_replayed(replayed)
    assert torch.equal(weights(plain), weights(replayed))


@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (TPO, {"candidates": "episodes", "group_size": 4}),
        (TPO, {"candidates": "actions", "group_size": 4, "reward": "bag_of_tokens"}),
        pytest.param(GRPO, {"candidates": "episodes", "group_size": 4}, marks=pytest.mark.slow),
        pytest.param(DG, {}, marks=pytest.mark.slow),
    ],
)
def test_sequences_of_a_transformer(cls, kwargs, device):
    kwargs = {"reward": "terminal", **kwargs}

    def make(options):
        task = dict(num_envs=8, sequence_length=3, reward=kwargs["reward"], device=device)
        env = gym.make_vec("tpo_gym/TokenReversal-v0", **task)
        arguments = {name: value for name, value in kwargs.items() if name != "reward"}
        model = cls("TransformerPolicy", env, seed=0, device=device, n_epochs=2, **arguments)
        model.policy.fixed_shapes = True
        if options is not None:
            model.compile(**options)
        return model

    plain, replayed = trained_alike(make, lambda model: model.learn(8 * 3 * 5))
    assert is_replayed(replayed)
    assert replayed._recorded.step._captured._compiled is not None
    assert plain.num_timesteps == replayed.num_timesteps == 8 * 3 * 5
    assert torch.equal(weights(plain), weights(replayed))


def optimized(seed, **kwargs):
    torch.manual_seed(seed)
    params = [torch.randn(shape, requires_grad=True) for shape in [(5, 3), (4, 6), (7,), (2, 3, 4), (3, 3)]]
    return params, MuonAdamW(params, lr=0.05, **kwargs)


@pytest.mark.parametrize("options", [CALLED, pytest.param({}, marks=pytest.mark.slow)])
@pytest.mark.parametrize("kwargs", [{}, {"weight_decay": 0.1}])
def test_recorded_steps_of_an_optimizer(kwargs, options):
    """Also with another learning rate each time, other states, other settings, and a gradient that is missing."""
    (wanted, plain), (got, optimizer) = optimized(0, **kwargs), optimized(0, **kwargs)
    step = CapturedStep(optimizer, options, lambda: pytest.fail)
    recordings = []
    for i in range(12):
        if i == 4:  # another training
            step.begin()
        if i == 6:
            for each in (plain, optimizer):
                each.load_state_dict(copy.deepcopy(each.state_dict()))
            step.begin()
        if i == 8:
            for each in (plain, optimizer):
                each.param_groups[0]["momentum"] = 0.5
            step.begin()
        for p, q, j in zip(wanted, got, range(5), strict=True):
            p.grad = None if j == 4 else torch.randn_like(p)
            q.grad = None if p.grad is None else p.grad.clone()
        for each in (plain, optimizer):
            for group in each.param_groups:
                group["lr"] = 0.05 / (1 + i)
        plain.step()
        step()
        recordings.append(step._captured)
        for p, q in zip(wanted, got, strict=True):
            torch.testing.assert_close(p, q, rtol=0, atol=0 if options is CALLED else 1e-5)
    first, second, third = recordings[0], recordings[6], recordings[8]
    assert recordings == [first] * 6 + [second] * 2 + [third] * 4
    assert all(recording._compiled is not None for recording in {first, third})


def test_an_optimizer_that_somebody_watches_steps_itself():
    _, optimizer = optimized(0)
    step = CapturedStep(optimizer, CALLED, lambda: pytest.fail)
    seen = []
    for watched in (False, True, False):
        step.begin()
        if watched:
            hook = optimizer.register_step_post_hook(lambda *_: seen.append("step"))
            step.begin()
        for _ in range(3):
            for p in (p for group in optimizer.param_groups for p in group["params"]):
                p.grad = torch.ones_like(p)
            step()
        assert (step._captured is None) == watched
        if watched:
            hook.remove()
    assert seen == ["step"] * 3


def test_recorded_once_until_something_is_set():
    kept = []

    def learn(model):
        for eta in (1.0, 1.0, 0.1):
            model.eta = eta
            model.learn(24)
            kept.append(model._recorded)

    plain, replayed = trained_alike(lambda options: make(options=options), learn)
    assert kept[3] is kept[4] is not kept[5]
    assert torch.equal(weights(plain), weights(replayed))


def test_outside_of_learn_nothing_is_known_beforehand():
    def learn(model):
        model.learn(24)
        callback = ConvertCallback(None)
        callback.init_callback(model)
        for _ in range(3):
            model.collect_rollouts(callback)
            with torch.no_grad():
                model.policy.action_net.bias.add_(0.1)
            model.train()

    plain, replayed = trained_alike(lambda options: make(options=options), learn)
    assert is_replayed(replayed)
    assert torch.equal(weights(plain), weights(replayed))


def test_logs_are_the_same():
    written = {}

    def learn(model):
        model.set_logger(Logger(None, [Keeping(written.setdefault(model._compile_options is None, []))]))
        model.learn(30)

    _, replayed = trained_alike(lambda options: make(options=options), learn)
    assert is_replayed(replayed)
    assert len(written[True]) == 5
    assert written[True] == written[False]


def test_a_replayed_run_is_resumed(tmp_path):
    whole = make(options=CALLED).learn(60)
    model = make(options=CALLED)
    model.learn(30, ResumeCallback(tmp_path / "checkpoints", every=2))
    assert is_replayed(model)
    assert sorted(file.name for file in (tmp_path / "checkpoints").iterdir())[-1] == "checkpoint_30_steps.zip"
    model.save(tmp_path / "model")
    loaded = TPO.load(tmp_path / "model", env=make().env)
    loaded.compile(**CALLED)
    loaded.learn(30, reset_num_timesteps=False)
    assert is_replayed(loaded)
    assert torch.equal(weights(loaded), weights(whole))


def test_not_where_updates_may_differ():
    hooked = make(options=CALLED)
    hooked.policy.mlp.register_forward_hook(lambda *_: None)
    models = [make(eta=lambda left: 1 + left, options=CALLED), make(Annealed, options=CALLED), hooked]
    for model in models:
        assert not repeats(model)
        model.learn(18)
        assert model._recorded is None
    assert repeats(make())
    watched = make(options=CALLED)
    watched.learn(18, Silent())
    assert watched._recorded is None


def test_where_recording_fails_training_goes_on_alike():
    with pytest.warns(UserWarning, match="torch.compile failed"):
        plain, looking = trained_alike(lambda options: make(policy=Looking, options=options), lambda m: m.learn(30))
    assert torch.equal(weights(plain), weights(looking))


def test_who_listens(tmp_path):
    class Own(ResumeCallback):
        pass

    passive = [ConvertCallback(None), ProgressBarCallback(), ResumeCallback(tmp_path)]
    assert not listens(CallbackList(passive))
    assert listens(CallbackList([*passive, Silent()]))
    assert listens(ConvertCallback(lambda *_: True))
    assert listens(Own(tmp_path))


def test_a_state_without_other_generators_is_completed():
    model = make()
    model.learn(12)
    assert completed(capture(model, torch_alone=True))["random"].keys() == capture(model)["random"].keys()
    state = completed(capture(model, torch_alone=True))
    numbers = torch.rand(3)
    restore(model, state)
    assert torch.equal(torch.rand(3), numbers)


@pytest.mark.slow
@pytest.mark.parametrize("n_epochs", [1, 2])
def test_the_default_compiler_trains_alike(n_epochs, device):
    plain, compiled = trained_alike(
        lambda options: make(n_epochs=n_epochs, device=device, options=None if options is None else {}),
        lambda model: model.learn(60),
    )
    assert is_replayed(compiled)
    torch.testing.assert_close(weights(plain), weights(compiled), rtol=1e-4, atol=1e-5)


# Stacked seeds.


class Noting(StackObserver):
    """Notes gradients, and may end the training."""

    def __init__(self, last=10**9):
        self.gradients, self.batches, self.last, self.recorded = [], 0, last, False

    def on_rollout_end(self, stack):
        self.batches += 1
        self.recorded = stack._whole is not None and stack._whole._graph is not None

    def before_step(self, stack, gradients):
        self.gradients.append(torch.cat([value.flatten() for value in gradients.values()]).clone())

    def goes_on(self):
        return self.batches < self.last


def train(cls=TPO, observer=None, env="tpo_gym/ContextualBandit-v0", device="cpu", **kwargs):
    env_kwargs = {"num_envs": 6, "device": device}
    if env == "tpo_gym/ContextualBandit-v0":
        env_kwargs |= {"num_contexts": 6, "num_actions": 4}
    arguments = {"candidates": "all_actions", "learning_rate": 0.05, "backend": "stacked", "total_timesteps": 42}
    if "Token" in env:
        env_kwargs |= {"num_envs": 8, "sequence_length": 3, "reward": "terminal"}
        arguments |= {"group_size": 4, "total_timesteps": 8 * 3 * 4}
    arguments |= {"env_kwargs": env_kwargs, "device": device, **kwargs}
    return train_seeds(cls, env, range(3), observer=observer, **arguments)


@pytest.mark.parametrize("n_epochs", [1, 3])
@pytest.mark.parametrize(
    ("cls", "kwargs"),
    [
        (TPO, {}),
        (TPO, {"candidates": "exact", "policy": "TabularPolicy"}),
        (TPO, {"env": "tpo_gym/Bandit-v0", "policy": "TabularPolicy"}),  # one group of all contexts
        (GRPO, {"max_grad_norm": 0.1}),
        (CrossEntropy, {"policy_kwargs": {"optimizer_class": torch.optim.SGD}}),
        (TPO, {"env": "tpo_gym/TokenReversal-v0", "policy": "TransformerPolicy", "candidates": "episodes"}),
    ],
)
def test_replayed_seeds_have_the_same_weights(cls, kwargs, n_epochs, device, monkeypatch):
    plain, noted = Noting(), Noting()
    wanted = train(cls, plain, device=device, n_epochs=n_epochs, **kwargs)
    monkeypatch.setattr(stacked, "WORTH_RECORDING", 0)
    replayed = train(cls, noted, device=device, n_epochs=n_epochs, **kwargs)
    assert (plain.recorded, noted.recorded) == (False, True)
    for a, b in zip(wanted, replayed, strict=True):
        assert torch.equal(weights(a), weights(b))
        assert torch.equal(a.rollout.scores, b.rollout.scores)
        assert list(a.ep_info_buffer)[-1]["r"] == list(b.ep_info_buffer)[-1]["r"]
    assert all(torch.equal(a, b) for a, b in zip(plain.gradients, noted.gradients, strict=True))


def test_replayed_seeds_go_on_and_stop_as_others(monkeypatch):
    results = []
    for worth in (10**9, 0):
        monkeypatch.setattr(stacked, "WORTH_RECORDING", worth)
        models = train(observer=Noting(last=4))
        assert [model.num_timesteps for model in models] == [30] * 3  # the fifth batch was collected, not learned from
        for model in models:
            model.learn(12, reset_num_timesteps=False)
        results.append(torch.stack([weights(model) for model in models]))
    assert torch.equal(*results)


@pytest.mark.parametrize("progress_bar", [False, True])
def test_compiled_seeds(progress_bar):
    noted = Noting()
    wanted = train()
    compiled = train(observer=noted, compile=CALLED, progress_bar=progress_bar)
    assert noted.recorded
    for a, b in zip(wanted, compiled, strict=True):
        assert torch.equal(weights(a), weights(b))


def test_seeds_that_cannot_be_recorded_learn_alike(monkeypatch):
    def broken(function):
        def record(*args):
            function(*args)
            raise RuntimeError("too late")

        return record

    wanted = train()
    monkeypatch.setattr(stacked, "WORTH_RECORDING", 0)
    monkeypatch.setattr(captured, "make_fx", broken)
    noted = Noting()
    for a, b in zip(wanted, train(observer=noted), strict=True):
        assert torch.equal(weights(a), weights(b))
    assert not noted.recorded


@pytest.mark.slow
def test_compiled_seeds_in_workers():
    calm = {"policy_kwargs": {"optimizer_kwargs": {"eps": 1e-3}}}  # where rounding does not make whole steps
    wanted = train(backend="workers", n_workers=2, **calm)
    for model in train(backend="workers", n_workers=2, compile=CALLED, **calm):
        assert model._compile_options is None  # files do not hold it
    for a, b in zip(wanted, train(backend="workers", n_workers=2, compile=CALLED, **calm), strict=True):
        assert torch.equal(weights(a), weights(b))
    for a, b in zip(wanted, train(n_workers=2, compile={}, **calm), strict=True):
        torch.testing.assert_close(weights(a), weights(b), rtol=1e-4, atol=1e-5)
