"""Llama: the plain decoder layer."""

from __future__ import annotations

from knockon.models.decoder import DecoderLayer


class LlamaLayer(DecoderLayer):
    """Nothing differs from the shared layer; biases and rotary kinds come from the config."""
