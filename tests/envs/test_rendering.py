"""Text and pictures, and the window."""

import sys

import gymnasium as gym
import numpy as np
import pytest

from tpo_gym.envs import rendering
from tpo_gym.envs.rendering import BLUE, CELL, GREY, ORANGE, WHITE


def corner(picture, row, column):
    """The colour of a cell's fill, next to its corner."""
    return tuple(int(value) for value in picture[row * CELL + 7, column * CELL + 7])


def test_every_environment_renders(task):
    for mode in ("ansi", "rgb_array"):
        env = task.make(render_mode=mode)
        env.reset(seed=0)
        before = env.render()
        env.step(env.action_space.sample())
        after = env.render()
        if mode == "ansi":
            assert isinstance(after, str)
            assert after.endswith("\n")
            assert before != after
        else:
            assert (after.dtype, after.ndim, after.shape[2]) == (np.uint8, 3, 3)
            assert before.shape == after.shape
            assert (before != after).any()


def test_batched_environments_return_a_frame_each(task):
    env = task.make_vec(3, render_mode="rgb_array")
    env.reset(seed=0)
    frames = env.render()
    assert len(frames) == 3
    assert all(frame.dtype == np.uint8 for frame in frames)
    text = task.make_vec(2, render_mode="ansi")
    text.reset(seed=0)
    assert all(isinstance(frame, str) for frame in text.render())


def test_token_text_marks_wrong_tokens():
    assert rendering.tokens_text([1, 2, 3], [3, 2, 1], [3, 1]) == (
        "prompt 1 2 3\ntarget 3 2 1\noutput 3 1 _\nwrong    ^\n"
    )


def test_token_cells_are_blue_where_right_and_orange_where_wrong():
    picture = rendering.tokens_picture([1, 2, 3], [3, 2, 1], [3, 1])
    assert picture.shape == (3 * CELL, 3 * CELL, 3)
    assert [corner(picture, 2, column) for column in range(3)] == [BLUE, ORANGE, WHITE]
    assert corner(picture, 0, 0) == GREY


def test_arms_in_text_and_cells():
    assert rendering.choice_text(3, 1, None) == " 0   [1]   2\n"
    assert rendering.choice_text(3, 1, 2) == " 0   [1]   2 *  wrong\n"
    assert rendering.choice_text(3, 1, 1) == " 0   [1]*  2  right\n"
    assert "chosen: 7  wrong" in rendering.choice_text(100, 42, 7)
    picture = rendering.choice_picture(12, 11, 3)
    assert picture.shape == (2 * CELL, 10 * CELL, 3)
    assert corner(picture, 0, 3) == ORANGE
    assert tuple(picture[CELL + 1, CELL + 1]) == BLUE  # the frame of the right one
    assert corner(rendering.choice_picture(12, 11, 11), 1, 1) == BLUE


def test_a_digit_in_characters():
    env = gym.make("tpo_gym/MNISTBandit-v0", split="test", render_mode="ansi")
    env.reset(seed=0)
    lines = env.render().splitlines()
    assert len(lines) == 29
    assert {len(line) for line in lines[:28]} == {28}
    assert set("".join(lines[:28])) > {" ", "@"}


def test_the_window_opens_and_closes(monkeypatch):
    pytest.importorskip("pygame")
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    env = gym.make("tpo_gym/TokenCopy-v0", sequence_length=2, render_mode="human")
    env.reset(seed=0)
    env.step(0)
    assert env.render() is None
    env.close()
    env.close()


def test_without_pygame_the_window_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "pygame", None)
    env = gym.make("tpo_gym/TokenCopy-v0", render_mode="human")
    with pytest.raises(ImportError, match="pip install pygame"):
        env.reset()


@pytest.mark.filterwarnings("ignore:.*render")
def test_rendering_without_a_mode_warns(task):
    env = task.make().unwrapped
    env.reset()
    assert env.render() is None
    vec = task.make_vec(1)
    vec.reset()
    assert vec.render() is None


@pytest.mark.filterwarnings("ignore:.*render")
def test_unknown_modes_are_refused():
    with pytest.raises(ValueError, match="render_mode='svg'"):
        gym.make("tpo_gym/Bandit-v0", render_mode="svg")
