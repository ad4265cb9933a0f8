"""Llama: the plain decoder layer."""

from __future__ import annotations

from knockon.models.decoder_layer import AttentionLayer


class LlamaLayer(AttentionLayer):
    """Nothing differs from the shared layer; biases and rotary kinds come from the config."""
