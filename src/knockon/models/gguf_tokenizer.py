"""Build a fast tokenizer from the vocabulary inside a GGUF file.

The file holds tokens, merges and the *name* of the pre-tokenizer; what each name splits is fixed
here as in the families' own ``tokenizer.json``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers import processors as post_processors

from knockon.errors import Refused
from knockon.models.gguf_header import GGUFHeader

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

_CONTROL, _USER_DEFINED = 3, 4  # llama.cpp's token types that are matched before any splitting

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _WORDS % r"\p{N}"
_LLAMA3 = _WORDS % r"\p{N}{1,3}"


def build_tokenizer(header: GGUFHeader) -> PreTrainedTokenizerFast:
    """The tokenizer of a GGUF file, chat template and special tokens included.

    Raises:
        Refused: no vocabulary, another model than byte-level BPE, an unknown pre-tokenizer.
    """
    read = header.metadata
    model = read.get("tokenizer.ggml.model")
    if model != "gpt2":
        raise Refused(
            "tokenizer.ggml.model",
            model,
            "'gpt2' (byte-level BPE)",
            "Use the model's Hugging Face folder, which has its own tokenizer.json.",
        )
    tokens, merges = read.get("tokenizer.ggml.tokens"), read.get("tokenizer.ggml.merges")
    if not tokens or not merges:
        raise Refused(f"{header.path}: tokenizer", "no tokens or no merges", "a whole vocabulary")
    kind = str(read.get("tokenizer.ggml.pre"))
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: index for index, token in enumerate(tokens)},
            merges=[_pair(merge) for merge in merges],
            ignore_merges=kind == "llama-bpe",
        )
    )
    tokenizer.pre_tokenizer = _pre_tokenizer(kind)
    if kind == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(_added(read, tokens, _CONTROL))
    tokenizer.add_tokens(_added(read, tokens, _USER_DEFINED))
    named = _named_tokens(read, tokens)
    if read.get("tokenizer.ggml.add_bos_token") and "bos_token" in named:
        bos = named["bos_token"]
        tokenizer.post_processor = post_processors.TemplateProcessing(
            single=f"{bos} $A",
            pair=f"{bos} $A {bos} $B",
            special_tokens=[(bos, read["tokenizer.ggml.bos_token_id"])],
        )
    from transformers import PreTrainedTokenizerFast  # half a second, not at every start's front

    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        chat_template=read.get("tokenizer.chat_template"),
        model_max_length=read.get(f"{header.architecture}.context_length"),
        clean_up_tokenization_spaces=False,
        **named,
    )


def _pre_tokenizer(kind: str) -> pre_tokenizers.PreTokenizer:
    """What splits text before merging, by llama.cpp's name for it."""
    if kind == "smollm":
        return pre_tokenizers.Sequence(
            [pre_tokenizers.Digits(individual_digits=True), _byte_level(own_splits=True)]
        )
    if kind == "gpt-2":
        return _byte_level(own_splits=True)
    patterns = {"qwen2": _QWEN2, "llama-bpe": _LLAMA3}
    if kind not in patterns:
        raise Refused(
            "tokenizer.ggml.pre", kind, f"one of {sorted([*patterns, 'gpt-2', 'smollm'])}"
        )
    split = pre_tokenizers.Split(Regex(patterns[kind]), behavior="isolated")
    return pre_tokenizers.Sequence([split, _byte_level(own_splits=False)])


def _byte_level(own_splits: bool) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=own_splits)


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right


def _added(read: dict[str, Any], tokens: list[str], kind: int) -> list[AddedToken]:
    types = read.get("tokenizer.ggml.token_type") or []
    return [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, found in zip(tokens, types, strict=False)
        if found == kind
    ]


def _named_tokens(read: dict[str, Any], tokens: list[str]) -> dict[str, str]:
    """Special tokens by transformers' names, from the ids that the file gives."""
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    named = {}
    for ours, theirs in names.items():
        index = read.get(f"tokenizer.ggml.{theirs}_token_id")
        if index is None:
            continue
        if not 0 <= index < len(tokens):
            raise Refused(f"tokenizer.ggml.{theirs}_token_id", index, f"0 to {len(tokens) - 1}")
        named[f"{ours}_token"] = tokens[index]
    return named
