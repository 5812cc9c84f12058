"""What an update tells the host travels once; on a CPU it is read at once. Here a CPU plays the device."""

import gymnasium as gym
import pytest
import torch
from stable_baselines3.common.logger import KVWriter, Logger
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tpo_gym.agents import TPO, mail, train_seeds


class Kept(KVWriter):
    def __init__(self):
        self.entries = []

    def write(self, key_values, key_excluded, step=0):
        self.entries.append({k: v for k, v in key_values.items() if not k.startswith("time/")})


def trained(updates=4, log_interval=1, **kwargs):
    env = gym.make_vec("tpo_gym/TokenReversal-v0", num_envs=24, sequence_length=3, reward="terminal")
    model = TPO("TransformerPolicy", env, group_size=4, seed=0, **kwargs)
    kept = Kept()
    model.set_logger(Logger(None, [kept]))
    model.learn(updates * 24 * 3, log_interval=log_interval)
    return model, kept.entries


@pytest.fixture
def transfers(monkeypatch):
    """Nothing is on the host; how many numbers each transfer carried."""
    found = []
    deliver = mail.Mail.deliver

    def counted(self):
        if self._letters:
            found.append(sum(len(values) for values, _ in self._letters))
        deliver(self)

    monkeypatch.setattr(mail.Mail, "is_here", staticmethod(lambda values: False))
    monkeypatch.setattr(mail.Mail, "deliver", counted)
    return found


def test_one_transfer_per_update_brings_the_same_logs(request):
    model, logs = trained()
    transfers = request.getfixturevalue("transfers")
    other, other_logs = trained()
    assert len(transfers) == 4
    assert other_logs == logs
    assert list(other.ep_info_buffer) != []
    assert [info["r"] for info in other.ep_info_buffer] == [info["r"] for info in model.ep_info_buffer]


def test_without_logs_there_is_one_transfer_too(transfers):
    model, logs = trained(log_interval=None)
    assert (len(transfers), logs) == (4, [])
    assert len(model.ep_info_buffer) == 96


@pytest.mark.parametrize("log_interval", [1, None])
def test_stacked_seeds_need_one_transfer_too(request, log_interval, tmp_path):
    def train(name):
        return train_seeds(
            TPO,
            "tpo_gym/MNISTBandit-v0",
            range(3),
            total_timesteps=4 * 50,
            n_contexts=50,
            log_interval=log_interval,
            backend="stacked",
            tensorboard_log=str(tmp_path / name),
        )

    def curves(name, seed):
        (path,) = (tmp_path / name).glob(f"TPO_seed{seed}_1")
        events = EventAccumulator(str(path)).Reload()
        return {tag: [e.value for e in events.Scalars(tag)] for tag in events.Tags()["scalars"] if "time" not in tag}

    models = train("here")
    transfers = request.getfixturevalue("transfers")
    others = train("there")
    assert len(transfers) == 4
    for seed, (model, other) in enumerate(zip(models, others, strict=True)):
        assert [info["r"] for info in other.ep_info_buffer] == [info["r"] for info in model.ep_info_buffer]
        assert curves("there", seed) == curves("here", seed)
        assert bool(curves("here", seed)) == bool(log_interval)


def test_a_score_that_is_not_finite_is_refused_when_it_is_heard_of(transfers, monkeypatch):
    env = gym.make_vec("tpo_gym/TokenReversal-v0", num_envs=8, sequence_length=3, reward="terminal")
    model = TPO("TransformerPolicy", env, group_size=4, seed=0)
    step = type(env.unwrapped).step_sequences
    monkeypatch.setattr(
        type(env.unwrapped), "step_sequences", lambda self, t: (step(self, t)[0] * torch.nan, step(self, t)[1])
    )
    with pytest.raises(ValueError, match="score of candidate 0 of context 0"):
        model.learn(24)
