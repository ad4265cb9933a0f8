"""Domino inside vLLM, reached through its ``vllm.general_plugins`` entry point (docs/vllm.md).

Importing this package imports no vLLM: the modules that do are loaded by vLLM itself, by name.
"""

from knockon.integrations.vllm.plugin import register

__all__ = ["register"]
