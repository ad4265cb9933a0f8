"""A tokenizer small enough to be made in a test: bytes, a few merges, ChatML."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

_PAIRS = [
    "th",
    "he",
    "in",
    "er",
    "an",
    "re",
    "on",
    "at",
    "en",
    "nd",
    "ti",
    "es",
    "or",
    "te",
    "of",
    "ed",
    "is",
    "it",
    "al",
    "ar",
    "st",
    "to",
    "nt",
    "ng",
    "se",
    "ha",
    "as",
    "ou",
    "io",
    "le",
    "ve",
    "co",
    "me",
    "de",
    "hi",
    "ri",
    "ro",
    "ic",
    "ne",
    "ea",
    "ra",
    "ce",
    "li",
    "ch",
    "ll",
    "be",
    "ma",
]
_SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
_CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

VOCAB_SIZE = 256 + len(_PAIRS) + len(_SPECIAL)
"""307: a prime, so that no number of ranks divides it."""
IM_END = VOCAB_SIZE - 2
MASK = VOCAB_SIZE - 1


def save_tokenizer(folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``; every id below 307 has a token."""
    bytes_ = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: i for i, piece in enumerate([*bytes_, *_PAIRS])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[(pair[0], pair[1]) for pair in _PAIRS]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(piece, special=True) for piece in _SPECIAL])
    assert tokenizer.get_vocab_size() == VOCAB_SIZE
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        clean_up_tokenization_spaces=False,
    )
    wrapped.chat_template = _CHATML
    wrapped.save_pretrained(folder)
