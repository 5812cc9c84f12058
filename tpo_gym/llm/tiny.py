"""A language model of about a million parameters and a character tokenizer, made on the spot.

For tests, and for runs that show learning on a laptop: nothing is downloaded, every piece is the real one of
``transformers``, so what trains the tiny model trains a large one.
"""

from __future__ import annotations

import string
from typing import Literal, get_args

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM
from transformers import PreTrainedModel as Model

Architecture = Literal["qwen3", "llama"]

CHARSET = string.ascii_letters + string.digits + string.punctuation + " \n"
"""The characters of :func:`character_tokenizer`: printable ASCII and the line break."""

CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}\n{% endfor %}"


def character_tokenizer(charset: str = CHARSET) -> PreTrainedTokenizerFast:
    r"""A tokenizer with one token per character, and ``<pad>``, ``<eos>`` and ``<unk>`` (any other character).

    Its chat template writes the messages one after another, each on lines of its own.

    Args:
        charset: The characters it knows; repeated ones count once.

    Returns:
        A tokenizer that pads on the left and round-trips any text over ``charset``.

    Example:
        >>> tokenizer = character_tokenizer("ab+")
        >>> tokenizer("a+b")["input_ids"]
        [3, 5, 4]
        >>> tokenizer.decode([3, 5, 4, 1], skip_special_tokens=True)
        'a+b'
    """
    special = ["<pad>", "<eos>", "<unk>"]
    vocabulary = {token: index for index, token in enumerate([*special, *dict.fromkeys(charset)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )


def tiny_model(
    tokenizer: PreTrainedTokenizerFast,
    architecture: Architecture = "qwen3",
    hidden_size: int = 128,
    layers: int = 5,
    heads: int = 4,
    max_length: int = 2048,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """A causal language model with fresh weights, about one million parameters by default.

    Args:
        tokenizer: Gives the size of the vocabulary and the special tokens.
        architecture: ``"qwen3"`` or ``"llama"``.
        hidden_size: Width; a multiple of ``heads``. The feed-forward layers are three times as wide.
        layers: Number of layers.
        heads: Attention heads; two share their keys and values, where their number is even.
        max_length: Longest sequence.
        seed: Seed of the weights. The global random state is left as it was.
        dtype: Type of the weights.

    Returns:
        The model, on the CPU. To train it with a reference model, save it and load it from that folder.

    Raises:
        ValueError: For an unknown architecture, or a width that the heads do not divide.
    """
    if architecture not in get_args(Architecture):
        raise ValueError(f"Unknown architecture {architecture!r}: choose one of {get_args(Architecture)}.")
    if hidden_size % (2 * heads):
        raise ValueError(f"hidden_size {hidden_size} must be a multiple of 2 x heads = {2 * heads}.")
    config_class, model_class = (
        (Qwen3Config, Qwen3ForCausalLM) if architecture == "qwen3" else (LlamaConfig, LlamaForCausalLM)
    )
    config = config_class(
        vocab_size=len(tokenizer),
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2 if heads % 2 == 0 else heads,
        head_dim=hidden_size // heads,
        max_position_embeddings=max_length,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
        eos_token_id=tokenizer.eos_token_id,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return model_class(config).to(dtype)
