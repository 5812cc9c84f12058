"""The contract of every batched environment: shapes, seeds, groups, autoreset, state."""

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

TOKEN_ID = "tpo_gym/TokenReversal-v0"


def make_tokens(num_envs=6, **kwargs):
    return gym.make_vec(TOKEN_ID, num_envs, **{"sequence_length": 3, "vocab_size": 4, **kwargs})


def rollout(env, actions):
    """Returns everything that a list of actions leads to."""
    out = [env.observations()]
    for action in actions:
        observation, reward, terminated, truncated, infos = env.step(action)
        final = infos.get("final_info", infos)
        out += [observation, reward, terminated, truncated, *(final[key] for key in sorted(final))]
    return out


def assert_equal(first, second):
    assert len(first) == len(second)
    for a, b in zip(first, second, strict=True):
        assert torch.equal(a, b)


def test_shapes_dtypes_and_devices(task, device, random_actions):
    env = task.make_vec(6, device=device)
    observation, infos = env.reset(seed=0)
    assert infos == {}
    for step in range(2 * env.horizon + 1):
        assert observation.shape == env.observation_space.shape
        assert observation.cpu().numpy() in env.observation_space
        assert observation.device.type == device
        observation, rewards, terminated, truncated, infos = env.step(random_actions(env))
        assert (rewards.dtype, terminated.dtype, truncated.dtype) == (torch.float32, torch.bool, torch.bool)
        assert rewards.shape == terminated.shape == truncated.shape == (6,)
        assert {rewards.device.type, terminated.device.type, truncated.device.type} == {device}
        ended = step % env.horizon == env.horizon - 1
        assert terminated.tolist() == [ended] * 6
        assert not truncated.any()
        assert ("final_info" in infos) == ended


def test_same_seed_same_rollout(task, device, random_actions):
    first, second = task.make_vec(4, device=device), task.make_vec(4, device=device)
    actions = [random_actions(first) for _ in range(2 * first.horizon + 1)]
    first.reset(seed=7)
    second.reset(seed=7)
    assert_equal(rollout(first, actions), rollout(second, actions))


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda env: pickle.loads(pickle.dumps(env))], ids=["copy", "pickle"])
def test_copies_in_the_middle_of_an_episode_go_on_alike(task, clone, device, random_actions):
    env = task.make_vec(4, device=device)
    env.reset(seed=1, options={"group_size": 2})
    for _ in range(env.horizon + env.horizon // 2):
        env.step(random_actions(env))
    twin = clone(env)
    actions = [random_actions(env) for _ in range(2 * env.horizon + 1)]
    assert_equal(rollout(env, actions), rollout(twin, actions))
    assert twin.spec == env.spec


def test_state_restores_exactly(task, device, random_actions):
    env, other = task.make_vec(4, device=device), task.make_vec(4, device=device)
    env.reset(seed=1, options={"group_size": 2})
    env.step(random_actions(env))
    state = env.get_state()
    kept = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    actions = [random_actions(env) for _ in range(2 * env.horizon + 1)]
    expected = rollout(env, actions)
    other.reset(seed=99)
    other.set_state(state)
    assert_equal(expected, rollout(other, actions))
    assert all(torch.equal(kept[k], v) if isinstance(v, torch.Tensor) else kept[k] == v for k, v in state.items())
    other.set_state(kept)
    assert_equal(expected, rollout(other, actions))


def test_state_of_another_environment_is_refused():
    env = make_tokens(6)
    with pytest.raises(ValueError, match=r"shape \(4,\).*\(6,\)"):
        env.set_state(make_tokens(4).get_state())
    with pytest.raises(ValueError, match="keys"):
        env.set_state({})


def test_observations_are_the_callers_own(task, random_actions):
    env = task.make_vec(3)
    first, _ = env.reset(seed=0)
    before = first.clone()
    first.zero_().sub_(1)
    assert torch.equal(env.observations(), before)
    for _ in range(env.horizon + 1):
        observation, _, _, _, infos = env.step(random_actions(env))
        kept = observation.clone()
        observation.zero_().sub_(1)
        infos.get("final_obs", observation).zero_().sub_(1)
        assert torch.equal(env.observations(), kept)


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_advancing_is_stepping_without_looking(task, mode, random_actions):
    stepped, advanced = (task.make_vec(4, autoreset_mode=mode) for _ in range(2))
    for env in (stepped, advanced):
        env.reset(seed=5, options={"group_size": 2})
    for turn in range(2 * stepped.horizon + 2):
        if mode is AutoresetMode.DISABLED and turn and turn % stepped.horizon == 0:
            for env in (stepped, advanced):
                env.reset()
        actions = random_actions(stepped)
        observation, rewards, *_ = stepped.step(actions)
        assert torch.equal(advanced.advance(actions), rewards)
        if turn % 2:
            assert torch.equal(advanced.observations(again=False), observation)
            assert torch.equal(advanced.observations(), observation)
    for name, value in advanced.get_state().items():
        assert torch.equal(torch.as_tensor(value), torch.as_tensor(stepped.get_state()[name]))


def test_a_subclass_that_rewards_otherwise_advances_otherwise(random_actions):
    class Doubled(type(make_tokens())):
        def step(self, actions):
            observation, rewards, *rest = super().step(actions)
            return observation, 2 * rewards, *rest

    env, plain = Doubled(sequence_length=3, vocab_size=2, num_envs=6), make_tokens(vocab_size=2)
    for each in (env, plain):
        each.reset(seed=0)
    actions = random_actions(plain)
    assert torch.equal(env.advance(actions), 2 * plain.advance(actions))


def test_stepping_and_resetting_see_the_same_contexts(task, random_actions):
    stepped, reset = task.make_vec(4), task.make_vec(4)
    options = {"group_size": 2}
    observation, _ = stepped.reset(seed=3, options=options)
    assert torch.equal(observation, reset.reset(seed=3, options=options)[0])
    for _ in range(3):
        for _ in range(stepped.horizon):
            observation, *_ = stepped.step(random_actions(stepped))
        assert torch.equal(observation, reset.reset()[0])


def test_plain_resets_vary_and_repeat_with_the_seed(task):
    env = task.make_vec(2)
    runs = [[env.reset(seed=3)[0], *(env.reset()[0] for _ in range(5))] for _ in range(2)]
    assert_equal(*runs)
    if "/Bandit-" not in task.id:
        assert any(not torch.equal(runs[0][0], later) for later in runs[0][1:])


def test_unseeded_environments_differ():
    observations = [make_tokens(50).reset()[0] for _ in range(2)]
    assert not torch.equal(*observations)


# Groups.


def test_groups_are_interleaved_and_stay_through_autoreset(device):
    env = make_tokens(12, device=device, sequence_length=6)
    observation, _ = env.reset(seed=0, options={"group_size": 3})
    contexts = []
    for _ in range(4):
        prompts = observation[:, :6].reshape(4, 3, 6)
        assert (prompts == prompts[:, :1]).all()
        contexts.append(prompts[:, 0])
        for _ in range(env.horizon):
            observation, *_ = env.step(torch.zeros(12, dtype=torch.int64, device=device))
    assert len(torch.cat(contexts).unique(dim=0)) > 12
    assert env.group_size == 3
    env.reset()
    assert env.group_size == 3
    observation, _ = env.reset(options={"group_size": 1})
    assert len(observation.unique(dim=0)) > 4


def test_a_reward_of_the_context_alone_is_constant_in_a_group():
    env = gym.make_vec("tpo_gym/ContextualBandit-v0", 80, num_contexts=40)
    env.reset(seed=0, options={"group_size": 8})
    groups = env.labels.reshape(10, 8).float()
    assert (groups.std(dim=1) == 0).all()
    assert groups[:, 0].std() > 0


def test_a_group_size_that_does_not_divide_is_refused():
    env = make_tokens(10)
    with pytest.raises(ValueError, match=r"group_size=4 does not divide num_envs=10.*num_envs=12"):
        env.reset(options={"group_size": 4})
    with pytest.raises(TypeError, match="group_size"):
        env.reset(options={"group_size": 2.5})
    with pytest.raises(ValueError, match="at least 1"):
        env.reset(options={"group_size": 0})
    assert env.group_size == 1


# Partial resets.


def test_a_mask_restarts_only_its_sub_environments(device):
    env = make_tokens(4, device=device)
    start, _ = env.reset(seed=0, options={"group_size": 2})
    zeros = torch.zeros(4, dtype=torch.int64, device=device)
    env.step(zeros)
    mask = np.array([True, True, False, False])
    observation, _ = env.reset(options={"reset_mask": mask})
    assert (observation[:2, 3:] == 4).all()
    assert torch.equal(observation[0], observation[1])
    assert (observation[2:, 3] == 0).all()
    assert torch.equal(observation[2:, :3], start[2:, :3])
    ends = []
    for _ in range(3):
        _, _, terminated, _, infos = env.step(zeros)
        ends.append(terminated.tolist())
        if terminated.any():
            assert torch.equal(infos["_final_obs"], terminated)
            assert torch.equal(infos["final_info"]["_exact_match"], terminated)
    assert ends == [[False] * 4, [False, False, True, True], [True, True, False, False]]


def test_out_of_step_sub_environments_earn_what_they_earn_alone(random_actions):
    mixed, alone = make_tokens(4, autoreset_mode="Disabled", reward="sequential"), make_tokens(1, reward="sequential")
    mixed.reset(seed=0)
    mixed.step(random_actions(mixed))
    observation, _ = mixed.reset(options={"reset_mask": torch.tensor([True, False, True, False])})
    alone.reset()
    alone._board[0, :3] = observation[0, :3]
    for _ in range(2):
        actions = mixed._target(slice(None), 0) if mixed.at_start else random_actions(mixed)
        scores = mixed.score_actions(torch.arange(4).expand(4, 4))
        _, rewards, *_ = mixed.step(actions)
        assert torch.equal(rewards, scores.gather(1, actions[:, None])[:, 0])
        assert torch.equal(alone.step(actions[:1])[1], rewards[:1])


@pytest.mark.parametrize(
    ("mask", "error", "match"),
    [
        (np.array([1, 1, 0, 0]), TypeError, "dtype int64"),
        (np.array([True]), ValueError, r"shape \(1,\)"),
        (np.zeros(4, dtype=bool), ValueError, "selects no"),
        (np.array([True, False, False, False]), ValueError, "splits a group"),
    ],
)
def test_bad_masks(mask, error, match):
    env = make_tokens(4)
    env.reset(options={"group_size": 2})
    with pytest.raises(error, match=match):
        env.reset(options={"reset_mask": mask})


def test_a_partial_reset_needs_a_full_one_first_and_cannot_regroup():
    env = make_tokens(4)
    mask = np.array([True, True, False, False])
    with pytest.raises(ResetNeeded):
        env.reset(options={"reset_mask": mask})
    env.reset()
    with pytest.raises(ValueError, match="cannot change from 1 to 2"):
        env.reset(options={"reset_mask": mask, "group_size": 2})


# Autoreset.


@pytest.mark.parametrize("mode", list(AutoresetMode))
def test_as_many_episodes_end_as_there_were(task, mode, random_actions):
    env = task.make_vec(3, autoreset_mode=mode)
    assert env.metadata["autoreset_mode"] is mode
    env.reset(seed=0)
    ended = outcomes = 0
    steps_per_episode = env.horizon + (mode is AutoresetMode.NEXT_STEP)
    for _ in range(4 * steps_per_episode):
        _, _, terminated, _, infos = env.step(random_actions(env))
        ended += int(terminated.sum())
        final = infos.get("final_info", infos)
        outcomes += int(final.get("_is_success", torch.zeros(1)).sum())
        if mode is AutoresetMode.DISABLED and terminated.any():
            env.reset(options={"reset_mask": terminated})
    assert ended == outcomes == 4 * 3


def test_metadata_belongs_to_the_instance():
    make_tokens(autoreset_mode="NextStep")
    assert make_tokens().metadata["autoreset_mode"] is AutoresetMode.SAME_STEP


def test_next_step_resets_without_reward(device):
    env = make_tokens(2, autoreset_mode="NextStep", device=device)
    env.reset(seed=0)
    zeros = torch.zeros(2, dtype=torch.int64, device=device)
    for _ in range(3):
        observation, _, terminated, _, infos = env.step(zeros)
    assert terminated.all()
    assert infos["_token_accuracy"].all()
    assert (observation[:, 3:] == 0).all()
    assert (env.score_actions(zeros) == 0).all()
    observation, rewards, terminated, _, infos = env.step(zeros)
    assert (rewards == 0).all()
    assert not terminated.any()
    assert infos == {}
    assert (observation[:, 3:] == 4).all()


def test_next_step_out_of_step(random_actions):
    env = make_tokens(2, autoreset_mode="NextStep")
    env.reset(seed=0)
    env.step(random_actions(env))
    env.reset(options={"reset_mask": np.array([True, False])})
    ends = [env.step(random_actions(env))[2].tolist() for _ in range(8)]
    first, second = zip(*ends, strict=True)
    assert first == (False, False, True, False, False, False, True, False)
    assert second == (False, True, False, False, False, True, False, False)


def test_disabled_refuses_to_step_a_finished_episode(task, random_actions):
    env = task.make_vec(2, autoreset_mode="Disabled")
    env.reset()
    for _ in range(env.horizon):
        env.step(random_actions(env))
    with pytest.raises(ResetNeeded, match="reset_mask"):
        env.step(random_actions(env))
    env.reset()
    env.step(random_actions(env))


# Scores.


def test_scores_are_what_a_step_would_pay(task, device, random_actions):
    env = task.make_vec(3, device=device)
    env.reset(seed=0)
    count = int(env.single_action_space.n)
    for _ in range(env.horizon + 1):
        state = env.get_state()
        table = env.score_actions(torch.arange(count, device=device).expand(3, count))
        assert table.shape == (3, count)
        assert table.dtype == torch.float32
        for action in range(count):
            actions = torch.full((3,), action, device=device)
            assert torch.equal(env.score_actions(actions), table[:, action])
            assert torch.equal(copy.deepcopy(env).step(actions)[1], table[:, action])
        after = env.get_state()
        assert all(torch.equal(after[k], v) if isinstance(v, torch.Tensor) else after[k] == v for k, v in state.items())
        env.step(random_actions(env))


# Bad input.


@pytest.mark.parametrize(
    ("actions", "error", "match"),
    [
        (torch.zeros(5, dtype=torch.int64), ValueError, r"shape \(5,\).*\(6,\)"),
        (torch.zeros(6, 1, dtype=torch.int64), ValueError, r"shape \(6, 1\)"),
        (torch.zeros(6), TypeError, "float32"),
        (np.zeros(6, dtype=bool), TypeError, "bool"),
        (np.array([0, 1, 2, 3, 4, 0]), ValueError, "holds 4.*0 to 3"),
        (np.array([0, 1, 2, 3, -1, 0]), ValueError, "holds -1"),
    ],
)
def test_bad_actions(actions, error, match):
    env = make_tokens(6)
    before, _ = env.reset()
    with pytest.raises(error, match=match):
        env.step(actions)
    assert torch.equal(env.observations(), before)
    if actions.ndim == 1:
        with pytest.raises(error, match=match):
            env.score_actions(actions)


@pytest.mark.parametrize("dtype", [np.int32, np.uint8, np.int64])
def test_any_integer_dtype_will_do(dtype):
    env = make_tokens(6)
    env.reset()
    env.step(np.ones(6, dtype=dtype))
    written = env.step([1, 0, 1, 0, 1, 0])[0][:, env.sequence_length :]
    assert (written[:, 0] == 1).all()
    assert written[:, 1].tolist() == [1, 0, 1, 0, 1, 0]


def test_nothing_works_before_the_first_reset():
    env = make_tokens(6)
    for call in (env.observations, lambda: env.step(np.zeros(6, int)), lambda: env.score_actions(np.zeros(6, int))):
        with pytest.raises(ResetNeeded, match="reset"):
            call()


@pytest.mark.parametrize(
    ("seed", "error"), [([1, 2], TypeError), ("1", TypeError), (1.5, TypeError), (-1, ValueError), (2**63, ValueError)]
)
def test_bad_seeds(seed, error):
    with pytest.raises(error, match="seed"):
        make_tokens().reset(seed=seed)
    with pytest.raises(error, match="seed"):
        gym.make(TOKEN_ID).reset(seed=seed)


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match="groupsize"):
        make_tokens().reset(options={"groupsize": 2})


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"num_envs": 0}, ValueError, "num_envs=0"),
        ({"num_envs": 2.0}, TypeError, "num_envs"),
        ({"device": "nowhere"}, ValueError, "device='nowhere'"),
        ({"device": "cuda:99"}, ValueError, "device='cuda:99'"),
        ({"autoreset_mode": "sometimes"}, ValueError, "SameStep"),
        ({"render_mode": "human"}, ValueError, "gymnasium.make"),
        ({"max_episode_steps": 5}, ValueError, "exactly 1 step"),
        ({"no_such_argument": 1}, TypeError, "no_such_argument"),
    ],
)
def test_bad_arguments(kwargs, error, match):
    with pytest.raises(error, match=match):
        gym.make_vec("tpo_gym/Bandit-v0", **{"num_envs": 1, **kwargs})


def test_max_episode_steps_may_equal_the_horizon():
    assert make_tokens(max_episode_steps=3).horizon == 3
