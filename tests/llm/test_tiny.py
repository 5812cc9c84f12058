"""The character tokenizer and the tiny model."""

import pytest
import torch

pytest.importorskip("transformers", reason="needs the extra llm")

from tpo_gym.llm.tiny import CHARSET, character_tokenizer, tiny_model


def test_tokenizer_round_trips_every_character(tmp_path):
    tokenizer = character_tokenizer()
    text = CHARSET + "  two spaces\n\n" + CHARSET[::-1]
    ids = tokenizer(text)["input_ids"]
    assert len(ids) == len(text)
    assert tokenizer.decode(ids) == text
    tokenizer.save_pretrained(tmp_path)
    loaded = type(tokenizer).from_pretrained(tmp_path)
    assert loaded(text)["input_ids"] == ids
    assert loaded.decode([*ids, loaded.eos_token_id], skip_special_tokens=True) == text
    assert loaded.padding_side == "left"


def test_tokenizer_of_a_charset():
    tokenizer = character_tokenizer("abba")
    assert len(tokenizer) == 5
    assert tokenizer("aXb")["input_ids"] == [3, tokenizer.unk_token_id, 4]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "ab"}], tokenize=False)
    assert chat == "ab\n"


@pytest.mark.parametrize("architecture", ["qwen3", "llama"])
def test_model_is_saved_and_loaded(architecture, tmp_path):
    from transformers import AutoModelForCausalLM

    tokenizer = character_tokenizer("0123456789+=")
    before = torch.random.get_rng_state()
    model = tiny_model(tokenizer, architecture, hidden_size=16, layers=1, heads=2, seed=3)
    assert torch.equal(torch.random.get_rng_state(), before)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    ids = tokenizer(["1+2="], return_tensors="pt")["input_ids"]
    assert torch.equal(loaded(ids).logits, model(ids).logits)
    again = tiny_model(tokenizer, architecture, hidden_size=16, layers=1, heads=2, seed=3)
    assert torch.equal(again(ids).logits, model(ids).logits)


def test_default_size():
    parameters = sum(p.numel() for p in tiny_model(character_tokenizer()).parameters())
    assert 0.9e6 < parameters < 1.1e6


def test_bad_arguments():
    tokenizer = character_tokenizer()
    with pytest.raises(ValueError, match="Unknown architecture 'gpt'"):
        tiny_model(tokenizer, "gpt")
    with pytest.raises(ValueError, match="hidden_size 20 must be a multiple of 2 x heads = 8"):
        tiny_model(tokenizer, hidden_size=20)
