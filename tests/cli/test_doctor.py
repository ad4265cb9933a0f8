from __future__ import annotations

import json
import platform

import pytest
import torch
from typer.testing import CliRunner

from knockon import __version__
from knockon.cli.app import app
from knockon.cli.doctor import examine, render
from knockon.integrations.vllm.settings import VARIABLES


def test_json_holds_versions_machine_choices_and_models(monkeypatch, tmp_path):
    monkeypatch.setenv("KNOCKON_CACHE", str(tmp_path))
    shown = CliRunner().invoke(app, ["doctor", "--json"])
    assert shown.exit_code == 0
    report = json.loads(shown.stdout)
    assert report["versions"]["knockon"] == __version__
    assert report["versions"]["python"] == platform.python_version()
    assert report["versions"]["torch"] == torch.__version__
    assert report["machine"]["cores"] >= 1
    assert report["machine"]["torch_threads"] == torch.get_num_threads()
    assert report["cache"] == str(tmp_path)
    for name in ("device", "dtype", "attention", "linear_attention", "distributed"):
        assert report["used"][name]["value"] and report["used"][name]["why"]
    models = {model["name"]: model for model in report["models"]}
    assert models["smollm2-135m"]["path"] is None
    assert models["smollm2-135m-domino"]["kind"] == "drafter"


def test_the_text_shows_every_fact_and_how_to_get_what_is_absent(monkeypatch, tmp_path):
    monkeypatch.setenv("KNOCKON_CACHE", str(tmp_path))
    report = examine()
    text = render(report)
    assert CliRunner().invoke(app, ["doctor"]).stdout.splitlines()[0] == text.splitlines()[0]
    for choice in report["used"].values():
        assert f"{choice['value']} ({choice['why']})" in text
    assert report["machine"]["cpu"] in text
    assert "knockon models pull smollm2-135m" in text
    assert str(tmp_path) in text


def test_gpus_are_shown_with_memory_and_capability():
    report = examine()
    report["machine"]["gpus"] = [{"name": "H200", "memory": 141 * 2**30, "capability": [9, 0]}]
    assert "H200, 141.0 GiB, compute capability 9.0" in render(report)


def test_vllm_is_shown_only_where_it_is_installed(monkeypatch):
    monkeypatch.setattr("knockon.integrations.vllm.report.installed_version", lambda: None)
    report = examine()
    assert report["vllm"] is None
    assert "KNOCKON_VLLM" not in render(report)


def test_every_setting_of_the_vllm_plugin_is_shown_as_it_is_in_force(monkeypatch):
    monkeypatch.setattr("knockon.integrations.vllm.report.installed_version", lambda: "0.25.1")
    monkeypatch.setenv("KNOCKON_VLLM_POOL_SIZE", "512")
    report = examine()
    text = render(report)
    assert "0.25.1: Domino drafters are served" in text
    assert len(report["vllm"]["settings"]) == len(VARIABLES)
    for variable in VARIABLES:
        value = "512" if variable.field == "pool_size" else variable.default
        assert f"{value} ({variable.meaning}: {variable.accepted})" in text


@pytest.mark.parametrize(
    ("version", "pool", "why"),
    [("0.99.0", "512", "wanted one of 0.25.1"), ("0.25.1", "many", "POOL_SIZE: found 'many'")],
)
def test_what_the_vllm_plugin_would_refuse_is_said(monkeypatch, version, pool, why):
    monkeypatch.setattr("knockon.integrations.vllm.report.installed_version", lambda: version)
    monkeypatch.setenv("KNOCKON_VLLM_POOL_SIZE", pool)
    assert why in render(examine())
