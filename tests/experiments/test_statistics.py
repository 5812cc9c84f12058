"""Estimates, intervals and verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from tpo_gym.curves import smooth
from tpo_gym.experiments.experiment import Claim
from tpo_gym.experiments.statistics import Curves, Estimate, estimate, first_at_most, keeps_order, verdict

pytest.importorskip("scipy")


def curves(values: list[list[float]]) -> Curves:
    array = np.array(values)
    return Curves(np.arange(1, array.shape[1] + 1.0), {"error": array}, list(range(len(array))), [1.0] * len(array))


def test_final_value_and_interval() -> None:
    finals = np.linspace(0, 1, 40)
    result = estimate(curves([[1.0, value] for value in finals]), Claim("", "A", "final", 0.5))
    assert result.value == pytest.approx(0.5)
    assert result.robust == pytest.approx(0.5)
    half = 1.96 * finals.std() / np.sqrt(40)  # the percentile interval of a mean, nearly
    assert (result.low, result.high) == pytest.approx((0.5 - half, 0.5 + half), abs=0.01)


def test_steps_are_those_of_the_mean_curve() -> None:
    steep, flat = [0.5, 0.0, 0.0, 0.0], [0.5, 0.5, 0.5, 0.0]
    assert estimate(curves([steep]), Claim("", "A", "steps", 2)).value == 2
    both = estimate(curves([steep, flat]), Claim("", "A", "steps", 2))
    assert (both.value, both.low, both.high) == (4, 2, 4)
    never = estimate(curves([[0.5, 0.4], [0.5, 0.5]]), Claim("", "A", "steps", 2))
    assert (never.value, never.high) == (float("inf"), float("inf"))
    assert estimate(curves([steep]), Claim("", "A", "steps", 2)).n_seeds == 1


def test_value_at_an_update_and_last_component_of_a_vector() -> None:
    assert estimate(curves([[0.5, 0.25, 0.0]]), Claim("", "A", "at", 0.2, where=2)).value == 0.25
    vector = Curves(np.array([7.0]), {"surplus": np.array([[[0.1, 0.3]]])}, [0], [1.0])
    assert estimate(vector, Claim("", "A", "final", 0.3, metric="surplus")).value == 0.3


def test_first_at_most() -> None:
    assert first_at_most(np.array([1.0, 2, 3]), np.array([0.5, 0.01, 0.5]), 0.01) == 2
    assert first_at_most(np.array([1.0]), np.array([0.5]), 0.01) == float("inf")


A, B = Claim("p", "A", "final", 0.1), Claim("p", "B", "final", 0.5)
BOUND = Claim("p", "C", "final", 0.95, ">")


def test_verdicts() -> None:
    claims = (A, B, BOUND)
    near, far = Estimate(0.12, 0.05, 0.2, 5), Estimate(0.3, 0.25, 0.35, 5)
    high = Estimate(0.99, 0.98, 1.0, 5)
    assert verdict(A, {A: near, B: far, BOUND: high}, claims, True) == "inside"
    assert verdict(A, {A: near, B: far, BOUND: high}, claims, False) == "ordering kept"
    assert verdict(B, {A: near, B: far, BOUND: high}, claims, True) == "ordering kept"
    assert verdict(B, {A: far, B: near, BOUND: high}, claims, True) == "not"
    assert verdict(BOUND, {A: near, B: far, BOUND: high}, claims, True) == "inside"
    assert verdict(BOUND, {A: near, B: far, BOUND: Estimate(0.4, 0.3, 0.5, 5)}, claims, True) == "ordering kept"
    alone = Estimate(0.12, float("nan"), float("nan"), 1)
    assert verdict(A, {A: alone}, (A,), True) == "-"
    assert verdict(A, {A: far}, (A,), True) == "not"


def test_one_method_is_compared_over_panels() -> None:
    one, two = Claim("η=1", "A", "steps", 96), Claim("η=4", "A", "steps", 260)
    fast, slow = Estimate(90, 80, 95, 3), Estimate(300, 280, 320, 3)
    assert keeps_order(one, {one: fast, two: slow}, (one, two)) is True
    assert keeps_order(one, {one: slow, two: fast}, (one, two)) is False


def test_running_mean() -> None:
    values = np.array([[1.0, 2.0, 3.0, 4.0], [0.0, 0.0, 0.0, 8.0]])
    assert smooth(values, 2).tolist() == [[1.0, 1.5, 2.5, 3.5], [0.0, 0.0, 0.0, 4.0]]
    assert smooth(values, 1) is values
    assert smooth(values, 100)[:, -1].tolist() == [2.5, 2.0]
