"""Muon on matrices, Adam on the rest: each parameter exactly once, and both as the reference does it."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tpo_gym.agents.optimizers import MuonAdamW, take_step
from tpo_gym.agents.transformer import CausalTransformer


def parameters_of(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


def stepped(module, optimizer, seed=0):
    torch.manual_seed(seed)
    before = [p.detach().clone() for p in module.parameters()]
    for parameter in module.parameters():
        if parameter.requires_grad:
            parameter.grad = torch.randn_like(parameter)
    optimizer.step()
    return before


def test_every_parameter_is_covered_once_and_moves():
    model = CausalTransformer(vocab_size=3, max_length=8, d_model=16)
    optimizer = MuonAdamW(model.parameters(), lr=0.01)
    covered = parameters_of(optimizer)
    assert len(covered) == len({id(p) for p in covered}) == len(list(model.parameters()))
    for before, parameter in zip(stepped(model, optimizer), model.parameters(), strict=True):
        assert not torch.equal(before, parameter)


def test_matrices_go_to_muon_and_attention_stays_out():
    model = CausalTransformer(vocab_size=3, max_length=8, d_model=16)
    muon = next(inner for inner in MuonAdamW(model.parameters())._inner if isinstance(inner, torch.optim.Muon))
    names = {id(p): name for name, p in model.named_parameters()}
    in_muon = {names[id(p)] for p in parameters_of(muon)}
    ffn = {f"blocks.{i}.{layer}.weight" for i in range(2) for layer in ("ffn_in", "ffn_out")}
    assert in_muon == {"token_table", "position_table", *ffn}


def test_frozen_and_tied_parameters():
    module = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    module["b"].weight = module["a"].weight
    module["a"].bias.requires_grad_(False)
    optimizer = MuonAdamW(module.parameters(), lr=0.1)
    assert len(parameters_of(optimizer)) == 3
    frozen, tied = module["a"].bias.clone(), module["a"].weight.detach().clone()
    stepped(module, optimizer)
    assert torch.equal(module["a"].bias, frozen)
    assert torch.linalg.svdvals(module["a"].weight - tied).mean() < 0.13  # one step of lr 0.1, not two


def test_update_sizes_are_those_of_the_reference():
    """Muon's step has singular values near 1, times lr · sqrt(max(1, fan_out / fan_in)).

    Adam's first step is ``lr · (β m̂ + (1 - β) ĝ) / |g|``, whose Nesterov part looks one step ahead.
    """
    model = CausalTransformer(vocab_size=2, max_length=20, d_model=64)
    before = stepped(model, MuonAdamW(model.parameters(), lr=0.01))
    sizes = {}
    for (name, parameter), old in zip(model.named_parameters(), before, strict=True):
        update = (parameter - old).detach()
        if parameter.ndim == 2:
            sizes[name] = torch.linalg.svdvals(update).mean().item() / 0.01
        else:
            assert update.abs().mean().item() == pytest.approx(0.01 * (1 + 0.9 * 0.1 / (1 - 0.9**2)), rel=1e-2)
    assert sizes["token_table"] == pytest.approx(math.sqrt(64 / 2), rel=0.35)
    assert sizes["position_table"] == pytest.approx(math.sqrt(64 / 20), rel=0.35)
    assert sizes["blocks.0.ffn_in.weight"] == pytest.approx(2, rel=0.35)
    assert sizes["blocks.0.ffn_out.weight"] == pytest.approx(1, rel=0.35)


def waves(step, shape):
    return torch.sin(torch.arange(1, math.prod(shape) + 1, dtype=torch.float64) * (step + 1)).view(shape).float()


def test_it_equals_the_references_optimizer():
    """Against numbers of optax.contrib.muon (0.2.8): learning rate 0.02, weight decay 0.1, three steps."""
    weight = nn.Parameter(torch.cos(torch.arange(15.0)).view(3, 5))
    bias = nn.Parameter(torch.cos(torch.arange(4.0)))
    optimizer = MuonAdamW([weight, bias], lr=0.02, weight_decay=0.1)
    for step in range(3):
        weight.grad, bias.grad = waves(step, (3, 5)), waves(step, (4,))
        optimizer.step()
    expected = [
        [0.9621571, 0.5199895, -0.4217307, -0.9814512, -0.6253865],
        [0.2943287, 0.9205533, 0.7276505, -0.1537215, -0.8938376],
        [-0.8196348, 0.0218417, 0.8098621, 0.8849871, 0.1367480],
    ]
    torch.testing.assert_close(weight.detach(), torch.tensor(expected), rtol=0, atol=1e-6)
    torch.testing.assert_close(
        bias.detach(), torch.tensor([0.9277610, 0.5213377, -0.4401794, -0.9620377]), rtol=0, atol=1e-6
    )


def test_without_nesterov_it_is_plain_muon_and_adamw():
    """The first step of a matrix with orthonormal rows is the iteration's polynomial of 1 / sqrt(rows), five times."""
    weight, bias = nn.Parameter(torch.zeros(2, 3)), nn.Parameter(torch.ones(3))
    optimizer = MuonAdamW([weight, bias], lr=0.1, nesterov=False)
    other = nn.Parameter(torch.ones(3))
    adamw = torch.optim.AdamW([other], lr=0.1, weight_decay=0.0)
    value = 1 / math.sqrt(2)
    for _ in range(5):
        value = 3.4445 * value - 4.775 * value**3 + 2.0315 * value**5
    weight.grad = torch.tensor([[2.0, 0, 0], [0, 0, 2.0]])
    bias.grad = other.grad = waves(0, (3,))
    optimizer.step()
    adamw.step()
    expected = -0.1 * value * torch.tensor([[1.0, 0, 0], [0, 0, 1.0]])
    torch.testing.assert_close(weight.detach(), expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(bias, other)


@pytest.mark.parametrize("restore", ["state_dict", "deepcopy"])
def test_state_survives(restore):
    module = nn.Linear(6, 4)
    optimizer = MuonAdamW(module.parameters(), lr=0.02)
    stepped(module, optimizer)
    if restore == "deepcopy":
        twin, twin_optimizer = copy.deepcopy((module, optimizer))
    else:
        twin = copy.deepcopy(module)
        twin_optimizer = MuonAdamW(twin.parameters(), lr=0.5)
        twin_optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for group in (*optimizer.param_groups, *twin_optimizer.param_groups):
        assert group["lr"] == 0.02
    stepped(module, optimizer, seed=1)
    stepped(twin, twin_optimizer, seed=1)
    assert torch.equal(module.weight, twin.weight)
    assert torch.equal(module.bias, twin.bias)


def test_the_learning_rate_is_set_through_param_groups():
    module = nn.Linear(3, 3)
    optimizer = MuonAdamW(module.parameters(), lr=0.02)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    before = stepped(module, optimizer)
    assert all(torch.equal(old, new) for old, new in zip(before, module.parameters(), strict=True))


def test_a_state_of_other_optimizers_is_refused():
    with pytest.raises(ValueError, match="this optimizer holds"):
        MuonAdamW(nn.Linear(3, 3).parameters()).load_state_dict({"Adam": {}})


def test_matrices_move_together_as_alone():
    """Small ones of several shapes, tall and wide, two large ones, one without a gradient."""
    shapes = [(8, 32), (32, 8), (8, 32), (6, 6), (8, 2), (8, 2), (200, 180), (200, 180), (3, 5)]
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape)) for shape in shapes]
    alone = [nn.Parameter(p.detach().clone()) for p in ours]
    optimizer = MuonAdamW(ours, lr=0.02, weight_decay=0.1)
    others = [MuonAdamW([p], lr=0.02, weight_decay=0.1) for p in alone]
    for _ in range(4):
        for p, q in zip(ours[:-1], alone[:-1], strict=True):
            p.grad = torch.randn(p.shape)
            q.grad = p.grad.clone()
        for each in (optimizer, *others):
            each.step()
    for p, q in zip(ours, alone, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-5)
    assert torch.equal(ours[-1], alone[-1])


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_the_rest_equals_torchs_nadam(weight_decay):
    """Also where a gradient is missing for a step, where a state is saved in between, and with torch's own state."""
    torch.manual_seed(0)
    ours = [nn.Parameter(torch.randn(shape, dtype=torch.float64)) for shape in [(3,), (2, 3, 4), (), (5,)]]
    theirs = [nn.Parameter(p.detach().clone()) for p in ours]
    constant = dict(momentum_decay=1e6, decoupled_weight_decay=True)
    reference = torch.optim.NAdam(theirs, lr=0.02, weight_decay=weight_decay, **constant)
    optimizer = MuonAdamW(ours, lr=0.02, weight_decay=weight_decay)
    for step in range(6):
        if step == 3:
            optimizer, state = MuonAdamW(ours, lr=0.5), optimizer.state_dict()
            optimizer.load_state_dict(copy.deepcopy(state))
        if step == 5:  # a file of before this optimizer held torch's
            optimizer = MuonAdamW(ours, lr=0.5)
            optimizer.load_state_dict({"NAdam": copy.deepcopy(reference.state_dict())})
        for i, (p, q) in enumerate(zip(ours, theirs, strict=True)):
            p.grad = None if (step, i) in ((1, 1), (4, 0)) else torch.randn(p.shape, dtype=torch.float64)
            q.grad = None if p.grad is None else p.grad.clone()
        optimizer.step()
        reference.step()
    for p, q in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p, q, rtol=0, atol=1e-7)  # torch's keeps the product of momenta in float32


@pytest.mark.parametrize(
    ("cls", "settings"),
    [
        (torch.optim.Adam, {}),
        (torch.optim.AdamW, dict(weight_decay=0.1, betas=(0.5, 0.9))),
        (torch.optim.Adam, dict(weight_decay=0.1, maximize=True, eps=1e-3)),
        (torch.optim.Adam, dict(amsgrad=True)),
        (torch.optim.SGD, dict(momentum=0.9)),
    ],
)
def test_a_step_taken_directly_is_the_optimizers_own_to_the_bit(cls, settings):
    torch.manual_seed(0)
    shapes = [(30, 7), (7,), (7, 2), (2,)]
    torchs = [torch.randn(shape).requires_grad_() for shape in shapes]
    ours = [p.detach().clone().requires_grad_() for p in torchs]
    first, second = cls(torchs, lr=0.1, fused=True, **settings), cls(ours, lr=0.1, fused=True, **settings)
    for update in range(9):
        for p, q in zip(torchs, ours, strict=True):
            p.grad = torch.randn_like(p)
            q.grad = p.grad.clone()
        if update in (4, 5):
            torchs[1].grad = ours[1].grad = None  # a parameter that rests counts fewer steps
        first.step()
        second.step() if update == 7 else take_step(second)
        if update == 2:
            second.load_state_dict(copy.deepcopy(second.state_dict()))
    assert all(map(torch.equal, torchs, ours))
    for p, q in zip(torchs, ours, strict=True):
        assert first.state[p].keys() == second.state[q].keys()
        assert all(torch.equal(first.state[p][key], second.state[q][key]) for key in first.state[p])


def test_whoever_watches_an_optimizer_sees_its_steps(recwarn):
    p = torch.ones(3, requires_grad=True)
    p.grad = torch.ones(3)
    optimizer = torch.optim.Adam([p], fused=True)
    seen = []
    for _ in range(2):
        take_step(optimizer)
    hook = optimizer.register_step_post_hook(lambda *_: seen.append("own"))
    take_step(optimizer)
    hook.remove()
    everyones = register_optimizer_step_pre_hook(lambda *_: seen.append("everyone's"))
    take_step(optimizer)
    everyones.remove()
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    take_step(optimizer)
    schedule.step()  # warns if no step was taken before
    assert seen == ["own", "everyone's"]
    assert not recwarn.list
    assert optimizer.state[p]["step"] == 5
