"""Candidates of a group share prefixes: each distinct prefix is computed once, exactly.

A *node* is a distinct prefix of a group's candidates: the group's prompt and its first ``t`` tokens. What a causal
transformer computes at a node depends on nothing else, so all candidates that begin with it can share it, in decoding
and in training alike; the gradient is the same sum, taken in another order. A policy that has learned repeats itself,
so that a group of ``K`` candidates costs little more than one.

The number of nodes depends on the data, so this is for the CPU: on a GPU fixed shapes are worth more.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from tpo_gym.agents.transformer import CausalTransformer

MAX_PARTS, MIN_PART = 8, 16
"""Groups are computed together in at most so many parts, of at least so many groups."""
MAX_ROWS = 512
"""Attention goes over at most so many prefixes of a group at once."""


class PrefixTree:
    """Grows by one token of every candidate at a time.

    Keys and values of all nodes lie in one flat table: first the ``H`` prompt positions of every group, then the nodes
    in the order in which they were made.

    Args:
        n_groups: Groups ``B``.
        group_size: Candidates per group, side by side.
        prompt_length: ``H``.
        vocab_size: Number of tokens.
    """

    def __init__(self, n_groups: int, group_size: int, prompt_length: int, vocab_size: int) -> None:
        self.vocab_size = vocab_size
        self.n_rows = n_groups * prompt_length
        """Rows of the flat table so far."""
        self.depth = 0
        self.node_of = torch.arange(n_groups).repeat_interleave(group_size)
        """The latest node of each candidate, ``(B * K,)``: an index among the nodes of the present depth."""
        self.path = torch.arange(self.n_rows).view(n_groups, prompt_length)
        """Table rows of the prompt and of all prefixes of each node of the present depth, ``(n, H + depth)``."""

    def append(self, tokens: Tensor) -> Tensor:
        """Extend every candidate by one token ``(B * K,)``; returns the tokens ``(n,)`` of the new nodes."""
        codes, self.node_of = torch.unique(self.node_of * self.vocab_size + tokens, return_inverse=True)
        rows = torch.arange(self.n_rows, self.n_rows + len(codes)).unsqueeze(1)
        self.path = torch.cat([self.path[codes.div(self.vocab_size, rounding_mode="floor")], rows], 1)
        self.n_rows += len(codes)
        self.depth += 1
        return codes % self.vocab_size


def _in_blocks(prompts: Tensor, tokens: Tensor, block: int, vocab_size: int) -> tuple[Tensor, Tensor, Tensor]:
    """Large groups as several of ``block`` candidates, those with common prefixes together.

    Attention within a group costs the square of its prefixes; computing the prompt once per block costs less.

    Returns:
        Prompts and tokens of the blocks, and where each candidate went among all rows, ``(B * K,)``.
    """
    n_groups, group_size, length = tokens.shape
    tree = PrefixTree(n_groups, group_size, 0, vocab_size)
    for column in tokens.unbind(2):
        tree.append(column.flatten())
    order = tree.node_of.view(n_groups, group_size).argsort(1)  # nodes are numbered in lexicographic order
    n_blocks = -(-group_size // block)
    padded = order[:, torch.arange(n_blocks * block).clamp(max=group_size - 1)]  # twice the last: computed once
    tokens = tokens.gather(1, padded.unsqueeze(2).expand(-1, -1, length)).view(-1, block, length)
    places = order.argsort(1) + torch.arange(n_groups).unsqueeze(1) * n_blocks * block
    return prompts.repeat_interleave(n_blocks, 0), tokens, places.flatten()


class TreeDecoder:
    """Decodes the groups' candidates token by token; each distinct prefix is computed once.

    Args:
        model: The transformer.
        prompts: ``(B, H)`` int64.
        group_size: Candidates per prompt, ``K``.
        vocab_size: Number of tokens.
    """

    def __init__(self, model: CausalTransformer, prompts: Tensor, group_size: int, vocab_size: int) -> None:
        self.model = model
        self.prompt_length = prompts.shape[1]
        self.tree = PrefixTree(len(prompts), group_size, self.prompt_length, vocab_size)
        hidden, cache = model(prompts, read_from=self.prompt_length - 1)
        self._hidden = hidden[:, 0]
        largest = self.tree.n_rows + len(prompts) * group_size * (self.prompt_length - 1)
        self._tables = [kv.new_empty(largest, kv.shape[-1]) for kv in cache]
        for table, kv in zip(self._tables, cache, strict=True):
            table[: self.tree.n_rows] = kv.flatten(0, 1)

    def append(self, tokens: Tensor) -> None:
        """Extend every candidate by one token, ``(B * K,)``, and compute the new prefixes."""
        tree, model, start = self.tree, self.model, self.tree.n_rows
        x = model.embed(tree.append(tokens).unsqueeze(1), self.prompt_length + tree.depth - 1)
        for block, table in zip(model.blocks, self._tables, strict=True):
            q, kv = model.split(block.project(x))
            table[start : tree.n_rows] = kv.squeeze(1)
            x = block.finish(x, block.attend(q, F.embedding(tree.path, table)))
        self._hidden = model.final_norm(x).squeeze(1)

    @property
    def hidden(self) -> Tensor:
        """Hidden state of each distinct prefix, ``(n, d_model)``; ``tree.node_of`` says which is whose."""
        return self._hidden


class SharedPrefixes:
    """Where the distinct prefixes of groups of sequences lie, so that a transformer computes each of them once.

    Groups of about as many prefixes are computed together, padded to the largest: rows ``(groups, L, d_model)`` that
    hold the prompt and then the prefixes, with a mask that lets each prefix see its own beginnings alone.

    Args:
        prompts: ``(B, H)`` int64.
        tokens: ``(B, K, T)`` int64 with ``T >= 2``.
        vocab_size: Number of tokens.
        dtype: Type of the masks, that of the model.
    """

    def __init__(self, prompts: Tensor, tokens: Tensor, vocab_size: int, dtype: torch.dtype) -> None:
        places = None
        if tokens.shape[1] > (block := max(1, MAX_ROWS // (tokens.shape[2] - 1))):
            prompts, tokens, places = _in_blocks(prompts, tokens, block, vocab_size)
        (n_groups, group_size, length), prompt_length = tokens.shape, prompts.shape[1]
        self.prompt_length = prompt_length
        tree = PrefixTree(n_groups, group_size, prompt_length, vocab_size)
        node_tokens = [tree.append(tokens[:, :, t].flatten()) for t in range(length - 1)]  # no one reads the last token
        path = tree.path[:, prompt_length:] - n_groups * prompt_length  # (R, T - 1): the nodes of each distinct row
        depths = torch.arange(length - 1).repeat_interleave(torch.tensor([len(new) for new in node_tokens]))
        group = torch.empty(len(depths), dtype=torch.long)
        group[path] = (tree.path[:, :1] // prompt_length).expand_as(path)
        counts = torch.bincount(group, minlength=n_groups)
        by_group = group.argsort(stable=True)
        place = torch.empty_like(group)  # of a node among those of its group
        place[by_group] = torch.arange(len(group)) - (counts.cumsum(0) - counts)[group[by_group]]

        order = counts.argsort(stable=True)
        self.parts: list[tuple[int, int]] = []  # groups, rows per group
        start = torch.empty(n_groups, dtype=torch.long)  # first row of each group, ...
        width = torch.empty(n_groups, dtype=torch.long)  # ... its rows, ...
        mask_start = torch.empty(n_groups, dtype=torch.long)  # ... and where its mask begins
        n_rows = n_entries = 0
        for groups in order.split(max(MIN_PART, -(-n_groups // MAX_PARTS))):
            size, rows = len(groups), prompt_length + int(counts[groups[-1]])
            self.parts.append((size, rows))
            start[groups] = n_rows + torch.arange(size) * rows
            mask_start[groups] = n_entries + torch.arange(size) * rows * rows
            width[groups] = rows
            n_rows, n_entries = n_rows + size * rows, n_entries + size * rows * rows
        rows_of_nodes = start[group] + prompt_length + place

        # Token and position of each row as one index into a table of all combinations; padding reads entry 0.
        n_positions = 2 * prompt_length
        self.symbols = torch.zeros(n_rows, dtype=torch.long)
        positions = torch.arange(prompt_length)
        self.symbols[start.unsqueeze(1) + positions] = prompts * n_positions + positions
        self.symbols[rows_of_nodes] = torch.cat(node_tokens) * n_positions + prompt_length + depths

        visible = torch.full((n_entries,), -torch.inf, dtype=dtype)
        seen, by = torch.tril_indices(length - 1, length - 1).flip(0)
        entry = mask_start[group] + (prompt_length + place) * width[group] + prompt_length
        visible[entry[path[:, by]] + place[path[:, seen]]] = 0
        self.masks = []
        for part, (size, rows) in zip(visible.split([n * m * m for n, m in self.parts]), self.parts, strict=True):
            mask = part.view(size, 1, rows, rows)
            mask[..., :prompt_length] = 0
            mask[:, 0, :prompt_length].masked_fill_(
                torch.ones(prompt_length, rows, dtype=torch.bool).triu(1), -torch.inf
            )
            mask.diagonal(dim1=-2, dim2=-1).zero_()  # padding sees itself, so that no row of the softmax is empty
            self.masks.append(mask)

        # Only the last position of the prompts and what follows is read.
        unread = prompt_length - 1
        n_before = torch.zeros(n_groups, dtype=torch.long)
        n_before[start.argsort()] = torch.arange(n_groups)
        first = (start - n_before * unread).repeat_interleave(group_size).unsqueeze(1)
        self.read_at = torch.cat([first, first + 1 + place[path[tree.node_of]]], 1)
        """``(B * K, T)``: which of the rows that :meth:`hidden` returns predicts each token."""
        if places is not None:
            self.read_at = self.read_at[places]

    def hidden(self, model: CausalTransformer) -> Tensor:
        """Hidden states ``(rows, d_model)``, see :attr:`read_at`."""
        table, last = model.symbol_table(), len(model.blocks) - 1
        # Before the first attention there are no more different rows than tokens at positions.
        x, qkv = F.embedding(self.symbols, table), F.embedding(self.symbols, model.blocks[0].project(table))
        for i, block in enumerate(model.blocks):
            if i:
                qkv = block.project(x)
            q, kv = model.split(qkv)
            unread = self.prompt_length - 1 if i == last else 0
            parts = [
                block.attend(q_part[:, unread:], kv_part, mask[:, :, unread:]).flatten(0, 1)
                for mask, q_part, kv_part in zip(self.masks, self._split(q), self._split(kv), strict=True)
            ]
            if unread:
                x = torch.cat([part[:, unread:].flatten(0, 1) for part in self._split(x)])
            x = block.finish(x, torch.cat(parts))
        return model.final_norm(x)

    def _split(self, rows: Tensor) -> list[Tensor]:
        pieces = rows.split([size * n for size, n in self.parts])
        return [piece.unflatten(0, part) for piece, part in zip(pieces, self.parts, strict=True)]
