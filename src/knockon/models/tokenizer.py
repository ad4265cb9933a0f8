"""Load the tokenizer that belongs to a model, offline."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from knockon.errors import Refused
from knockon.models.gguf_header import is_gguf, read_header
from knockon.models.gguf_tokenizer import build_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """The tokenizer of a Hugging Face folder or a GGUF file.

    No code from the folder is run and no hub is asked.

    Raises:
        Refused: no tokenizer there, or one that cannot be read; as :func:`build_tokenizer`.
    """
    path = Path(path)
    if is_gguf(path):
        return build_tokenizer(read_header(path))
    if not path.is_dir() or not any((path / name).is_file() for name in _FILES):
        raise Refused(f"tokenizer of {path}", "no tokenizer files", f"one of {list(_FILES)}")
    from transformers import AutoTokenizer  # half a second, not at every start's front

    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:
        # Damaged files make transformers, tokenizers and the hub client raise kinds of their own.
        reason = " ".join(str(error).split()) or type(error).__name__
        raise Refused(f"tokenizer of {path}", reason, "files that transformers can read") from error
    return tokenizer
