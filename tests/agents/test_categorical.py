"""The detours give what torch gives: softmax, vectorized and differentiated, and draws as frequent as probable."""

import pytest
import torch

from tpo_gym.agents.categorical import SHORT, log_softmax, race, sample, sample_several, softmax

SHAPES = [(7,), (5, 1), (5, 3), (6, 4), (6, 10), (2, 3, 15), (5, 16), (4, 40)]
PAIRS = [(log_softmax, torch.log_softmax), (softmax, torch.softmax)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("ours", "theirs"), PAIRS)
def test_values_and_gradients(shape, ours, theirs):
    torch.manual_seed(0)
    x = (5 * torch.randn(shape, dtype=torch.float64)).requires_grad_()
    weights = torch.randn(shape, dtype=torch.float64)
    value, expected = ours(x), theirs(x, -1)
    torch.testing.assert_close(value, expected, rtol=1e-13, atol=1e-13)
    (gradient,) = torch.autograd.grad((weights * value).sum(), x)
    (wanted,) = torch.autograd.grad((weights * expected).sum(), x)
    torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)


def test_masked_entries_stay_impossible():
    x = torch.tensor([[0.0, -torch.inf, 1.0, -torch.inf, 0.5]], requires_grad=True)
    value = log_softmax(x)
    assert torch.equal(value.isinf(), torch.tensor([[False, True, False, True, False]]))
    value[:, 0].sum().backward()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_lies_in_memory_as_torchs_does_and_vectorizes():
    assert 10 in SHORT
    x = torch.randn(3, 6, 10)
    assert log_softmax(x).is_contiguous()  # torch.multinomial draws its random numbers in the order of memory
    torch.testing.assert_close(torch.func.vmap(log_softmax)(x), torch.log_softmax(x, -1))


def several(probabilities):
    return sample_several(probabilities[::4], 4).flatten()


@pytest.mark.parametrize("draw", [sample, lambda rows: race(rows).squeeze(1), several])
def test_draws_are_as_frequent_as_probable_and_never_impossible(draw):
    torch.manual_seed(0)
    probabilities = torch.tensor([[0.0, 0.5, 0.2, 0.3, 0.0], [0.05, 0.0, 0.0, 0.0, 0.95]])
    drawn = draw(probabilities.repeat_interleave(20_000, 0)).view(2, -1)
    frequencies = torch.stack([torch.bincount(row, minlength=5) / 20_000 for row in drawn])
    assert (frequencies[probabilities == 0] == 0).all()
    error = (probabilities * (1 - probabilities) / 20_000).sqrt()  # of a frequency
    assert ((frequencies - probabilities).abs() <= 4 * error).all()


def test_extreme_random_numbers_lead_to_possible_entries(monkeypatch):
    probabilities = torch.tensor([[0.0, 0.7, 0.3, 0.0]])
    for number, wanted in ((0.0, 1), (1 - 2**-24, 2)):
        monkeypatch.setattr(torch, "rand", lambda *shape, number=number, **_: torch.full(shape, number))
        assert sample(probabilities).tolist() == [wanted]


def test_a_race_takes_the_numbers_that_torch_takes():
    probabilities = torch.rand(50, 7)
    torch.manual_seed(0)
    drawn = race(probabilities)
    torch.manual_seed(0)
    assert torch.equal(drawn, torch.multinomial(probabilities, 1))


def test_several_are_those_that_torch_draws():
    probabilities = torch.rand(50, 7)
    torch.manual_seed(0)
    drawn = sample_several(probabilities, 30)
    torch.manual_seed(0)
    wanted = torch.multinomial(probabilities, 30, replacement=True)
    assert (drawn == wanted).float().mean() > 0.99  # rounding may decide a draw
