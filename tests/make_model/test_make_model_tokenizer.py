"""Any bytes round-trip through the tokenizer, and the chat template is DeepSeek-V4's format."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from sglang_dsv4x import configs
from sglang_dsv4x.make_model import make_model
from sglang_dsv4x.make_model.tokenizer import BOS, EOS, FIRST_BYTE_ID, SPECIAL_TOKENS, byte_characters

VOCAB = 512


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    folder = tmp_path_factory.mktemp("tokenizer") / "out"
    config = configs.load("tiny")
    assert config["vocab_size"] == VOCAB
    make_model(config, folder)
    return AutoTokenizer.from_pretrained(folder)


@given(text=st.text())
def test_text_is_one_token_per_byte_and_round_trips(text: str, tokenizer: PreTrainedTokenizerBase) -> None:
    if any(token in text for token in SPECIAL_TOKENS):
        return
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert ids == [FIRST_BYTE_ID + byte for byte in text.encode()]
    assert tokenizer.decode(ids) == text


def test_every_byte_has_a_token_of_its_own(tokenizer: PreTrainedTokenizerBase) -> None:
    """Bytes that are not UTF-8 have no text, but their ids have to mean those bytes."""
    ids = tokenizer.convert_tokens_to_ids(byte_characters())
    assert ids == list(range(FIRST_BYTE_ID, FIRST_BYTE_ID + 256))
    assert tokenizer.decode([FIRST_BYTE_ID + byte for byte in "é".encode()]) == "é"
    assert tokenizer.decode([FIRST_BYTE_ID + 0xFF]) == "\N{REPLACEMENT CHARACTER}"


def test_every_id_of_the_model_decodes_to_something(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == VOCAB
    assert all(tokenizer.decode([token]) for token in range(VOCAB))


def test_special_tokens_are_single_ids(tokenizer: PreTrainedTokenizerBase) -> None:
    for index, token in enumerate(SPECIAL_TOKENS):
        assert tokenizer(token, add_special_tokens=False)["input_ids"] == [index]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (0, 1)
    assert tokenizer.decode([0, FIRST_BYTE_ID + 65, 1], skip_special_tokens=True) == "A"


def test_encoding_adds_no_special_token(tokenizer: PreTrainedTokenizerBase) -> None:
    """SGLang's encoder of DeepSeek-V4 chats writes BOS itself; a second one would move every position."""
    assert tokenizer("A")["input_ids"] == [FIRST_BYTE_ID + 65]


MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello."},
    {"role": "user", "content": "1+1?"},
]


def test_the_chat_template_renders_deepseek_v4s_format(tokenizer: PreTrainedTokenizerBase) -> None:
    text = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert text == (
        f"{BOS}Be brief.<｜User｜>Hi<｜Assistant｜></think>Hello.{EOS}<｜User｜>1+1?<｜Assistant｜></think>"
    )


def test_the_chat_template_renders_as_sglangs_encoder_does(tokenizer: PreTrainedTokenizerBase) -> None:
    encoder = pytest.importorskip("sglang.srt.entrypoints.openai.encoding_dsv4")
    theirs = encoder.encode_messages([dict(message) for message in MESSAGES], thinking_mode="chat")
    ours = tokenizer.apply_chat_template(MESSAGES, tokenize=False, add_generation_prompt=True)
    assert ours == theirs


def test_the_chat_template_opens_a_thought_on_request(tokenizer: PreTrainedTokenizerBase) -> None:
    text = tokenizer.apply_chat_template(
        MESSAGES[:2], tokenize=False, add_generation_prompt=True, thinking=True
    )
    assert text.endswith("<｜Assistant｜><think>")
