"""Every formula against an independent value: hand-worked numbers, float64, enumeration, finite differences."""

import itertools
import math

import pytest
import torch

from tpo_gym.agents import objectives as obj

pytestmark = pytest.mark.filterwarnings("error")


def random_group(n_groups=5, size=6, seed=0, dtype=torch.float64):
    generator = torch.Generator().manual_seed(seed)
    log_probs = 3 * torch.randn(n_groups, size, generator=generator, dtype=dtype)
    scores = torch.randn(n_groups, size, generator=generator, dtype=dtype)
    return log_probs, scores


# The target: spec section 1.


def test_population_deviation():
    uniform = torch.zeros(1, 4)
    target = obj.tpo_target(uniform, torch.tensor([[1.0, 0, 0, 0]]))
    # u = (0.75, -0.25, ...) / (sqrt(3) / 4) = (sqrt 3, -1 / sqrt 3, ...)
    expected = math.exp(3**0.5) / (math.exp(3**0.5) + 3 * math.exp(-(3**-0.5)))
    assert expected == pytest.approx(0.770, abs=5e-4)
    assert target[0, 0].item() == pytest.approx(expected, abs=1e-6)


def test_one_hot_scores_give_the_odds_factor():
    scores = obj.one_hot_scores(torch.tensor([3]), torch.tensor([0.2]), 10)
    assert torch.allclose(obj.standardize(scores)[0, [3, 0]], torch.tensor([3.0, -1 / 3]), atol=1e-6)
    log_probs = torch.log_softmax(torch.randn(1, 10), -1)
    target = obj.tpo_target(log_probs, scores)
    odds = lambda p: p[0, 3] / p[0, 0]  # noqa: E731
    assert (odds(target) / odds(log_probs.exp())).item() == pytest.approx(math.exp(10 / 3), rel=1e-5)


@pytest.mark.parametrize("sign", [1, -1])
def test_only_the_sign_of_a_single_score_matters(sign):
    small, large = (sign * torch.tensor([[0.0, scale, 0.0]]) for scale in (0.01, 50.0))
    assert torch.allclose(obj.standardize(small), obj.standardize(large), atol=1e-5)


def test_scale_invariance():
    zeros = torch.zeros(1, 3)
    one, hundred = (obj.tpo_target(zeros, scale * torch.tensor([[1.0, 0.0, -1.0]])) for scale in (1, 100))
    assert torch.allclose(one, hundred, atol=1e-7)


def test_target_maximizes_the_regularized_score():
    """Proposition 1, against a search over the simplex."""
    log_probs, scores = random_group(1, 3)
    eta = 0.7
    old, u = log_probs.softmax(-1), obj.standardize(scores)

    def value(r):
        return (r * u).sum(-1) - eta * (r * (r / old).log()).sum(-1)

    target = obj.tpo_target(log_probs, scores, eta)
    grid = torch.tensor([(i, j, 400 - i - j) for i in range(1, 399) for j in range(1, 400 - i)], dtype=torch.float64)
    best = grid[value(grid / 400).argmax()] / 400
    assert torch.allclose(target[0], best, atol=2 / 400)
    assert value(target).item() >= value(grid / 400).max().item()


@pytest.mark.parametrize("anchor", obj.ANCHORS)
def test_gradient_is_p_minus_q(anchor):
    log_probs, scores = random_group()
    old = log_probs + torch.randn_like(log_probs)
    log_probs.requires_grad_()
    target = obj.tpo_target(old, scores, 0.5, anchor)
    obj.tpo_loss(log_probs, target, old, anchor).sum().backward()
    p = obj.group_log_policy(log_probs.detach(), old, anchor).exp()
    assert torch.allclose(log_probs.grad, p - target, atol=1e-12)


@pytest.mark.parametrize("anchor", ["old", "ratio"])
def test_stationary_point_moves_log_ratios_by_score_differences(anchor):
    """Where the loss is stationary, every pairwise log-ratio has moved by (u_i - u_j) / η: in both anchored forms."""
    old, scores = random_group(4, 5)
    eta = 2.0
    target = obj.tpo_target(old, scores, eta, anchor)
    new = old + obj.standardize(scores) / eta
    p = obj.group_log_policy(new, old, anchor).exp()
    assert torch.allclose(p, target, atol=1e-12)


def test_zero_variance_group_is_neutral_at_the_snapshot_and_an_anchor_later():
    old = torch.randn(3, 4, dtype=torch.float64)
    target = obj.tpo_target(old, torch.full((3, 4), 0.35))
    assert torch.allclose(target, old.softmax(-1), atol=1e-12)
    moved = (old + 0.3 * torch.randn_like(old)).requires_grad_()
    obj.tpo_loss(moved, target).sum().backward()
    drift = moved.detach().softmax(-1) - old.softmax(-1)
    assert torch.allclose(moved.grad, drift, atol=1e-12)
    assert moved.grad.abs().max() > 0.01


@pytest.mark.parametrize("value", [0.1, 0.35, 0.95, 1e4 + 0.1, -7.3e8, 0.0])
@pytest.mark.parametrize("size", [2, 7, 8, 33])
def test_rounding_residue_is_not_variance(value, size):
    scores = torch.full((1, size), value)
    assert obj.standardize(scores).abs().max() == 0
    assert obj.group_advantages(scores).abs().max() == 0
    assert obj.zero_variance(scores).all()
    one_ulp_apart = scores.clone()
    one_ulp_apart[0, -1] = torch.nextafter(scores[0, -1], torch.tensor(torch.inf))
    assert obj.group_advantages(one_ulp_apart).abs().max() < 1e-3


def test_tiny_rewards_give_a_stable_vanishing_signal():
    u = obj.standardize(1e-8 * torch.tensor([[1.0, 0.0, 0.0]]))
    assert torch.isfinite(u).all()
    assert u.abs().max() < 1e-7


def test_std_floor_softens_tiny_variances():
    scores = torch.tensor([[0.001, 0.0, 0.0]])
    assert obj.standardize(scores)[0, 0].item() == pytest.approx(2**0.5, rel=1e-4)
    assert obj.standardize(scores, std_floor=0.1)[0, 0].item() == pytest.approx(0.001 * 2 / 3 / 0.1, rel=1e-4)
    wide = torch.tensor([[1.0, 0.0, 0.0]])
    assert torch.equal(obj.standardize(wide, std_floor=0.1), obj.standardize(wide))


def test_excluded_candidates_do_not_vote():
    log_probs, scores = random_group(3, 5)
    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[:, 1] = False
    mask[0, 0] = False
    wild = scores.clone()
    wild[:, 1] = 100.0
    for row in range(3):
        kept = mask[row]
        alone = obj.tpo_target(log_probs[row : row + 1, kept], scores[row : row + 1, kept])
        target = obj.tpo_target(log_probs, wild, mask=mask)[row]
        assert torch.allclose(target[kept], alone[0], atol=1e-12)
        assert (target[~kept] == 0).all()
    log_probs.requires_grad_()
    obj.tpo_loss(log_probs, obj.tpo_target(log_probs, wild, mask=mask), mask=mask).sum().backward()
    assert torch.isfinite(log_probs.grad).all()
    assert (log_probs.grad[~mask] == 0).all()


@pytest.mark.parametrize("gap", [50.0, 100.0, 1000.0])
def test_gradients_stay_finite_for_large_log_ratios(gap):
    new = torch.tensor([[0.0, gap, -gap]], requires_grad=True)
    old = torch.tensor([[gap, 0.0, 0.0]])
    scores = torch.tensor([[1.0, 0.0, -1.0]])
    advantages = obj.group_advantages(scores)
    for anchor in obj.ANCHORS:
        target = obj.tpo_target(old, scores, anchor=anchor)
        assert torch.isfinite(target).all()
        check_finite(obj.tpo_loss(new, target, old, anchor), new)
    check_finite(obj.grpo_loss(new, old, advantages), new)
    check_finite(obj.gspo_loss(new, old, advantages, torch.full((1, 3), 5.0)), new)
    check_finite(obj.rebel_loss(new, old, scores), new)
    check_finite(obj.policy_gradient_loss(new, obj.dg_weights(new, advantages)), new)


def check_finite(loss, leaf):
    (gradient,) = torch.autograd.grad(loss.sum(), leaf)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(gradient).all()


def test_low_precision_inputs_are_computed_in_float32():
    log_probs, scores = random_group(dtype=torch.float32)
    low = log_probs.bfloat16()
    target = obj.tpo_target(low, scores)
    assert target.dtype == torch.float32
    assert torch.allclose(target, obj.tpo_target(low.double(), scores.double()).float(), atol=1e-6)
    assert torch.allclose(target.sum(-1), torch.ones(5), atol=1e-6)


def test_length_normalization_divides_by_the_groups_mean_length():
    log_probs, scores = random_group(2, 4)
    lengths = torch.tensor([[3, 5, 8, 4], [100, 100, 100, 100]])
    log_p = obj.group_log_policy(log_probs, lengths=lengths)
    expected = torch.log_softmax(log_probs / torch.tensor([[5.0], [100.0]], dtype=torch.float64), -1)
    assert torch.allclose(log_p, expected, atol=1e-12)
    assert torch.allclose(
        obj.tpo_target(log_probs, scores, lengths=lengths),
        torch.softmax(expected + obj.standardize(scores), -1),
        atol=1e-12,
    )


@pytest.mark.parametrize("eta", [0.0, -1.0, float("nan")])
def test_eta_must_be_positive(eta):
    with pytest.raises(ValueError, match="eta must be positive"):
        obj.tpo_target(torch.zeros(1, 2), torch.zeros(1, 2), eta)


def test_unknown_anchor():
    with pytest.raises(ValueError, match=r"Unknown anchor 'olde'.*'ratio'"):
        obj.tpo_target(torch.zeros(1, 2), torch.zeros(1, 2), anchor="olde")


def test_first_loss_is_the_groups_entropy_not_zero():
    """ln K for a uniform group, and H(q) where the policy has reached the target (not 0)."""
    scores = torch.tensor([[1.0, 0, 0, 0, 0, 0, 0, 0]])
    neutral = obj.tpo_target(torch.zeros(1, 8), torch.zeros(1, 8))
    assert obj.tpo_loss(torch.zeros(1, 8), neutral).item() == pytest.approx(math.log(8))
    target = obj.tpo_target(torch.zeros(1, 8), scores)
    entropy = -(target * target.log()).sum().item()
    assert obj.tpo_loss(target.log(), target).item() == pytest.approx(entropy, abs=1e-6)


# Section 4.2 of the spec: coefficients in a tabular task, by enumerating the sampled action.


@pytest.mark.parametrize(("p", "tpo", "dg", "grpo"), [(0.1, 0.73, 0.09, 0.33)])
def test_multi_context_coefficients(p, tpo, dg, grpo):
    """Coefficient of v = e_y - π in each method's population update, at p = π(y)."""
    policy = torch.full((10,), (1 - p) / 9, dtype=torch.float64)
    policy[0] = p
    log_policy = policy.log().unsqueeze(0)
    v = -policy.clone()
    v[0] += 1
    scores = torch.zeros(1, 10, dtype=torch.float64)
    scores[0, 0] = 1
    q = obj.tpo_target(log_policy, scores)
    assert torch.allclose((q - policy)[0], v * (q[0, 0] - p) / (1 - p), atol=1e-12)
    assert ((q[0, 0] - p) / (1 - p)).item() == pytest.approx(tpo, abs=6e-3)
    # With reward 1 only for y and no baseline, the sampled action is y with probability p: p · weight · (e_y - π).
    weight = obj.dg_weights(log_policy[0, :1], torch.ones(1, dtype=torch.float64)).item()
    assert p * weight == pytest.approx(p / (1 + p), abs=1e-12)
    assert p * weight == pytest.approx(dg, abs=2e-3)
    # A large population z-scored: A(y) = (1 - p) / σ, A(other) = -p / σ with σ = sqrt(p (1 - p)).
    n = 1000
    rewards = torch.tensor([[1.0] * int(p * n) + [0.0] * int((1 - p) * n)], dtype=torch.float64)
    advantages = obj.group_advantages(rewards)[0]
    coefficient = p * (advantages[0] - advantages[-1])
    assert coefficient.item() == pytest.approx((p / (1 - p)) ** 0.5, abs=1e-6)
    assert coefficient.item() == pytest.approx(grpo, abs=4e-3)


def test_expected_bandit_updates_by_enumeration():
    """MNIST's feedback over the ten sampled actions: Group PG is 6 x PG, and TPO's update is q - π on average."""
    policy = torch.softmax(torch.randn(10, dtype=torch.float64, generator=torch.Generator().manual_seed(3)), -1)
    label, baseline = 4, policy.square().sum()
    totals = {name: torch.zeros(10, dtype=torch.float64) for name in ("pg", "group_pg", "tpo")}
    for action in range(10):
        logits = policy.log().unsqueeze(0).requires_grad_()
        log_policy = torch.log_softmax(logits, -1)
        advantage = (float(action == label) - baseline).unsqueeze(0)
        index = torch.tensor([action])
        scores = obj.one_hot_scores(index, advantage, 10)
        u = obj.standardize(scores)
        sampled_u = obj.one_hot_scores(index, u[:, action], 10)
        losses = {
            "pg": obj.policy_gradient_loss(log_policy, scores),
            "group_pg": obj.policy_gradient_loss(log_policy, sampled_u),
            "tpo": obj.tpo_loss(log_policy, obj.tpo_target(log_policy, scores)),
        }
        for name, loss in losses.items():
            (gradient,) = torch.autograd.grad(loss.sum(), logits, retain_graph=True)
            totals[name] -= policy[action] * gradient[0]
    v = -policy.clone()
    v[label] += 1
    assert torch.allclose(totals["pg"], policy[label] * v, atol=1e-12)
    assert torch.allclose(totals["group_pg"], 6 * totals["pg"], atol=1e-12)
    # TPO by hand: an advantage of sign ± multiplies the sampled action's odds by λ = exp(±10 / 3).
    expected = torch.zeros(10, dtype=torch.float64)
    for action in range(10):
        factor = math.exp((1 if action == label else -1) * 10 / 3)
        tilted = policy.clone()
        tilted[action] *= factor
        expected += policy[action] * (tilted / tilted.sum() - policy)
    assert torch.allclose(totals["tpo"], expected, atol=1e-12)


# The other objectives.


def test_group_advantages_by_hand():
    advantages = obj.group_advantages(torch.tensor([[1.0, 0, 0, 0]], dtype=torch.float64))
    assert torch.allclose(advantages, torch.tensor([[3.0, -1, -1, -1]], dtype=torch.float64) / 3**0.5, atol=1e-6)
    assert obj.centred_advantages(torch.tensor([[3.0, 1.0]])).tolist() == [[1.0, -1.0]]
    assert obj.leave_one_out_advantages(torch.tensor([[3.0, 1.0, 2.0]])).tolist() == [[1.5, -1.5, 0.0]]


def test_leave_one_out_needs_two():
    with pytest.raises(ValueError, match="at least two candidates"):
        obj.leave_one_out_advantages(torch.zeros(3, 1))


def grpo_by_hand(new, old, advantages, low, high, beta):
    total = 0.0
    for n, o, a in zip(new, old, advantages, strict=True):
        r = min(max(n - o, -20), 20)
        ratio = math.exp(r)
        total += min(ratio * a, min(max(ratio, 1 - low), 1 + high) * a) - beta * (math.exp(-r) + r - 1)
    return -total


@pytest.mark.parametrize(("high", "beta"), [(None, 0.04), (None, 0.0), (0.28, 0.0)])
def test_grpo_by_hand(high, beta):
    new, old = torch.randn(2, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).mul(0.4)
    advantages = torch.randn(4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    losses = obj.grpo_loss(new, old, advantages, 0.2, beta, high)
    for row in range(4):
        by_hand = grpo_by_hand(new[row].tolist(), old[row].tolist(), advantages[row].tolist(), 0.2, high or 0.2, beta)
        assert losses[row].item() == pytest.approx(by_hand, rel=1e-12)


def test_grpo_with_a_ratio_per_decision_sums_the_decisions():
    new, old = torch.randn(2, 3, 4, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).mul(0.3)
    advantages = torch.randn(3, 4, 1, dtype=torch.float64)
    by_step = obj.grpo_loss(new, old, advantages, beta=0.04)
    flat = obj.grpo_loss(new.flatten(1), old.flatten(1), advantages.expand_as(new).flatten(1), beta=0.04)
    assert torch.allclose(by_step, flat, atol=1e-12)


def test_gspo_uses_the_geometric_mean_ratio():
    new = torch.tensor([[-8.0, -4.0]], dtype=torch.float64)
    old = torch.tensor([[-9.0, -4.0]], dtype=torch.float64)
    lengths = torch.tensor([[10.0, 2.0]], dtype=torch.float64)
    advantages = torch.tensor([[1.0, -1.0]], dtype=torch.float64)
    loss = obj.gspo_loss(new, old, advantages, lengths, clip_range=0.5, clip_range_high=0.5)
    assert loss.item() == pytest.approx(-(math.exp(0.1) - 1) / 2, rel=1e-12)


def test_gradients_at_the_snapshot_equal_the_policy_gradient():
    """At π_θ = π_old the clipped surrogates' gradient is that of -A log π."""
    old, scores = random_group()
    advantages = obj.group_advantages(scores)
    for loss_of in (
        lambda x: obj.grpo_loss(x, old, advantages),
        lambda x: obj.gspo_loss(x, old, advantages, torch.ones_like(old)) * old.shape[1],
    ):
        leaf = old.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(leaf).sum(), leaf)
        assert torch.allclose(gradient, -advantages, atol=1e-12)


def test_dg_gate_by_hand():
    log_probs = torch.tensor([[math.log(0.25)]], dtype=torch.float64)
    weights = obj.dg_weights(log_probs, torch.tensor([[-2.0]], dtype=torch.float64), eta=0.5)
    assert weights.item() == pytest.approx(-2 / (1 + math.exp(2 * math.log(4) / 0.5)), rel=1e-12)


def test_rebel_over_all_pairs():
    new, old = torch.randn(2, 1, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(5))
    scores = torch.tensor([[1.0, 0.0, 2.0, -1.0]], dtype=torch.float64)
    ratio = ((new - old) / 0.5)[0].tolist()
    pairs = list(itertools.permutations(range(4), 2))
    by_hand = sum(((ratio[i] - ratio[j]) - (scores[0, i] - scores[0, j]).item()) ** 2 for i, j in pairs) / len(pairs)
    assert obj.rebel_loss(new, old, scores, eta=0.5).item() == pytest.approx(by_hand, rel=1e-12)


def test_awr_weights_by_hand():
    weights = obj.awr_weights(torch.tensor([[1.0, -1.0]], dtype=torch.float64), beta=0.5)
    assert weights[0].tolist() == pytest.approx([math.exp(2), math.exp(-2)], rel=1e-9)
    assert obj.awr_weights(torch.tensor([[1.0, -1.0]]), beta=0.1).max().item() == pytest.approx(20, rel=1e-5)


def test_step_advantages_by_hand():
    rewards = torch.tensor([[[1.0, 0.0, 1.0]], [[0.0, 0.0, 9.0]]])
    mask = torch.tensor([[[True, True, True]], [[True, True, False]]])
    rewards = rewards * mask
    none = {"baseline": None, "mask": mask, "rewards": rewards}
    assert obj.step_advantages(credit="own", **none).tolist() == rewards.tolist()
    assert obj.step_advantages(credit="to_go", **none).tolist() == [[[2.0, 1.0, 1.0]], [[0.0, 0.0, 0.0]]]
    assert obj.step_advantages(credit="return", **none).tolist() == [[[2.0, 2.0, 2.0]], [[0.0, 0.0, 0.0]]]
    batch = obj.step_advantages(rewards, mask, "to_go", "batch")
    assert batch.tolist() == [[[1.0, 0.5, 0.0]], [[-1.0, -0.5, 0.0]]]  # only one episode reaches the third step
    assert obj.step_advantages(rewards, mask, "own", 0.5).tolist() == [[[0.5, -0.5, 0.5]], [[-0.5, -0.5, 0.0]]]
    with pytest.raises(ValueError, match="Unknown credit"):
        obj.step_advantages(rewards, mask, "mine")


def test_kl_divergence_by_hand():
    q = torch.tensor([[0.5, 0.5, 0.0]], dtype=torch.float64)
    p = torch.tensor([[0.25, 0.5, 0.25]], dtype=torch.float64)
    assert obj.kl_divergence(q, p.log()).item() == pytest.approx(0.5 * math.log(2), rel=1e-12)
    assert obj.kl_divergence(q, torch.tensor([[0.5, 0.5, 0.0]]).double().log()).item() == pytest.approx(0, abs=1e-12)


def test_kl_penalty_is_the_named_estimator():
    r = torch.tensor([0.3, -0.2, 50.0], dtype=torch.float64)
    expected = [math.exp(-0.3) + 0.3 - 1, math.exp(0.2) - 0.2 - 1, math.exp(-20) + 20 - 1]
    assert obj.kl_penalty(obj.bounded(r)).tolist() == pytest.approx(expected, rel=1e-12)


def test_mean_log_probs_divide_each_candidate_by_its_own_length():
    means = obj.mean_log_probs(torch.tensor([[-6.0, -5.0, 0.0]]), torch.tensor([[3, 1, 0]]))
    assert means.tolist() == [[-2.0, -5.0, 0.0]]


def test_total_variation_by_hand():
    q, p = torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]), torch.tensor([[0.25, 0.5, 0.25], [1.0, 0.0, 0.0]])
    assert obj.total_variation(q, p).tolist() == [0.25, 1.0]
