"""The transformer: causality, the cache, shared prompts, and the reference's initialisation."""

import itertools
import math

import gymnasium as gym
import pytest
import torch
from gymnasium import spaces
from stable_baselines3 import PPO
from torch import nn
from torch.nn import functional as F

from tpo_gym import make_vec_env
from tpo_gym.agents import MuonAdamW, TransformerExtractor, TransformerPolicy, prefix_tree, transformer
from tpo_gym.agents.first_tokens import FirstTokens, first_tokens
from tpo_gym.agents.transformer import CausalTransformer, read_hidden, select_rows


def policy(sequence_length=4, vocab_size=3, **kwargs):
    torch.manual_seed(0)
    observation_space = spaces.MultiDiscrete([vocab_size + 1] * (2 * sequence_length))
    return TransformerPolicy(observation_space, spaces.Discrete(vocab_size), lambda _: 1e-3, **kwargs)


def plain_block(block, x):
    """The same block from torch's elementary operations, with an explicit attention matrix."""
    _, length, width = x.shape
    y = F.layer_norm(x, (width,), block.attention_norm.weight, block.attention_norm.bias, 1e-6)
    q, k, v = (y @ w.T + b for w, b in zip(block.qkv_weight, block.qkv_bias.view(3, -1), strict=True))
    heads = []
    size = width // block.n_heads
    for h in range(block.n_heads):
        part = slice(h * size, (h + 1) * size)
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(size)
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), -torch.inf)
        heads.append(scores.softmax(-1) @ v[..., part])
    x = x + torch.cat(heads, -1) @ block.out_weight.flatten(1).T + block.out_bias
    y = F.layer_norm(x, (width,), block.ffn_norm.weight, block.ffn_norm.bias, 1e-6)
    y = y @ block.ffn_in.weight.T + block.ffn_in.bias
    y = 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))
    return x + y @ block.ffn_out.weight.T + block.ffn_out.bias


def test_it_computes_what_the_formulas_say():
    model = CausalTransformer(5, 7, d_model=16).double()
    tokens = torch.randint(5, (3, 7))
    x = model.token_table.T[tokens] + model.position_table.T
    for block in model.blocks:
        x = plain_block(block, x)
    x = F.layer_norm(x, (16,), model.final_norm.weight, model.final_norm.bias, 1e-6)
    assert torch.allclose(model(tokens)[0], x, atol=1e-12)


def test_the_cache_gives_the_same_hidden_states():
    model = CausalTransformer(5, 9, d_model=16).double()
    tokens = torch.randint(5, (3, 9))
    whole, _ = model(tokens)
    hidden, cache = model(tokens[:, :4])
    pieces = [hidden]
    for part in (tokens[:, 4:7], tokens[:, 7:8], tokens[:, 8:]):
        hidden, cache = model(part, cache)
        pieces.append(hidden)
    assert torch.allclose(torch.cat(pieces, 1), whole, atol=1e-12)


def test_prompts_are_shared_exactly():
    model = CausalTransformer(5, 8, d_model=16).double()
    prompts, rows = torch.randint(5, (2, 4)), torch.tensor([0, 0, 1, 0])
    answers = torch.randint(5, (4, 4))
    whole, _ = model(torch.cat([prompts[rows], answers], 1))
    _, cache = model(prompts)
    shared, _ = model(answers, select_rows(cache, rows))
    assert torch.allclose(shared, whole[:, 4:], atol=1e-12)


@pytest.mark.parametrize("sequence_length", [1, 2, 5])
def test_sequences_and_steps_give_the_same_log_probabilities(sequence_length):
    """Whole sequences, with equal candidates computed once, against the step-by-step interface and its gradient."""
    model = policy(sequence_length, 2).double()
    prompts = torch.randint(2, (3, sequence_length))
    tokens = torch.randint(2, (3, 6, sequence_length))
    log_probs = model.sequence_log_probs(prompts, tokens).gather(-1, tokens.unsqueeze(-1)).squeeze(-1)
    steps = []
    flat = tokens.flatten(0, 1)
    for t in range(sequence_length):
        written = torch.full_like(flat, 2)
        written[:, :t] = flat[:, :t]
        observation = torch.cat([prompts.repeat_interleave(6, 0), written], 1)
        steps.append(model.evaluate_actions(observation, flat[:, t])[0])
    by_step = torch.stack(steps, 1).view(3, 6, sequence_length)
    assert torch.allclose(log_probs, by_step, atol=1e-6)
    weights = torch.randn(3, 6, sequence_length)
    parameters = list(model.parameters())
    fused = torch.autograd.grad((weights * log_probs).sum(), parameters)
    stepwise = torch.autograd.grad((weights * by_step).sum(), parameters)
    for a, b in zip(fused, stepwise, strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_observations_of_any_length_and_repetition_are_read_alike():
    """Each distinct observation is computed once and no further than it is read: same values, same gradients."""
    model = policy(3, 2).double()
    symbols = torch.randint(2, (40, 6))
    symbols[:10, 3:], symbols[10:20, 4:], symbols[20:30, 5:] = 2, 2, 2
    tokens, read_at = model.layout.split(symbols)
    expected = model.model(tokens)[0][torch.arange(40), read_at]
    got = read_hidden(model.model, model.layout, symbols)
    assert torch.allclose(got, expected, atol=1e-12)
    weights = torch.randn_like(expected)
    parameters = list(model.model.parameters())
    for a, b in zip(*(torch.autograd.grad((weights * h).sum(), parameters) for h in (got, expected)), strict=True):
        assert torch.allclose(a, b, atol=1e-12)


def test_deterministic_generation_takes_the_likeliest_token():
    model = policy()
    prompts = torch.randint(3, (5, 4))
    tokens, log_probs = model.generate(prompts, 2, deterministic=True)
    assert torch.equal(tokens[:, 0], tokens[:, 1])
    best = model.sequence_log_probs(prompts, tokens).max(-1)
    assert torch.equal(best.indices, tokens)
    assert torch.allclose(best.values, log_probs, atol=1e-5)


def test_the_final_observation_can_be_read():
    """All tokens written: nothing is left to predict, but callers may still ask (SB3's bootstrap does)."""
    model = policy()
    actions, _ = model(torch.randint(3, (2, 8)))
    assert actions.shape == (2,)


def test_initialisation_is_the_references():
    model = policy(10, 2, d_model=256)
    for block in model.model.blocks:
        for weight, fan_in in (
            (block.qkv_weight, 256),
            (block.out_weight, 256),
            (block.ffn_in.weight, 256),
            (block.ffn_out.weight, 1024),
        ):
            assert weight.std().item() == pytest.approx(fan_in**-0.5, rel=0.02)
            assert weight.abs().max().item() <= 2 * fan_in**-0.5 / 0.8796 + 1e-6
        for bias in (block.qkv_bias, block.out_bias, block.ffn_in.bias, block.ffn_out.bias):
            assert bias.abs().max() == 0
    assert model.model.token_table.std().item() == pytest.approx(1 / 16, rel=0.15)
    assert model.model.position_table.std().item() == pytest.approx(0.02, rel=0.1)
    assert model.model.final_norm.eps == 1e-6


def test_widths_must_divide():
    with pytest.raises(ValueError, match="d_model=10 is not a multiple of n_heads=4"):
        CausalTransformer(2, 4, d_model=10, n_heads=4)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "match"),
    [
        (spaces.Box(0, 1, (4,)), spaces.Discrete(2), "MultiDiscrete"),
        (spaces.MultiDiscrete([3] * 5), spaces.Discrete(2), "MultiDiscrete"),
        (spaces.MultiDiscrete([3] * 4), spaces.Discrete(3), "there are 3 actions"),
        (spaces.MultiDiscrete([3] * 4), spaces.Box(0, 1, (1,)), "actions must be Discrete"),
    ],
)
def test_spaces_it_cannot_serve(observation_space, action_space, match):
    with pytest.raises(ValueError, match=match):
        TransformerPolicy(observation_space, action_space, lambda _: 1e-3)


def test_ppo_can_have_the_same_network():
    env = make_vec_env("tpo_gym/TokenReversal-v0", n_envs=4, sequence_length=3)
    ppo = PPO(
        "MlpPolicy",
        env,
        n_steps=6,
        batch_size=24,
        n_epochs=1,
        policy_kwargs=dict(features_extractor_class=TransformerExtractor, net_arch=[], optimizer_class=MuonAdamW),
    )
    ours = TransformerPolicy(env.observation_space, env.action_space, lambda _: 1e-3)
    extractor = ppo.policy.features_extractor
    extractor.model.load_state_dict(ours.model.state_dict())
    ppo.policy.action_net.load_state_dict(ours.action_net.state_dict())
    observations = torch.as_tensor(env.reset())
    expected = ours.get_distribution(observations).distribution.logits
    assert torch.allclose(ppo.policy.get_distribution(observations).distribution.logits, expected, atol=1e-5)
    before = nn.utils.parameters_to_vector(extractor.parameters()).detach().clone()
    ppo.learn(24)
    assert not torch.equal(nn.utils.parameters_to_vector(extractor.parameters()), before)


def test_vocabularies_follow_the_task():
    env = gym.make("tpo_gym/TokenCopy-v0", sequence_length=3, vocab_size=7)
    model = TransformerPolicy(env.observation_space, env.action_space, lambda _: 1e-3)
    assert (model.layout.sequence_length, model.layout.vocab_size) == (3, 7)


@pytest.mark.parametrize("group_size", [3, 7])
def test_large_groups_are_computed_in_blocks_with_the_same_numbers(monkeypatch, group_size):
    """Attention is limited to blocks of a group's candidates; values, order and gradients do not change."""
    model = policy(4, 2).double()
    prompts, tokens = torch.randint(2, (5, 4)), torch.randint(2, (5, group_size, 4))
    weights = torch.randn(5, group_size, 4, 2)
    parameters = list(model.parameters())
    whole = model.sequence_log_probs(prompts, tokens)
    monkeypatch.setattr(prefix_tree, "MAX_ROWS", 6)
    blocks = model.sequence_log_probs(prompts, tokens)
    assert torch.allclose(blocks, whole, atol=1e-6)  # log-probabilities are float32
    for a, b in zip(*(torch.autograd.grad((weights * x).sum(), parameters) for x in (blocks, whole)), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_candidates_that_agree_are_computed_once():
    """A group of equal candidates has as many rows as one candidate has tokens, in training and in decoding."""
    model = policy(4, 2)
    prompts, tokens = torch.randint(2, (20, 4)), torch.randint(2, (20, 1, 4)).expand(-1, 6, -1)
    shared = model.shared_prefixes(prompts, tokens)
    assert shared.read_at.unique().numel() == 20 * 4
    assert sum(groups * rows for groups, rows in shared.parts) == 20 * (4 + 3)
    decoder = prefix_tree.TreeDecoder(model.model, prompts, 6, 2)
    for column in tokens.flatten(0, 1)[:, :3].unbind(1):
        decoder.append(column)
        assert len(decoder.hidden) == 20


@pytest.mark.parametrize("limit", [1, 4, 7, 40])
@pytest.mark.parametrize("deterministic", [False, True])
def test_completions_in_parts_are_those_in_one_piece(limit, deterministic):
    """Prompts and groups split, whatever fits; the same random numbers fall to the same completions."""
    model = policy(4, 3)
    prompts = torch.randint(3, (5, 4))
    torch.manual_seed(1)
    whole = model.generate(prompts, 6, deterministic)
    torch.manual_seed(1)
    parts = model.generate(prompts, 6, deterministic, limit)
    assert torch.equal(parts[0], whole[0])
    assert torch.allclose(parts[1], whole[1], atol=1e-5)


@pytest.mark.parametrize(
    ("vocab_size", "shape", "read_from", "n_layers", "depth"),
    [(2, (100, 19), 9, 2, 6), (2, (64, 7), 6, 1, 6), (3, (50, 9), 5, 3, 3), (2, (40, 5), 2, 2, 2)],
)
def test_first_tokens_are_computed_once_for_all_rows(monkeypatch, vocab_size, shape, read_from, n_layers, depth):
    torch.manual_seed(0)
    model = CausalTransformer(vocab_size, 20, d_model=16, n_layers=n_layers).double()
    tokens = torch.randint(vocab_size, shape)
    seen = []

    def compute(look):
        monkeypatch.setattr(transformer, "first_tokens", lambda *args: seen.append(look(*args)) or seen[-1])
        hidden, cache = model(tokens, None, read_from)
        weights = torch.arange(hidden.numel()).view_as(hidden).sin()
        return hidden, cache, torch.autograd.grad((hidden * weights).sum(), list(model.parameters()))

    got, expected = compute(first_tokens), compute(lambda *args: None)
    assert seen[0].depth == depth
    for a, b in zip([got[0], *got[1], *got[2]], [expected[0], *expected[1], *expected[2]], strict=True):
        assert torch.allclose(a, b, atol=1e-11)


def test_nodes_are_the_sequences_of_a_few_tokens():
    first = FirstTokens(3, 3, 10, torch.device("cpu"))
    sequences = [s for n in (1, 2, 3) for s in itertools.product(range(3), repeat=n)]
    assert first.size == len(sequences) == 39
    assert first.symbols.tolist() == [s[-1] * 10 + len(s) - 1 for s in sequences]
    assert first.mask[0, 0].tolist() == [[s[: len(t)] == t for t in sequences] for s in sequences]
    rows = [(0, 2, 1), (2, 2, 2)]
    assert first.nodes(torch.tensor(rows)).tolist() == [[sequences.index(r[:n]) for n in (1, 2, 3)] for r in rows]


@pytest.mark.parametrize(
    ("shape", "limit", "vocab_size"),
    [((100, 19), 9, 16), ((1, 19), 9, 2), ((100, 19), 0, 2), ((100, 19), 1, 2), ((1000, 19), 9, 600)],
)
def test_first_tokens_that_save_little_are_left_alone(shape, limit, vocab_size):
    assert first_tokens(shape, limit, vocab_size, 20, torch.device("cpu")) is None
    assert first_tokens((100, 19), 9, 2, 20, torch.device("meta")) is None  # as on any device but a CPU
