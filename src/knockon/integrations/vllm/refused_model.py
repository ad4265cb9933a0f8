"""Stands for the Domino architecture under a version of vLLM that is not supported.

vLLM imports it where such a checkpoint is asked for, and shows why that is refused.
"""

from knockon.integrations.vllm.versions import adapter_for, installed_version

adapter_for(installed_version())
