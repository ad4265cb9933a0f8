"""Tokenizers built from GGUF metadata split and merge as the families define it, and round-trip."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import gguf
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase

from knockon.errors import Refused
from knockon.models.gguf_header import read_header
from knockon.models.tokenizer import load_tokenizer

TEXTS = [
    "Hello world, it's 1234 o'clock.",
    "def f(x: int) -> int:\n    return x**2  # 3.14 and 0x1F\n\n\tif x:\r\n\t\tpass",
    "naïve café — 你好，世界 🙂👍🏽 Ω≈ç√ \u200b e\u0301",
    "  two leading, trailing  ",
    "\n\n\n",
    "<b>&amp;</b> C:\\path\\file_name.txt https://example.org/?a=1&b=2",
    "",
]


def byte_letters() -> dict[int, str]:
    """GPT-2's printable stand-in for every byte."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {byte: chr(byte) for byte in kept}
    for byte in range(256):
        letters.setdefault(byte, chr(256 + len(letters) - len(kept)))
    return letters


LETTERS = byte_letters()


def merge_greedily(piece: str, ranks: dict[tuple[str, str], int]) -> list[str]:
    """Byte-pair encoding by its definition: merge the pair of lowest rank until none is left."""
    parts = [LETTERS[byte] for byte in piece.encode()]
    while True:
        pairs = [(ranks.get(pair, len(ranks)), i) for i, pair in enumerate(pairwise(parts))]
        rank, at = min(pairs, default=(len(ranks), 0))
        if rank == len(ranks):
            return parts
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


# Python's re has no \p: letters are word characters that are neither digits nor the underscore.
GPT2_PIECES = re.compile(
    r"'s|'t|'re|'ve|'m|'ll|'d| ?[^\W\d_]+| ?(?:[^\s\w]|_)+|\s+(?!\S)|\s+", re.UNICODE
)


def smollm_pieces(text: str) -> list[str]:
    """Single digits first, then GPT-2's splits of what lies between them."""
    pieces: list[str] = []
    for part in re.split(r"(\d)", text):
        pieces += [part] if part.isdigit() else GPT2_PIECES.findall(part)
    return pieces


@pytest.fixture(scope="module")
def smollm2(smollm2_path: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(smollm2_path)


@pytest.mark.parametrize("text", TEXTS)
def test_decoding_gives_the_text_back(smollm2: PreTrainedTokenizerBase, text: str) -> None:
    assert smollm2.decode(smollm2.encode(text)) == text


# The hand-written letters class knows no combining marks or symbols beyond plain text.
@pytest.mark.parametrize("text", [text for text in TEXTS if "\u0301" not in text])
def test_encoding_equals_greedy_merging_by_definition(
    smollm2: PreTrainedTokenizerBase, smollm2_path: Path, text: str
) -> None:
    metadata = read_header(smollm2_path).metadata
    ids = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = metadata["tokenizer.ggml.merges"]
    ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
    expected = [ids[t] for piece in smollm_pieces(text) for t in merge_greedily(piece, ranks)]
    assert smollm2.encode(text) == expected


def test_special_tokens_and_the_chat_template_are_the_models(
    smollm2: PreTrainedTokenizerBase,
) -> None:
    start, end = smollm2.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])
    assert (smollm2.eos_token_id, smollm2.pad_token_id) == (end, end)
    assert smollm2.encode("<|im_start|>user\nhi<|im_end|>")[0] == start
    assert smollm2.encode("<|im_start|>user\nhi<|im_end|>")[-1] == end
    messages = [{"role": "system", "content": "S"}, {"role": "user", "content": "U"}]
    text = smollm2.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nU<|im_end|>\n<|im_start|>assistant\n"
    )
    assert smollm2.decode([start, *smollm2.encode("hi"), end], skip_special_tokens=True) == "hi"


def write_vocabulary(path: Path, pre: str, model: str = "gpt2", add_bos: bool = False) -> Path:
    tokens = [LETTERS[byte] for byte in range(256)] + ["12", "123", "hi", "<s>"]
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 259 + [3])
    writer.add_token_merges(["1 2", "12 3", "h i"])
    writer.add_bos_token_id(259)
    writer.add_add_bos_token(add_bos)
    writer.add_context_length(64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize(
    ("pre", "expected"),
    [
        ("qwen2", ["1", "2", "3", "4"]),
        ("smollm", ["1", "2", "3", "4"]),
        ("llama-bpe", ["123", "4"]),
        ("gpt-2", ["123", "4"]),
    ],
)
def test_digits_are_grouped_as_the_family_does(
    pre: str, expected: list[str], tmp_path: Path
) -> None:
    assert load_tokenizer(write_vocabulary(tmp_path / "v.gguf", pre)).tokenize("1234") == expected


def test_a_beginning_of_sequence_token_is_added_where_the_file_says_so(tmp_path: Path) -> None:
    tokenizer = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", "llama-bpe", add_bos=True))
    assert tokenizer.encode("hi") == [259, 258]
    assert tokenizer.encode("hi", add_special_tokens=False) == [258]
    assert tokenizer.model_max_length == 64


@pytest.mark.parametrize(
    ("pre", "model", "message"),
    [("mystery", "gpt2", "tokenizer.ggml.pre: found 'mystery'"), ("qwen2", "llama", "byte-level")],
)
def test_unknown_tokenizers_are_refused(pre: str, model: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(Refused, match=message):
        load_tokenizer(write_vocabulary(tmp_path / "v.gguf", pre, model))


def test_a_folder_gives_its_own_tokenizer(tmp_path: Path) -> None:
    built = load_tokenizer(write_vocabulary(tmp_path / "v.gguf", "qwen2"))
    built.save_pretrained(tmp_path / "folder")
    loaded = load_tokenizer(tmp_path / "folder")
    assert loaded.encode("hi 1234 你好") == built.encode("hi 1234 你好")
    file = json.loads((tmp_path / "folder" / "tokenizer.json").read_text())
    assert Tokenizer.from_str(json.dumps(file)).encode("hi").ids == [258]


def test_a_folder_without_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(Refused, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(Refused, match="tokenizer of"):
        load_tokenizer(tmp_path)
