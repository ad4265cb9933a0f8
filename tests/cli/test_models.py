from __future__ import annotations

from typer.testing import CliRunner

from knockon.cli.app import app
from knockon.models import catalog


def test_list_shows_name_size_licence_and_that_nothing_was_pulled(monkeypatch, tmp_path):
    monkeypatch.setenv("KNOCKON_CACHE", str(tmp_path))
    shown = CliRunner().invoke(app, ["models", "list"])
    assert shown.exit_code == 0
    (line,) = [line for line in shown.stdout.splitlines() if line.startswith("smollm2-135m ")]
    assert "98 MB" in line and "Apache-2.0" in line and line.endswith("not pulled")
    assert "smollm2-135m-domino" in shown.stdout


def test_list_shows_where_a_pulled_model_lies_on_one_line(monkeypatch, tmp_path):
    monkeypatch.setenv("KNOCKON_CACHE", str(tmp_path))
    entry = catalog.entries()[0]
    path = tmp_path / "models" / entry.name / entry.wheel.file_name
    path.parent.mkdir(parents=True)
    path.touch()
    shown = CliRunner().invoke(app, ["models", "list"])
    assert str(path) in shown.stdout


def test_pull_prints_where_the_model_lies(monkeypatch, tmp_path):
    asked = []

    def pull(name, progress):
        asked.append(name)
        progress("waiting", 0, 1)
        progress("downloading", 5, 10)
        progress("downloading", 10, 10)
        return tmp_path / "model.gguf"

    monkeypatch.setattr(catalog, "pull", pull)
    shown = CliRunner().invoke(app, ["models", "pull", "smollm2-135m"])
    assert shown.exit_code == 0
    assert asked == ["smollm2-135m"]
    assert shown.stdout == f"smollm2-135m: {tmp_path / 'model.gguf'}\n"
    assert "downloading smollm2-135m" in shown.stderr
    assert "another pull" in shown.stderr
