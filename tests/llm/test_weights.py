"""The weights against autograd through the objective itself, in any split of the candidates. No language model."""

import itertools
import subprocess
import sys

import pytest
import torch

from tpo_gym.agents import objectives as obj
from tpo_gym.llm.weights import GROUP_POLICIES, METHODS, SaturationWatch, WeightOptions, candidate_weights

pytestmark = pytest.mark.filterwarnings("error")


@pytest.fixture
def batch():
    """Log-probabilities of a small model's candidates: linear logits over a vocabulary, ragged lengths."""
    generator = torch.Generator().manual_seed(0)
    groups, size, length, vocabulary = 3, 5, 7, 11
    lengths = torch.randint(1, length + 1, (groups, size), generator=generator)
    tokens = torch.randint(vocabulary, (groups, size, length), generator=generator)
    features = torch.randn(groups, size, length, 4, generator=generator, dtype=torch.float64)
    head = torch.randn(4, vocabulary, generator=generator, dtype=torch.float64)
    exists = torch.arange(length) < lengths.unsqueeze(-1)

    def log_probs(head):
        chosen = torch.log_softmax(features @ head, -1).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
        return (chosen * exists).sum(-1)

    scores = torch.rand(groups, size, generator=generator, dtype=torch.float64)
    scores[1] = 0.3  # a group without a signal
    return log_probs, head, scores, lengths


def objective(new, old, scores, lengths, options):
    """The definitions, written out for the test."""
    u = (scores - scores.mean(-1, keepdim=True)) / scores.std(-1, correction=0, keepdim=True)
    u = torch.nan_to_num(u, nan=0.0, posinf=0.0, neginf=0.0)
    u[scores.amax(-1) == scores.amin(-1)] = 0.0
    if options.method == "group_pg":
        return -(u * new).sum(-1)
    if options.method == "target_po":
        if options.group_policy == "mean":
            new, old = new / lengths, old / lengths
        if options.group_policy == "ratio":
            new, old = new - old, torch.zeros_like(old)
        q = torch.softmax(torch.log_softmax(old, -1) + u / options.eta, -1)
        return -(q * torch.log_softmax(new, -1)).sum(-1)
    ratio = new - old if options.method == "grpo" else (new - old) / lengths
    low, high = (0.2, 0.2) if options.method == "grpo" else (3e-4, 4e-4)
    value = torch.minimum(ratio.exp() * u, ratio.exp().clamp(1 - low, 1 + high) * u)
    if options.method == "gspo":
        return -value.mean(-1)
    return -(value - 0.04 * (torch.exp(-ratio) + ratio - 1)).sum(-1)


CASES = [("target_po", policy) for policy in GROUP_POLICIES] + [(method, "sum") for method in METHODS[1:]]


@pytest.mark.parametrize("epoch", [0, 1])
@pytest.mark.parametrize(("method", "group_policy"), CASES)
def test_gradients_over_any_split_are_those_of_the_whole(batch, method, group_policy, epoch):
    log_probs, head, scores, lengths = batch
    options = WeightOptions(method, group_policy, eta=0.7)
    old = log_probs(head)
    moved = head + 0.02 * epoch * torch.randn(head.shape, generator=torch.Generator().manual_seed(1)).double()

    leaf = moved.clone().requires_grad_()
    losses = objective(log_probs(leaf), old, scores, lengths, options)
    (expected,) = torch.autograd.grad(losses.mean(), leaf)

    result = candidate_weights(log_probs(moved), old, scores, options, lengths=lengths)
    assert torch.allclose(result.loss, losses, rtol=1e-6)  # GRPO's deviation carries + 1e-8
    order = torch.randperm(scores.numel(), generator=torch.Generator().manual_seed(2))
    total = torch.zeros_like(head)
    for part in order.split(4):  # no group is whole in any part
        leaf = moved.clone().requires_grad_()
        loss = -(result.weights.flatten()[part] * log_probs(leaf).flatten()[part]).sum()
        total += torch.autograd.grad(loss, leaf)[0]
    assert (total - expected).norm() <= 1e-6 * expected.norm()


def test_target_po_weights_are_q_minus_p(batch):
    log_probs, head, scores, _ = batch
    old = log_probs(head)
    for policy, p in (("sum", old.softmax(-1)), ("ratio", torch.full_like(old, 1 / 5))):
        result = candidate_weights(old, old, scores, WeightOptions(group_policy=policy))
        q = obj.tpo_target(old, scores, anchor="ratio" if policy == "ratio" else "old")
        assert torch.allclose(result.weights, (q - p) / 3, atol=1e-12)
        assert result.weights[1].abs().max() < 1e-15  # equal scores: nothing to do at the snapshot
        assert result.metrics["tv"].item() == pytest.approx(((q - p).abs().sum(-1) / 2)[[0, 2]].mean().item())
        assert result.metrics["max_p"].item() == pytest.approx(p.amax(-1).mean().item())
        assert result.metrics["active_groups"].item() == pytest.approx(2 / 3)
        assert result.metrics["log_prob_spread"].item() == pytest.approx((old.amax(-1) - old.amin(-1)).mean().item())
        assert result.metrics["cross_entropy"] == result.metrics["loss"]


def test_the_sum_saturates_where_the_mean_and_the_ratio_do_not():
    """Completions of 30 to 60 tokens, as a language model gives them: nats apart."""
    lengths = torch.tensor([[30, 40, 50, 60]])
    old = -1.2 * lengths.double()
    scores = torch.tensor([[0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
    distance = {
        policy: candidate_weights(old, old, scores, WeightOptions(group_policy=policy), lengths=lengths).metrics["tv"]
        for policy in GROUP_POLICIES
    }
    assert distance["sum"] < 1e-8
    assert min(distance["mean"], distance["ratio"]) > 0.5


# GSPO takes the mean over the group's size, so there leaving candidates out changes the scale.
@pytest.mark.parametrize(("method", "group_policy"), [case for case in CASES if case[0] != "gspo"])
def test_masked_candidates_have_no_vote(batch, method, group_policy):
    log_probs, head, scores, lengths = batch
    options = WeightOptions(method, group_policy)
    old = log_probs(head)
    new = old + 0.1 * torch.randn(old.shape, generator=torch.Generator().manual_seed(1)).double()
    mask = torch.ones_like(old, dtype=torch.bool)
    mask[:, 2] = False
    kept = [0, 1, 3, 4]
    without = candidate_weights(new[:, kept], old[:, kept], scores[:, kept], options, lengths=lengths[:, kept])
    scores[:, 2] = 100.0
    result = candidate_weights(new, old, scores, options, lengths=lengths, mask=mask)
    assert torch.allclose(result.weights[:, kept], without.weights, atol=1e-12)
    assert (result.weights[:, 2] == 0).all()
    for name, value in without.metrics.items():
        assert result.metrics[name].item() == pytest.approx(value.item(), abs=1e-12), name


def test_without_gradient_and_in_low_precision():
    log_probs = torch.tensor([[-10.0, -12.0], [-3.0, -3.5]], dtype=torch.bfloat16)
    scores = torch.tensor([[1.0, 0.0], [0.0, 0.0]])
    with torch.no_grad():
        result = candidate_weights(log_probs, log_probs, scores, WeightOptions(group_policy="sum"))
    assert not result.weights.requires_grad
    expected = candidate_weights(log_probs.float(), log_probs.float(), scores, WeightOptions(group_policy="sum"))
    assert torch.allclose(result.weights.float(), expected.weights, atol=2e-3)


BAD = {
    "method": ({"method": "tpo"}, "Unknown method 'tpo'.*'target_po'"),
    "group_policy": ({"group_policy": "max"}, "Unknown group_policy 'max'.*'ratio'"),
    "eta": ({"eta": 0.0}, "eta must be positive, got 0.0"),
    "eta nan": ({"eta": float("nan")}, "eta must be positive, got nan"),
    "std_floor": ({"std_floor": -1.0}, "std_floor must not be negative, got -1.0"),
    "clip_range": ({"clip_range": 1.5}, "clip_range must lie between 0 and 1.*1.5"),
    "clip_range_high": ({"clip_range_high": 0.0}, "clip_range_high must be positive"),
    "old_kl_coef": ({"old_kl_coef": -0.1}, "old_kl_coef must not be negative"),
}


@pytest.mark.parametrize(("arguments", "message"), BAD.values(), ids=BAD.keys())
def test_bad_options(arguments, message):
    with pytest.raises(ValueError, match=message):
        WeightOptions(**arguments)


def test_bad_tensors():
    two = torch.zeros(2, 2)
    with pytest.raises(ValueError, match=r"at least two candidates, got \(2, 1\)"):
        candidate_weights(two[:, :1], two[:, :1], two[:, :1])
    with pytest.raises(ValueError, match=r"scores has shape \(4,\), log_probs \(2, 2\)"):
        candidate_weights(two, two, torch.zeros(4))
    for options, named in ((WeightOptions("gspo"), "gspo"), (WeightOptions(group_policy="mean"), "mean")):
        with pytest.raises(ValueError, match=f"'{named}' needs lengths"):
            candidate_weights(two, two, two, options)
    with pytest.raises(ValueError, match="Group 1 has no candidate that counts"):
        candidate_weights(two, two, two, mask=torch.tensor([[True, True], [False, False]]))


@pytest.mark.parametrize(("position", "name"), [(0, "log_probs"), (1, "old_log_probs"), (2, "scores")])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_values_that_are_not_finite_are_named(position, name, value):
    tensors = [torch.zeros(2, 3) for _ in range(3)]
    tensors[position][1, 2] = value
    with pytest.raises(ValueError, match=rf"^{name} of candidate 2 in group 1 is {value}.*mask the candidate"):
        candidate_weights(*tensors)
    mask = torch.ones(2, 3, dtype=torch.bool)
    mask[1, 2] = False
    for method, policy in itertools.product(["target_po", "grpo", "group_pg"], ["sum", "ratio"]):
        result = candidate_weights(*tensors, WeightOptions(method, policy), mask=mask)
        assert torch.isfinite(result.weights).all()
        assert all(torch.isfinite(value) for value in result.metrics.values())


def test_saturation_watch_speaks_once_after_a_run_of_small_distances():
    watch = SaturationWatch(patience=3)
    assert [watch.saturated(distance) for distance in (0.001, 0.002, 0.3, 0.0, 0.0, 0.0, 0.0)] == [False] * 5 + [
        True,
        False,
    ]
    message = watch.message(WeightOptions(group_policy="sum", eta=2.0))
    assert "group_policy='sum' and eta=2.0" in message
    assert "Use group_policy='mean' or 'ratio'" in message
    assert not any(SaturationWatch(patience=0).saturated(0.0) for _ in range(50))
    with pytest.raises(ValueError, match="patience must not be negative, got -1"):
        SaturationWatch(-1)


def test_no_engine_is_imported():
    code = (
        "import sys, tpo_gym.llm, tpo_gym.llm.weights; "
        "print([name for name in ('trl', 'transformers', 'verl', 'peft') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
