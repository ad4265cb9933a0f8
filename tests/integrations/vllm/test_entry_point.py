"""vLLM finds the plugin, and without vLLM nothing misses it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path

import pytest

from knockon.integrations import vllm as integration

GROUP = "vllm.general_plugins"


def test_the_entry_point_is_declared_under_vllms_group():
    root = Path(__file__).parents[3]
    project = tomllib.loads((root / "pyproject.toml").read_text())["project"]
    declared = project["entry-points"][GROUP]
    (name,) = declared
    assert EntryPoint(name, declared[name], GROUP).load() is integration.register


def test_an_installation_beside_vllm_has_it():
    pytest.importorskip("vllm", reason="vLLM is not installed here (docs/vllm.md)")
    found = [point for point in entry_points(group=GROUP) if point.name == "knockon"]
    if not found:
        pytest.skip("this Knockon was not installed by pip, or before it had the plugin")
    assert found[0].load() is integration.register


def test_knockon_imports_no_vllm_and_needs_none():
    """With vLLM made impossible to import, the package, the plugin and the command line work."""
    program = (
        "import sys; sys.modules['vllm'] = None\n"
        "import knockon, knockon.cli.app, knockon.integrations.vllm\n"
        "from knockon.integrations.vllm import plugin, choice, adapter, versions\n"
        "assert not [m for m in sys.modules if m.startswith('vllm.')]\n"
    )
    sources = str(Path(integration.__file__).parents[3])
    environment = os.environ | {"PYTHONPATH": sources}
    subprocess.run([sys.executable, "-c", program], check=True, timeout=120, env=environment)
