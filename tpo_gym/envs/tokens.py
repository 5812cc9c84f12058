"""Token-sequence tasks: read H tokens, write H tokens; the target is the prompt copied, flipped, reversed or both."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
import torch
from gymnasium import spaces
from gymnasium.vector import AutoresetMode
from torch import Tensor

from tpo_gym.envs import rendering
from tpo_gym.envs.batched import BatchedEnv, Rows, Step
from tpo_gym.envs.checks import as_int, as_integers, check_range
from tpo_gym.envs.single import SingleEnv

REWARDS = ("bag_of_tokens", "sequential", "terminal")


class BatchedTokens(BatchedEnv):
    """Base of the token tasks.

    With H = ``sequence_length`` and V = ``vocab_size`` the observation is int64 (num_envs, 2H): the prompt, then the
    tokens written so far, with symbol V for "not written yet". Prompts are uniform.

    Args:
        sequence_length: H, tokens to read and to write.
        vocab_size: V, number of symbols.
        reward: "bag_of_tokens" pays 1 for every right token; "sequential" pays 1 for every token as long as everything
            so far is right; "terminal" pays 1 on the last step if every token is right.
        **kwargs: ``num_envs``, ``device``, ``autoreset_mode``, ``render_mode``: see ``BatchedEnv``.

    Raises:
        TypeError: A number is not an integer.
        ValueError: A number is too small or ``reward`` is unknown.

    Example:
        >>> import gymnasium as gym
        >>> import tpo_gym
        >>> env = gym.make_vec("tpo_gym/TokenReversal-v0", 1, sequence_length=3, vocab_size=5, reward="sequential")
        >>> env.score_sequences([[1, 2, 3]], [[3, 2, 4]])
        tensor([[1., 1., 0.]])
        >>> env.reset(seed=0)[0][:, 3:]
        tensor([[5, 5, 5]])
    """

    reverse: ClassVar[bool] = False
    flip: ClassVar[bool] = False
    _state_fields: ClassVar[tuple[str, ...]] = ("_board", "_alive")

    def __init__(
        self, sequence_length: int = 10, vocab_size: int = 2, reward: str = "bag_of_tokens", **kwargs: Any
    ) -> None:
        self.sequence_length = as_int("sequence_length", sequence_length, minimum=1)
        self.vocab_size = as_int("vocab_size", vocab_size, minimum=2)
        if reward not in REWARDS:
            raise ValueError(f"reward={reward!r} is unknown; choose one of {', '.join(REWARDS)}.")
        self.reward = reward
        self.max_return = 1.0 if reward == "terminal" else float(self.sequence_length)
        super().__init__(
            spaces.MultiDiscrete([self.vocab_size + 1] * (2 * self.sequence_length)),
            spaces.Discrete(self.vocab_size),
            horizon=self.sequence_length,
            **kwargs,
        )
        shape = (self.num_envs, 2 * self.sequence_length)
        self._board = torch.full(shape, self.vocab_size, dtype=torch.int64, device=self.device)
        self._alive = torch.ones(self.num_envs, dtype=torch.bool, device=self.device)

    def targets(self, prompts: Tensor) -> Tensor:
        """Returns the tokens to write for ``prompts`` (..., H), int64 of the same shape."""
        targets = prompts.flip(-1) if self.reverse else prompts
        return self.vocab_size - 1 - targets if self.flip else targets

    def score_sequences(self, prompts: Any, tokens: Any) -> Tensor:
        """Returns the rewards of whole sequences, step by step; the last dimension sums to the return.

        Args:
            prompts: Integers (n, H), any n.
            tokens: Integers (n, H), or (n, K, H) for K sequences per prompt.

        Returns:
            Rewards, float32, of the shape of ``tokens``.

        Raises:
            TypeError: The tokens are not integers.
            ValueError: The shapes do not fit together, or (CPU) a token is out of range.
        """
        prompts = self._check_tokens("prompts", prompts)
        tokens = self._check_tokens("tokens", tokens)
        if prompts.ndim != 2 or tokens.ndim not in (2, 3) or tokens.shape[0] != prompts.shape[0]:
            raise ValueError(
                f"prompts {tuple(prompts.shape)} and tokens {tuple(tokens.shape)} do not fit together: use (n, "
                f"{self.sequence_length}) with (n, {self.sequence_length}) or (n, K, {self.sequence_length})."
            )
        targets = self.targets(prompts)
        right = tokens == (targets if tokens.ndim == 2 else targets.unsqueeze(1))
        if self.reward == "bag_of_tokens":
            return right.float()
        if self.reward == "sequential":
            return right.cumprod(dim=-1).float()
        rewards = torch.zeros(right.shape, dtype=torch.float32, device=self.device)
        rewards[..., -1] = right.all(dim=-1)
        return rewards

    def step_sequences(self, tokens: Any) -> tuple[Tensor, dict[str, Any]]:
        """Plays whole episodes at once: the same effect as H calls of ``step`` from a fresh start.

        Args:
            tokens: Integers (num_envs, H).

        Returns:
            Rewards (num_envs, H), float32, and the infos of the last step. Every sub-environment is then at its next
            context, see ``observations``.

        Raises:
            RuntimeError: The autoreset mode is not SAME_STEP, or an episode is under way.
            ResetNeeded: ``reset`` was never called.
            TypeError: The tokens are not integers.
            ValueError: The shape is another one, or (CPU) a token is out of range.
        """
        self._require_start()
        if self.autoreset_mode is not AutoresetMode.SAME_STEP:
            raise RuntimeError(
                f"step_sequences needs autoreset_mode='SameStep', but this one is {self.autoreset_mode.value!r}."
            )
        if not self.at_start:
            raise RuntimeError("step_sequences plays whole episodes, but one is under way: call reset() first.")
        tokens = self._check_tokens("tokens", tokens)
        if tokens.shape != (self.num_envs, self.sequence_length):
            raise ValueError(
                f"tokens has shape {tuple(tokens.shape)}, but it must have ({self.num_envs}, {self.sequence_length})."
            )
        rewards = self.score_sequences(self._board[:, : self.sequence_length], tokens)
        self._board[:, self.sequence_length :] = tokens
        return rewards, self._end_episodes(True)

    def _draw_contexts(self, count: int) -> Tensor:
        shape = (count, self.sequence_length)
        return torch.randint(self.vocab_size, shape, generator=self._generator, device=self.device)

    def _begin(self, contexts: Tensor, rows: Rows) -> None:
        self._board[rows, : self.sequence_length] = contexts
        self._board[rows, self.sequence_length :] = self.vocab_size
        self._alive[rows] = True

    def _observe(self) -> Tensor:
        return self._board.clone()

    def _target(self, rows: Rows, step: Step) -> Tensor:
        """Returns the token (m,) to write next."""
        target = self._board[rows, self.sequence_length - 1 - step if self.reverse else step]
        return self.vocab_size - 1 - target if self.flip else target

    def _score(self, actions: Tensor, rows: Rows, step: Step) -> Tensor:
        right = actions == self._target(rows, step).unsqueeze(1)
        if self.reward != "bag_of_tokens":
            right &= self._alive[rows].unsqueeze(1)
        if self.reward == "terminal":
            last = step == self.horizon - 1
            right &= last.unsqueeze(1) if isinstance(last, Tensor) else last
        return right.float()

    def _act(self, actions: Tensor, rows: Rows, step: Step) -> Tensor:
        right = actions == self._target(rows, step)
        alive = self._alive[rows] & right
        self._alive[rows] = alive
        self._board[rows, self.sequence_length + step] = actions
        if self.reward == "bag_of_tokens":
            return right.float()
        return alive.float() if self.reward == "sequential" else (alive & (step == self.horizon - 1)).float()

    def _outcome(self) -> tuple[Tensor, Tensor]:
        prompts, written = self._board.split(self.sequence_length, dim=1)
        right = written == self.targets(prompts)
        return right.all(dim=1), right.float().mean(dim=1)

    def _check_tokens(self, name: str, tokens: Any) -> Tensor:
        tensor = as_integers(name, tokens, self.device)
        if tensor.ndim < 2 or tensor.shape[-1] != self.sequence_length:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, but its last dimension must be "
                f"sequence_length={self.sequence_length}."
            )
        check_range(name, tensor, self.vocab_size)
        return tensor

    def _shown(self, index: int) -> tuple[list[int], list[int], list[int]]:
        """Returns prompt, target and the tokens written so far of one sub-environment."""
        prompt, written = self._board[index].cpu().split(self.sequence_length)
        return prompt.tolist(), self.targets(prompt).tolist(), written[written != self.vocab_size].tolist()

    def ansi(self, index: int) -> str:
        """Writes prompt, target and output in characters; wrong tokens are marked."""
        return rendering.tokens_text(*self._shown(index))

    def picture(self, index: int) -> np.ndarray:
        """Draws prompt, target and output as rows of cells; blue is right, orange is wrong."""
        return rendering.tokens_picture(*self._shown(index))


class BatchedTokenCopy(BatchedTokens):
    """Write the prompt. Arguments: see ``BatchedTokens``."""


class BatchedTokenFlip(BatchedTokens):
    """Write V - 1 - x for every token x of the prompt. Arguments: see ``BatchedTokens``."""

    flip = True


class BatchedTokenReversal(BatchedTokens):
    """Write the prompt backwards. Arguments: see ``BatchedTokens``."""

    reverse = True


class BatchedTokenReverseFlip(BatchedTokens):
    """Write V - 1 - x for every token x of the prompt, backwards. Arguments: see ``BatchedTokens``."""

    reverse = True
    flip = True


class BatchedTokenReversalSparse(BatchedTokenReversal):
    """``BatchedTokenReversal`` with ``reward="terminal"``.

    Args:
        sequence_length: H, tokens to read and to write.
        vocab_size: V, number of symbols.
        **kwargs: See ``BatchedEnv``.
    """

    def __init__(self, sequence_length: int = 10, vocab_size: int = 2, **kwargs: Any) -> None:
        if "reward" in kwargs:
            raise TypeError("TokenReversalSparse fixes reward='terminal'; use TokenReversal to choose another reward.")
        super().__init__(sequence_length, vocab_size, "terminal", **kwargs)


class TokenCopy(SingleEnv):
    """One ``BatchedTokenCopy`` as a ``gymnasium.Env``; same arguments."""

    batched_class = BatchedTokenCopy


class TokenFlip(SingleEnv):
    """One ``BatchedTokenFlip`` as a ``gymnasium.Env``; same arguments."""

    batched_class = BatchedTokenFlip


class TokenReversal(SingleEnv):
    """One ``BatchedTokenReversal`` as a ``gymnasium.Env``; same arguments."""

    batched_class = BatchedTokenReversal


class TokenReverseFlip(SingleEnv):
    """One ``BatchedTokenReverseFlip`` as a ``gymnasium.Env``; same arguments."""

    batched_class = BatchedTokenReverseFlip


class TokenReversalSparse(SingleEnv):
    """One ``BatchedTokenReversalSparse`` as a ``gymnasium.Env``; same arguments."""

    batched_class = BatchedTokenReversalSparse
