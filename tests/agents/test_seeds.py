"""Many seeds at once: each is what it would be alone, whichever way they are trained."""

import functools
import os

import gymnasium as gym
import numpy as np
import pytest
import torch
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.torch_layers import BaseFeaturesExtractor
from torch import nn

import tpo_gym
from tpo_gym.agents import DG, GRPO, TPO, CrossEntropy, NormalizedStep, ResumeCallback, TransformerPolicy, train_seeds
from tpo_gym.agents.seed_workers import Recipe
from tpo_gym.agents.seeds import _choose
from tpo_gym.agents.stack import Networks
from tpo_gym.agents.stack_observer import StackObserver

SEEDS = [3, 1]
SGD = {"optimizer_class": torch.optim.SGD}
TOKENS = {"d_model": 16, "n_heads": 2}
SEQUENCES = {"group_size": 4, "policy_kwargs": {**TOKENS, **SGD}}


def tokens(reward="terminal", num_envs=24, device="cpu", vocab_size=2):
    return gym.make_vec(
        "tpo_gym/TokenReversal-v0",
        num_envs=num_envs,
        sequence_length=3,
        vocab_size=vocab_size,
        reward=reward,
        device=device,
    )


def labelled(num_envs=10, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    features, labels = torch.rand(40, 6, generator=generator), torch.arange(40) % 3
    return gym.make_vec(
        "tpo_gym/ClassificationBandit-v0", num_envs=num_envs, features=features, labels=labels, device=device
    )


def contextual(num_envs=10, device="cpu", num_contexts=10):
    return gym.make_vec(
        "tpo_gym/ContextualBandit-v0", num_envs=num_envs, num_contexts=num_contexts, num_actions=4, device=device
    )


def bandit(num_envs=10, device="cpu"):
    return gym.make_vec("tpo_gym/Bandit-v0", num_envs=num_envs, num_actions=5, device=device)


# algorithm, policy, environment, arguments, interactions per update
CASES = {
    "all actions": (TPO, "MlpPolicy", labelled, {}, 10),
    "all actions, batch statistics": (GRPO, "MlpPolicy", labelled, {}, 10),
    "all actions, batch baseline": (DG, "MlpPolicy", labelled, {"baseline": "batch", "n_epochs": 2}, 10),
    "one context": (TPO, "TabularPolicy", bandit, {"learning_rate": 0.1}, 10),
    "one-hot contexts": (TPO, "MlpPolicy", contextual, {"ent_coef": 0.1}, 10),
    "all actions, labels": (CrossEntropy, "MlpPolicy", labelled, {}, 10),
    "exact, labels": (CrossEntropy, "MlpPolicy", contextual, {"candidates": "exact"}, 10),
    "exact": (
        TPO,
        "TabularPolicy",
        contextual,
        {"candidates": "exact", "policy_kwargs": {"init_std": 1.0, "optimizer_class": NormalizedStep}},
        10,
    ),
    "exact, batch baseline": (GRPO, "MlpPolicy", contextual, {"candidates": "exact", "baseline": "batch"}, 10),
    "terminal": (
        TPO,
        "TransformerPolicy",
        tokens,
        SEQUENCES,
        72,
    ),
    "terminal, ratio": (
        TPO,
        "TransformerPolicy",
        tokens,
        {
            "group_size": 4,
            "anchor": "ratio",
            "max_grad_norm": 0.1,
            "policy_kwargs": {**TOKENS, **SGD},
            "learning_rate": 0.1,
        },
        72,
    ),
    "terminal, GRPO": (
        GRPO,
        "TransformerPolicy",
        tokens,
        SEQUENCES,
        72,
    ),
    "token level": (
        TPO,
        "TransformerPolicy",
        functools.partial(tokens, "bag_of_tokens", 6, vocab_size=4),
        SEQUENCES,
        18,
    ),
    "token level, GRPO": (
        GRPO,
        "TransformerPolicy",
        functools.partial(tokens, "bag_of_tokens", 6, vocab_size=4),
        SEQUENCES,
        18,
    ),
    "DG": (DG, "TransformerPolicy", tokens, {"policy_kwargs": {**TOKENS, **SGD}}, 72),
    "Muon": (TPO, "TransformerPolicy", tokens, {"group_size": 4, "policy_kwargs": TOKENS}, 72),
}
# Muon and Adam make steps of full size also where a gradient is rounding alone.
TOLERANCE = {"Muon": 5e-3}


def single(case, seed, updates=3, device="cpu", **kwargs):
    cls, policy, env, arguments, per_update = CASES[case]
    model = cls(policy, env(device=device), seed=seed, device=device, **arguments, **kwargs)
    return model.learn(updates * per_update)


def many(case, backend, updates=3, device="cpu", seeds=SEEDS, **kwargs):
    cls, policy, env, arguments, per_update = CASES[case]
    return train_seeds(
        cls,
        env,
        seeds,
        total_timesteps=updates * per_update,
        policy=policy,
        env_kwargs={"device": device},
        device=device,
        backend=backend,
        **arguments,
        **kwargs,
    )


def weights(model):
    return torch.cat([p.detach().flatten() for p in model.policy.parameters()])


@pytest.mark.parametrize("case", CASES)
def test_stacked_seeds_equal_single_runs(case, device):
    models = many(case, "stacked", device=device)
    untrained = weights(CASES[case][0](CASES[case][1], CASES[case][2](), seed=SEEDS[0], **CASES[case][3]))
    assert (weights(models[0]).cpu() - untrained).abs().max() > 1e-4
    for model, seed in zip(models, SEEDS, strict=True):
        alone = single(case, seed, device=device)
        tolerance = TOLERANCE.get(case, 2e-6)
        torch.testing.assert_close(weights(model), weights(alone), rtol=10 * tolerance, atol=tolerance)
        assert model.seed == seed
        assert (model.num_timesteps, model._n_updates) == (alone.num_timesteps, alone._n_updates)
        assert [e["r"] for e in model.ep_info_buffer] == pytest.approx([e["r"] for e in alone.ep_info_buffer])
        assert (model.rollout.scores - alone.rollout.scores).abs().max() < 1e-4
        assert torch.equal(model.env.batched.observations(), alone.env.batched.observations())
    assert (weights(models[0]) - weights(models[1])).abs().max() > 1e-3


@pytest.mark.parametrize("case", ["all actions", "terminal", "Muon", "exact"])
def test_stacked_seeds_go_on_after_training_and_after_loading(case, tmp_path):
    models = many(case, "stacked", updates=2)
    alone = single(case, SEEDS[0], updates=3)
    models[0].save(tmp_path / "model")
    per_update = CASES[case][4]
    loaded = CASES[case][0].load(tmp_path / "model", env=CASES[case][2]())
    for model in (models[0], loaded):
        model.learn(per_update, reset_num_timesteps=False)
        assert model.num_timesteps == alone.num_timesteps == 3 * per_update
        tolerance = TOLERANCE.get(case, 2e-6)
        torch.testing.assert_close(weights(model), weights(alone), rtol=10 * tolerance, atol=tolerance)
    assert torch.equal(weights(models[0]), weights(loaded))


def test_a_saved_stacked_model_holds_its_own_weights_alone(tmp_path):
    few, more = many("all actions", "stacked", seeds=[3]), many("all actions", "stacked", seeds=range(8))
    few[0].save(tmp_path / "few")
    more[3].save(tmp_path / "more")
    assert (tmp_path / "more.zip").stat().st_size < 1.1 * (tmp_path / "few.zip").stat().st_size
    kept = [state for states in more[3].policy.optimizer.state.values() for state in states.values()]
    for tensor in [*more[3].policy.parameters(), *kept]:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


class Saving(BaseCallback):
    def __init__(self, path):
        super().__init__()
        self.path = path

    def _on_step(self):
        self.model.save(self.path / f"{self.model.seed}-{self.num_timesteps}")
        return True


def test_a_stacked_model_saved_in_training_holds_its_own_weights_alone(tmp_path):
    many("all actions", "stacked", seeds=[3], callback=lambda seed: Saving(tmp_path / "few"))
    many("all actions", "stacked", seeds=range(8), callback=lambda seed: Saving(tmp_path / "more"))
    name = "3-20.zip"
    few, more = TPO.load(tmp_path / "few" / name), TPO.load(tmp_path / "more" / name)
    torch.testing.assert_close(weights(few), weights(more), rtol=1e-5, atol=2e-6)
    assert (tmp_path / "more" / name).stat().st_size < 1.1 * (tmp_path / "few" / name).stat().st_size


# With a small `eps` a gradient that is nothing but rounding would make a whole step, another one on other processors.
OPTIMIZERS = {
    "Adam": dict(optimizer_class=torch.optim.Adam, optimizer_kwargs=dict(eps=1e-3)),
    "AdamW": dict(optimizer_class=torch.optim.AdamW, optimizer_kwargs=dict(eps=1e-3, amsgrad=True, weight_decay=0.1)),
    "SGD": dict(optimizer_class=torch.optim.SGD, optimizer_kwargs=dict(momentum=0.9)),
    "RMSprop": dict(optimizer_class=torch.optim.RMSprop, optimizer_kwargs=dict(eps=0.1, momentum=0.5, centered=True)),
    "Adagrad": dict(optimizer_class=torch.optim.Adagrad, optimizer_kwargs=dict(eps=1e-3)),  # steps seed by seed
    "NormalizedStep": dict(optimizer_class=NormalizedStep),
}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_stacked_optimizers_step_as_single_ones_do_also_where_a_seed_rests(optimizer):
    kwargs = dict(baseline=None, skip_neutral=True, policy_kwargs=OPTIMIZERS[optimizer])

    def make_env():
        return contextual(num_envs=3)

    def learn(seed, updates, rate):
        return TPO("MlpPolicy", make_env(), rate, seed=seed, **kwargs).learn(updates * 3)

    seeds = range(4)
    for updates, rate in (1, 0.01), (6, 0.01), (6, lambda progress: 0.02 * progress):
        models = train_seeds(
            TPO,
            make_env,
            seeds,
            total_timesteps=updates * 3,
            policy="MlpPolicy",
            learning_rate=rate,
            backend="stacked",
            **kwargs,
        )
        for seed, model in zip(seeds, models, strict=True):
            alone = learn(seed, updates, rate)
            assert model._n_updates == alone._n_updates
            torch.testing.assert_close(weights(model), weights(alone), rtol=1e-5, atol=1e-5)
            if rate == 0.01:
                model.learn(9, reset_num_timesteps=False)
                torch.testing.assert_close(
                    weights(model), weights(learn(seed, updates + 3, rate)), rtol=1e-5, atol=1e-5
                )
        assert updates == 1 or len({model._n_updates for model in models}) > 1  # some rested


def test_the_sampling_pass_serves_the_first_epoch(monkeypatch):
    passes = []
    each = Networks.each
    monkeypatch.setattr(Networks, "each", lambda self, *args: passes.append(0) or each(self, *args))
    many("all actions", "stacked", n_epochs=1)
    assert len(passes) == 3  # one for each update
    many("all actions", "stacked", n_epochs=2)
    assert len(passes) == 3 + 6
    many("all actions", "stacked", n_epochs=1, callback=lambda seed: Disturbing())  # who may change the policy
    assert len(passes) == 3 + 6 + 6


class Disturbing(BaseCallback):
    """Changes the policy between sampling and training."""

    def _on_step(self):
        return True

    def _on_rollout_end(self):
        with torch.no_grad():
            for parameter in self.model.policy.parameters():
                parameter.mul_(0.9)


def test_a_callback_may_change_the_policy_between_sampling_and_training():
    models = many("all actions", "stacked", callback=lambda seed: Disturbing())
    for model, seed in zip(models, SEEDS, strict=True):
        expected = single_with("all actions", seed, Disturbing())
        torch.testing.assert_close(weights(model), weights(expected), rtol=1e-5, atol=2e-6)


class Shy(nn.ReLU):
    """Another function in training than in evaluation."""

    def forward(self, x):
        return super().forward(x) * (0.5 if self.training else 1.0)


def test_a_module_may_compute_something_else_in_training():
    models = many("all actions", "stacked", policy_kwargs={"activation_fn": Shy})
    for model, seed in zip(models, SEEDS, strict=True):
        expected = single("all actions", seed, policy_kwargs={"activation_fn": Shy})
        torch.testing.assert_close(weights(model), weights(expected), rtol=1e-5, atol=2e-6)


def test_logs_of_stacked_seeds_are_those_of_single_runs(tmp_path):
    cls, policy, env, arguments, per_update = CASES["all actions"]
    train_seeds(
        cls,
        env,
        SEEDS,
        total_timesteps=3 * per_update,
        policy=policy,
        backend="stacked",
        tensorboard_log=str(tmp_path / "many"),
        eta=lambda progress: 0.5 + progress,
        **arguments,
    )
    folders = sorted(folder.name for folder in (tmp_path / "many").iterdir())
    assert folders == ["TPO_seed1_1", "TPO_seed3_1"]
    model = cls(
        policy, env(), seed=3, tensorboard_log=str(tmp_path / "one"), eta=lambda progress: 0.5 + progress, **arguments
    )
    model.learn(3 * per_update)
    lines, other = read_scalars(tmp_path / "one" / "TPO_1"), read_scalars(tmp_path / "many" / "TPO_seed3_1")
    assert lines.keys() == other.keys()
    assert {"train/fit_kl", "train/loss", "train/eta", "rollout/error", "rollout/ep_rew_mean"} <= lines.keys()
    for name, values in lines.items():
        if not name.startswith("time/"):
            assert values == pytest.approx(other[name], rel=1e-4, abs=1e-6), name


def read_scalars(folder):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder))
    events.Reload()
    return {tag: [(event.step, event.value)[1] for event in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_the_programs_random_numbers_are_left_alone():
    torch.manual_seed(7)
    expected = torch.rand(3)
    torch.manual_seed(7)
    many("one context", "stacked")
    assert torch.equal(torch.rand(3), expected)


class Ending(BaseCallback):
    """Ends training at a number of interactions; draws random numbers on the way, which is its seed's own affair."""

    def __init__(self, at):
        super().__init__()
        self.at = at
        self.seen = []

    def _on_step(self):
        self.seen.append((self.num_timesteps, float(self.locals["rewards"].mean()), float(torch.rand(()))))
        return self.num_timesteps < self.at


def test_callbacks_of_stacked_seeds_see_and_end_their_own_seed():
    callbacks = {3: Ending(10**9), 1: Ending(120)}  # within the second of three batches
    models = many("terminal", "stacked", callback=callbacks.get)
    alone = {3: Ending(10**9), 1: Ending(120)}
    for model, seed in zip(models, SEEDS, strict=True):
        expected = single_with("terminal", seed, alone[seed])
        assert len(callbacks[seed].seen) == len(alone[seed].seen)
        assert np.allclose(callbacks[seed].seen, alone[seed].seen, atol=1e-6)
        assert model.num_timesteps == expected.num_timesteps
        torch.testing.assert_close(weights(model), weights(expected), rtol=1e-5, atol=2e-6)
    assert [model.num_timesteps for model in models] == [216, 120]


def single_with(case, seed, callback):
    cls, policy, env, arguments, per_update = CASES[case]
    return cls(policy, env(), seed=seed, **arguments).learn(3 * per_update, callback=callback)


class Interrupting(BaseCallback):
    def __init__(self, at):
        super().__init__()
        self.at = at
        self.ended = False

    def _on_step(self):
        if self.num_timesteps == self.at:
            raise KeyboardInterrupt
        return True

    def _on_training_end(self):
        self.ended = True


def test_an_interruption_ends_all_stacked_seeds_and_they_resume(tmp_path):
    callbacks = {seed: [Interrupting(20), ResumeCallback(tmp_path / str(seed), every=1)] for seed in SEEDS}
    with pytest.raises(KeyboardInterrupt):
        many("all actions", "stacked", callback=callbacks.get)
    assert all(both[0].ended for both in callbacks.values())
    for seed in SEEDS:
        model = TPO.resume(tmp_path / str(seed), env=labelled())
        model.learn(model.remaining_timesteps, reset_num_timesteps=False)
        alone = single("all actions", seed)
        assert model.num_timesteps == alone.num_timesteps == 30
        torch.testing.assert_close(weights(model), weights(alone), rtol=1e-5, atol=2e-6)


class Watching(StackObserver):
    """Ends all seeds after a number of vector steps; keeps what it sees."""

    def __init__(self, steps):
        self.steps, self.seen, self.tables = steps, [], []

    def on_training_start(self, models):
        self.seen.append([model.seed for model in models])

    def on_rollout_end(self, stack):
        self.seen.append("rollout")

    def before_step(self, stack, gradients):
        self.seen.append({name: tuple(gradient.shape) for name, gradient in gradients.items()})

    def after_step(self, stack):
        self.tables.append(next(iter(stack.networks.weights.values())).detach().clone())

    def goes_on(self):
        self.steps -= 1
        return self.steps > 0


def test_an_observer_sees_all_seeds_at_once_and_ends_them():
    watching = Watching(3)
    models = many("one context", "stacked", updates=5, observer=watching, n_epochs=1)
    gradients = {"policy.action_net.weight": (2, 1, 5)}
    assert watching.seen == [SEEDS, "rollout", gradients, "rollout", gradients]
    assert [model.num_timesteps for model in models] == [30, 30]  # the third batch was collected, then all ended
    for i, seed in enumerate(SEEDS):
        alone = single("one context", seed, updates=2, n_epochs=1)
        torch.testing.assert_close(watching.tables[-1][i].flatten(), weights(alone), rtol=1e-5, atol=2e-6)
    with pytest.raises(ValueError, match='pass backend="stacked"'):
        many("one context", "auto", observer=Watching(3))
    with pytest.raises(ValueError, match="leave n_workers out"):
        many("one context", "stacked", observer=Watching(3), n_workers=2)


class OwnLoop(TPO):
    def train(self):
        super().train()


class Convolution(BaseFeaturesExtractor):
    def __init__(self, space):
        super().__init__(space, 9)
        self.layers = nn.Sequential(nn.Conv2d(1, 1, 10, 9), nn.Flatten())

    def forward(self, images):
        return self.layers(images)


class DropoutPolicy(TransformerPolicy):
    def _build(self):
        super()._build()
        self.dropout = nn.Dropout(0.1)


@pytest.mark.parametrize(
    ("algorithm", "env", "kwargs", "message"),
    [
        (TPO, "CartPole-v1", {}, "not a plain environment of this package"),
        (OwnLoop, labelled, {}, "OwnLoop has its own train"),
        (TPO, labelled, {"batch_size": 5}, "batch_size=5"),
        (TPO, functools.partial(tokens, num_envs=24), {"group_size": 4}, "a ActorPolicy, which acts step by step"),
        (TPO, tokens, {"policy": DropoutPolicy, "group_size": 4}, "has a Dropout"),
    ],
)
def test_what_cannot_be_stacked_is_refused(algorithm, env, kwargs, message):
    with pytest.raises(ValueError, match=message) as error:
        train_seeds(algorithm, env, SEEDS, total_timesteps=10, backend="stacked", **kwargs)
    assert 'backend="workers"' in str(error.value)


def test_bad_arguments():
    def train(algorithm=TPO, env="tpo_gym/Bandit-v0", seeds=(0, 1), **kwargs):
        return train_seeds(algorithm, env, seeds, total_timesteps=10, **kwargs)

    with pytest.raises(TypeError, match="Every seed needs an environment of its own"):
        train(env=bandit())
    with pytest.raises(TypeError, match="Every seed needs a callback of its own"):
        train(callback=Ending(1))
    with pytest.raises(ValueError, match="Seed 4 is given more than once"):
        train(seeds=[4, 2, 4])
    with pytest.raises(ValueError, match="at least one"):
        train(seeds=[])
    with pytest.raises(ValueError, match=r"integers, at least one; got 0\.5"):
        train(seeds=[0.5])
    with pytest.raises(ValueError, match="Unknown backend 'gpu'"):
        train(backend="gpu")
    with pytest.raises(ValueError, match="n_workers must be at least 1, got 0"):
        train(n_workers=0)
    with pytest.raises(TypeError, match=r"name the seeds by seeds="):
        train(seed=3)
    with pytest.raises(TypeError, match="not <class 'int'>"):
        train(algorithm=int)


def test_an_error_of_a_stacked_seed_names_it(monkeypatch):
    def score(self, actions, rows, step):
        rewards = (actions == self._labels[rows]).float()
        rewards[-1] = float("nan")  # the last sub-environment of the last seed
        return rewards

    monkeypatch.setattr("tpo_gym.envs.bandits.BatchedAnswers._act", score)
    with pytest.raises(ValueError, match="Seed 1: The score of candidate"):
        many("all actions", "stacked")


@pytest.mark.parametrize(
    ("env", "env_kwargs", "num_envs"),
    [
        ("tpo_gym/ContextualBandit-v0", None, 7),
        ("tpo_gym/ContextualBandit-v0", {"num_actions": 4}, 7),
        ("tpo_gym/ContextualBandit-v0", {"num_actions": 4, "num_envs": 5}, 5),
        (contextual, {"num_envs": 6}, 6),
        (lambda: gym.make("tpo_gym/ContextualBandit-v0", num_actions=3), None, 7),
    ],
)
def test_ways_to_give_an_environment(env, env_kwargs, num_envs):
    models = train_seeds(TPO, env, [0, 1], total_timesteps=10, env_kwargs=env_kwargs, n_contexts=7, backend="stacked")
    assert [model.env.num_envs for model in models] == [num_envs, num_envs]
    assert models[0].env.batched is not models[1].env.batched


# Workers.


def failing(seed):
    class Failing(BaseCallback):
        def _on_step(self):
            if seed == 1:
                raise ZeroDivisionError("as planned")
            return True

    return Failing()


def processes(seed):
    class Noting(BaseCallback):
        def _on_training_start(self):
            self.logger.record("worker/pid", os.getpid())

        def _on_step(self):
            return True

    return Noting()


@pytest.mark.slow
def test_workers_equal_single_runs_exactly(tmp_path):
    models = many(
        "terminal",
        "workers",
        n_workers=2,
        tensorboard_log=str(tmp_path / "runs"),
        callback=processes,
        progress_bar=True,
    )
    for model, seed in zip(models, SEEDS, strict=True):
        alone = single("terminal", seed)
        assert torch.equal(weights(model), weights(alone))
        assert (model.num_timesteps, model.seed) == (alone.num_timesteps, seed)
        pids = read_scalars(tmp_path / "runs" / f"TPO_seed{seed}_1")["worker/pid"]
        assert os.getpid() not in pids
    more = single("terminal", SEEDS[0], updates=4)
    models[0].learn(72, reset_num_timesteps=False)
    assert torch.equal(weights(models[0]), weights(more))
    assert models[0].num_timesteps == 4 * 72
    assert len(list((tmp_path / "runs").iterdir())) == 2  # it went on in its run
    models[1].save(tmp_path / "model")
    loaded = TPO.load(tmp_path / "model", env=tokens())
    assert torch.equal(weights(loaded), weights(models[1]))


@pytest.mark.slow
def test_workers_train_what_cannot_be_stacked_and_name_a_seed_that_fails():
    models = train_seeds(TPO, "CartPole-v1", [5], total_timesteps=100, n_contexts=2, group_size=2, n_workers=1)
    alone = TPO("MlpPolicy", "CartPole-v1", n_contexts=2, group_size=2, seed=5).learn(100)
    assert torch.equal(weights(models[0]), weights(alone))
    assert models[0].num_timesteps == alone.num_timesteps
    with pytest.raises(RuntimeError, match=r"(?s)Seed 1 failed:.*as planned"):
        train_seeds(
            TPO, "tpo_gym/Bandit-v0", [0, 1], total_timesteps=500, callback=failing, backend="workers", n_workers=1
        )


@pytest.mark.slow
def test_stacked_in_workers_equal_single_runs(tmp_path):
    seeds = [3, 1, 4]
    logs = str(tmp_path / "runs")
    models = many(
        "all actions", "stacked", seeds=seeds, n_workers=2, tensorboard_log=logs, callback=processes, progress_bar=True
    )
    pids = []
    for model, seed in zip(models, seeds, strict=True):
        alone = single("all actions", seed)
        torch.testing.assert_close(weights(model), weights(alone), rtol=1e-5, atol=2e-6)
        assert (model.num_timesteps, model.seed) == (alone.num_timesteps, seed)
        pids += read_scalars(tmp_path / "runs" / f"TPO_seed{seed}_1")["worker/pid"]
    assert pids[0] == pids[1] != pids[2]  # two were stacked in one process
    assert os.getpid() not in pids
    models[0].learn(10, reset_num_timesteps=False)
    more = single("all actions", seeds[0], updates=4)
    torch.testing.assert_close(weights(models[0]), weights(more), rtol=1e-5, atol=2e-6)
    with pytest.raises(RuntimeError, match=r"(?s)Seeds 0, 1 failed:.*as planned"):
        many("all actions", "stacked", seeds=[0, 1, 2], n_workers=2, callback=failing)


def test_auto_follows_the_measurement():
    table = TPO("TabularPolicy", bandit(), seed=0)
    images = gym.make_vec("tpo_gym/MNISTBandit-v0", num_envs=2, flatten=False)
    convolutions = TPO("MlpPolicy", images, policy_kwargs={"features_extractor_class": Convolution}, seed=0)
    sequences = TPO("TransformerPolicy", tokens(), group_size=4, seed=0)
    long = 10 * 50_000  # ten sub-environments
    assert _choose(table, 20, 1_000, 2, True) == (1, True)  # over before workers have started
    assert _choose(table, 20, long, 2, True) == (2, True)
    assert _choose(table, 20, long, 40, True) == (40, False)
    assert _choose(table, 20, 1_000, 2, False) == (2, False)
    assert _choose(convolutions, 20, 1_000, 2, True) == (2, False)
    assert _choose(sequences, 20, 1_000, 2, True) == (2, False)


def test_exports():
    assert tpo_gym.train_seeds is train_seeds
    assert Recipe(TPO, "MlpPolicy", "id", {}, {}, 1, None, 1, "TPO").run_name(4) == "TPO_seed4"
