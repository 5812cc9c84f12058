"""MNISTBandit and ClassificationBandit: observations, rewards, arguments."""

import gzip
import pickle
import struct

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces

from tpo_gym.envs.datasets import load_image_dataset

MNIST = "tpo_gym/MNISTBandit-v0"
CLASSIFICATION = "tpo_gym/ClassificationBandit-v0"


@pytest.mark.parametrize(("flatten", "shape"), [(True, (784,)), (False, (1, 28, 28))])
def test_mnist_shows_scaled_images_and_pays_for_labels(flatten, shape, device):
    env = gym.make_vec(MNIST, 64, split="test", flatten=flatten, device=device)
    assert env.single_observation_space == spaces.Box(0, 1, shape, np.float32)
    observation, _ = env.reset(seed=0)
    data = load_image_dataset("test", None, device)
    rows = env.get_state()["context"]
    expected = data.features[rows].float() / 255
    assert torch.equal(observation, expected.reshape(64, *shape))
    assert torch.equal(env.labels, data.labels[rows])
    assert env.dataset.features.dtype == torch.uint8
    actions = env.labels
    actions[::2] = (actions[::2] + 1) % 10
    _, rewards, terminated, _, infos = env.step(actions)
    assert rewards.tolist() == [0.0, 1.0] * 32
    assert terminated.all()
    assert torch.equal(infos["final_obs"], observation)
    assert torch.equal(env.features(rows), observation)
    assert env.features().shape == (10_000, *shape)


def test_images_of_a_step_are_fresh_draws_with_replacement():
    env = gym.make_vec(MNIST, 100, split="test")
    env.reset(seed=0)
    rows = []
    for _ in range(200):
        env.step(np.zeros(100, int))
        rows.append(env.get_state()["context"])
    distinct = len(torch.cat(rows).unique())
    assert distinct == pytest.approx(10_000 * (1 - np.exp(-2)), rel=0.02)


def test_environments_of_one_process_share_the_data():
    first, second = (gym.make_vec(MNIST, 2, split="test") for _ in range(2))
    assert first.dataset is second.dataset
    first.reset(seed=0)
    assert len(pickle.dumps(first)) < 50_000


def test_other_images_by_data_dir(tmp_path):
    images = np.arange(2 * 3 * 4, dtype=np.uint8).reshape(2, 3, 4)
    head = bytes([0, 0, 8, 3]) + struct.pack(">3I", 2, 3, 4)
    (tmp_path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(head + images.tobytes()))
    (tmp_path / "train-labels-idx1-ubyte").write_bytes(bytes([0, 0, 8, 1, 0, 0, 0, 2, 11, 3]))
    env = gym.make(MNIST, data_dir=tmp_path)
    assert env.observation_space.shape == (12,)
    assert env.action_space.n == 12
    assert gym.make(MNIST, data_dir=str(tmp_path), flatten=False).observation_space.shape == (1, 3, 4)


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"split": "valid"}, ValueError, "split='valid'.*'train' or 'test'"),
        ({"flatten": 1}, TypeError, "flatten=1"),
        ({"data_dir": "no/such/place"}, FileNotFoundError, "no/such/place"),
        ({"device": "nowhere"}, ValueError, "device='nowhere'"),
    ],
)
def test_bad_mnist_arguments(kwargs, error, match):
    with pytest.raises(error, match=match):
        gym.make(MNIST, **kwargs)


def test_features_as_arrays(device):
    features = np.array([[0.0, -2.0], [5.0, 1.0], [1.0, 1.0]])
    env = gym.make_vec(CLASSIFICATION, 30, features=features, labels=[0, 2, 1], device=device)
    assert env.single_observation_space == spaces.Box(-2, 5, (2,), np.float32)
    assert env.single_action_space == spaces.Discrete(3)
    observation, _ = env.reset(seed=0)
    lookup = {tuple(row): label for row, label in zip(features.tolist(), [0, 2, 1], strict=True)}
    labels = [lookup[tuple(row)] for row in observation.tolist()]
    assert env.labels.tolist() == labels
    features[:] = 9  # the environment has a copy
    assert env.step(np.array(labels))[1].sum() == 30
    assert env.observations().max() <= 5


def test_uint8_features_count_as_images():
    features = np.array([[0, 255], [51, 0]], dtype=np.uint8)
    env = gym.make_vec(CLASSIFICATION, 20, features=torch.tensor(features), labels=torch.tensor([0, 1]))
    assert env.single_observation_space == spaces.Box(0, 1, (2,), np.float32)
    assert sorted(set(env.reset(seed=0)[0].flatten().tolist())) == pytest.approx([0, 0.2, 1])


def test_constant_features_still_make_a_box():
    env = gym.make(CLASSIFICATION, features=np.ones((2, 3)), labels=[0, 1])
    assert (env.observation_space.low < env.observation_space.high).all()


def test_arrays_survive_a_pickle():
    env = gym.make_vec(CLASSIFICATION, 4, features=np.eye(3), labels=[0, 1, 2])
    env.reset(seed=0)
    twin = pickle.loads(pickle.dumps(env))
    assert torch.equal(twin.step(env.labels)[0], env.step(env.labels)[0])


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({}, ValueError, "needs data"),
        ({"features": np.ones((2, 2))}, ValueError, "needs data"),
        ({"features": np.ones((2, 2)), "labels": [0, 1], "path": "x.npz"}, ValueError, "both"),
        ({"path": "no-such.npz"}, FileNotFoundError, r"no-such\.npz"),
        ({"features": np.ones((2, 2)), "labels": [0, 1, 1]}, ValueError, r"\(2, 2\).*\(3,\)"),
        ({"features": np.ones(2), "labels": [0, 1]}, ValueError, "do not fit"),
        ({"features": np.ones((0, 2)), "labels": np.zeros(0, int)}, ValueError, "N > 0"),
        ({"features": np.ones((2, 2)), "labels": [0, -1]}, ValueError, "-1"),
        ({"features": np.ones((2, 2)), "labels": [0.0, 1.0]}, TypeError, "integers"),
        ({"features": np.array([["a"], ["b"]]), "labels": [0, 1]}, TypeError, "numbers"),
        ({"features": np.array([[1.0], [np.nan]]), "labels": [0, 1]}, ValueError, "finite"),
    ],
)
def test_bad_data(kwargs, error, match):
    with pytest.raises(error, match=match):
        gym.make_vec(CLASSIFICATION, 1, **kwargs)
