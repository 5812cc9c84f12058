"""What many seeds of one training have together: networks, environment and random numbers.

Every seed keeps a model of its own. Here its tensors are put beside those of the others, so that one operation does the
work of all seeds; the numbers are those of a single run, up to the rounding of sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from typing import Any

import torch
from gymnasium.vector.utils import batch_space
from stable_baselines3.common.distributions import Distribution
from torch import Tensor, nn
from torch.func import functional_call, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from tpo_gym.agents.actor import ActorPolicy
from tpo_gym.agents.group_env import BatchedGroupEnv
from tpo_gym.agents.policies import Decoder, TransformerPolicy
from tpo_gym.agents.resume_state import global_random, set_global_random
from tpo_gym.agents.transformer import Cache
from tpo_gym.envs.batched import BatchedEnv


def map_tensors(function: Callable[[Tensor], Any], tree: Any) -> Any:
    """Apply ``function`` to all tensors in a tree of tuples, lists and dictionaries."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, dict):
        return {key: map_tensors(function, value) for key, value in tree.items()}
    return type(tree)(map_tensors(function, value) for value in tree)


class _Call(nn.Module):
    """A policy as a module whose ``forward`` is any function of it: ``functional_call`` knows no other method."""

    def __init__(self, policy: ActorPolicy) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, function: Callable[..., Any], *args: Any) -> Any:
        return function(self.policy, *args)


class _WeightsFirst(TorchFunctionMode):
    """Lets ``linear`` compute ``W xᵀ``: the gradients of stacked weights then lie in memory as the weights do.

    The product that torch vectorizes is ``x Wᵀ``, whose gradient is that of ``Wᵀ``: a copy as large as all weights.
    """

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is F.linear and not kwargs and args[0].ndim == 2:
            x, weight, *bias = args
            y = (weight @ x.mT).mT
            return y if not bias or bias[0] is None else y + bias[0]
        return func(*args, **(kwargs or {}))


class Networks:
    """The seeds' policies as one. Collectors see a policy whose rows are those of all seeds, one seed after the other.

    Args:
        policies: One per seed, of one architecture.
    """

    fixed_shapes = True
    keeps_graph = False
    """Whether :meth:`all_log_probs` can be differentiated later: see :meth:`known`."""

    def __init__(self, policies: Sequence[ActorPolicy]) -> None:
        self.n_seeds = len(policies)
        template = copy(policies[0])
        if isinstance(template, TransformerPolicy):
            template.fixed_shapes = True
            self.layout = template.layout
        self._call = _Call(template)
        self._attention = template.device.type == "cpu"
        self.action_start = template.action_start
        self.action_dist = template.action_dist
        weights = [dict(policy.named_parameters(prefix="policy")) for policy in policies]
        buffers = [dict(policy.named_buffers(prefix="policy")) for policy in policies]
        self.columns: dict[str, list[Tensor]] = {name: [weight[name] for weight in weights] for name in weights[0]}
        """Every parameter's tensors, one per seed."""
        self._buffers = {name: torch.stack([buffer[name] for buffer in buffers]) for name in buffers[0]}
        self.weights = {
            name: torch.stack([p.detach() for p in column]).requires_grad_(column[0].requires_grad)
            for name, column in self.columns.items()
        }
        """Every parameter, ``(S, ...)``; the models' own are parts of it."""
        for name, column in self.columns.items():
            for p, part in zip(column, self.weights[name].detach(), strict=True):
                p.data = part
        self._last: tuple[Tensor, Tensor] | None = None

    def part(self) -> None:
        """Give each model's parameters memory of their own again."""
        for column in self.columns.values():
            for p in column:
                p.data = p.data.clone()
                p.grad = None if p.grad is None else p.grad.clone()

    def each(self, function: Callable[..., Any], *trees: Any) -> Any:
        """``function(policy, *trees)`` of every seed with its weights, at once; tensors are ``(S, ...)``."""

        def one(weights: dict[str, Tensor], *trees: Any) -> Any:
            return functional_call(self._call, weights, (function, *trees))

        # On a CPU only attention written out in full can be vectorized over the seeds.
        with sdpa_kernel(SDPBackend.MATH) if self._attention else nullcontext(), _WeightsFirst():
            return vmap(one)({**self.weights, **self._buffers}, *trees)

    def set_training_mode(self, mode: bool) -> None:
        """See :meth:`ActorPolicy.set_training_mode`."""
        self._call.policy.set_training_mode(mode)

    def _rows(self, function: Callable[..., Any], *trees: Any) -> Any:
        split = map_tensors(lambda rows: rows.unflatten(0, (self.n_seeds, -1)), list(trees))
        return map_tensors(lambda rows: rows.flatten(0, 1), self.each(function, *split))

    # What collectors and the decoder ask of a policy.

    def all_log_probs(self, obs: Tensor) -> Tensor:
        """See :meth:`ActorPolicy.all_log_probs`."""
        with torch.set_grad_enabled(self.keeps_graph):
            log_probs = self._rows(lambda policy, obs: policy.all_log_probs(obs), obs)
        self._last = (obs, log_probs) if self.keeps_graph else None
        return log_probs.detach()

    def known(self, obs: Any) -> Tensor | None:
        """What :meth:`all_log_probs` returned at last, with its graph, ``(S, n, A)``, if it was asked for these."""
        if self._last is None or self._last[0] is not obs:
            return None
        log_probs, self._last = self._last[1], None
        return log_probs.unflatten(0, (self.n_seeds, -1))

    def action_net(self, hidden: Tensor) -> Tensor:
        """The action head."""
        return self._rows(lambda policy, hidden: policy.action_net(hidden), hidden)

    def model(
        self, tokens: Tensor, past: Cache | None = None, read_from: int = 0, filled: int | None = None
    ) -> tuple[Tensor, Cache]:
        """The transformer: see :class:`~tpo_gym.agents.transformer.CausalTransformer`."""
        if past is None:
            return self._rows(lambda policy, tokens: policy.model(tokens, None, read_from), tokens)
        return self._rows(lambda policy, tokens, past: policy.model(tokens, past, read_from, filled), tokens, past)

    def decoder(self, prompts: Tensor, group_size: int = 1) -> Decoder:
        """See :meth:`TransformerPolicy.decoder`."""
        return Decoder(self, prompts, group_size)  # type: ignore[arg-type]

    generate, _complete = TransformerPolicy.generate, TransformerPolicy._complete
    action_dist: Distribution


class JoinedEnv(BatchedGroupEnv):
    """The seeds' environments as one, whose rows are those of all seeds; contexts are drawn by each seed's own.

    Args:
        envs: One per seed, just reset, with the same task and arguments.
        device: Where observations go.
    """

    def __init__(self, envs: Sequence[BatchedEnv], device: torch.device) -> None:
        self._envs = envs
        joined = copy(envs[0])
        joined.num_envs = len(envs) * envs[0].num_envs
        joined.observation_space = batch_space(joined.single_observation_space, joined.num_envs)
        joined.action_space = batch_space(joined.single_action_space, joined.num_envs)
        joined._generator = torch.Generator(joined.device)  # never drawn from
        joined._draw_contexts = self._draw_contexts  # type: ignore[method-assign]
        for name in joined._state_fields:
            value = getattr(envs[0], name)
            setattr(joined, name, value.new_empty(joined.num_envs, *value.shape[1:]))
        states = [env.get_state() for env in envs]
        joined.set_state(
            {
                name: torch.cat([state[name] for state in states])  # type: ignore[misc]
                if isinstance(value, Tensor) and name != "generator"
                else value
                for name, value in states[0].items()
            }
        )
        super().__init__(joined, device)

    @property
    def generators(self) -> list[torch.Generator]:
        """The generators of the seeds' own environments, which draw contexts."""
        return [env._generator for env in self._envs]

    def _draw_contexts(self, count: int) -> Tensor:
        return torch.cat([env._draw_contexts(count // len(self._envs)) for env in self._envs])

    def start_all(self) -> Tensor:
        contexts = torch.arange(self.num_envs // len(self._envs)).repeat(len(self._envs))
        return self.env.reset(options={"group_size": 1, "contexts": contexts})[0].to(self.device)

    def mean(self, values: Tensor) -> Tensor:
        """Each seed's mean, once for each of its rows."""
        own = values.unflatten(0, (len(self._envs), -1))
        return own.mean(1, keepdim=True).expand_as(own).flatten(0, 1)

    def hand_out(self, wanted: Sequence[bool] | None = None) -> None:
        """Bring the seeds' own environments (those ``wanted``; ``None``: all) to where this one is."""
        state, rows = self.env.get_state(), self.num_envs // len(self._envs)
        for i, env in enumerate(self._envs):
            if wanted is None or wanted[i]:
                own = {
                    name: value[i * rows : (i + 1) * rows] if isinstance(value, Tensor) else value
                    for name, value in state.items()
                }
                env.set_state({**own, "generator": env.get_state()["generator"]})


class SeedRandom:
    """The state of the program's random generators as a single run of this seed would have it.

    Args:
        device: The device that the policy samples on; its generator is :attr:`generator`.
    """

    def __init__(self, device: torch.device) -> None:
        self.generator = torch.Generator(device)
        self._keep()

    def _keep(self) -> None:
        self._state = global_random()
        on_cpu = self.generator.device.type == "cpu"
        self.generator.set_state(torch.get_rng_state() if on_cpu else torch.cuda.get_rng_state(self.generator.device))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Put this state in place, and keep what becomes of it."""
        set_global_random(self._state)
        if self.generator.device.type == "cpu":
            torch.set_rng_state(self.generator.get_state())
        else:
            torch.cuda.set_rng_state(self.generator.get_state(), self.generator.device)
        try:
            yield
        finally:
            self._keep()


class SeedNoise(TorchFunctionMode):
    """While entered, ``multinomial``, ``rand`` and ``exponential_`` draw each seed's rows with that seed's generator.

    Args:
        generators: One per seed.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.generators = generators
        self._draws: dict[Any, Callable[..., Tensor]] = {
            torch.multinomial: self._multinomial,
            torch.rand: self._rand,
            Tensor.exponential_: self._exponential,
        }
        self._active = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave alone what is drawn meanwhile."""
        self._active = False
        try:
            yield
        finally:
            self._active = True

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        draw = self._draws.get(func) if self._active and "generator" not in (kwargs or {}) else None
        if draw is not None:
            return draw(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))

    def _rand(self, n_rows: int, *shape: int, **kwargs: Any) -> Tensor:
        values = torch.empty(n_rows, *shape, **kwargs)
        for part, generator in self._of_each(values):
            part.uniform_(generator=generator)
        return values

    def _exponential(self, values: Tensor) -> Tensor:
        for part, generator in self._of_each(values):
            part.exponential_(generator=generator)
        return values

    def _multinomial(self, probabilities: Tensor, num_samples: int, replacement: bool = False) -> Tensor:
        if num_samples == 1:  # as torch does, but without a wait for the device
            return (probabilities / self._exponential(torch.empty_like(probabilities))).argmax(-1, keepdim=True)
        draws = self._of_each(probabilities)
        return torch.cat([torch.multinomial(p, num_samples, replacement, generator=g) for p, g in draws])

    def _of_each(self, values: Tensor) -> Iterator[tuple[Tensor, torch.Generator]]:
        return zip(values.chunk(len(self.generators)), self.generators, strict=True)
