from __future__ import annotations

import importlib
import sys

import pytest

from knockon.integrations.vllm.after_import import after_import


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package ``late`` with a module ``late.inner``, neither imported yet."""
    folder = tmp_path / "late"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    (folder / "inner.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(sys, "meta_path", list(sys.meta_path))
    yield "late.inner"
    for name in [name for name in sys.modules if name.split(".")[0] == "late"]:
        del sys.modules[name]


def test_the_action_waits_for_the_import_and_sees_the_whole_module(package):
    seen = []
    after_import(package, lambda module: seen.append(module.value))
    assert not seen and package not in sys.modules
    module = importlib.import_module(package)
    assert seen == [1]
    assert module.__spec__ is not None and module.__spec__.origin == module.__file__


def test_the_action_is_taken_at_once_where_the_module_is_there(package):
    importlib.import_module(package)
    seen = []
    after_import(package, lambda module: seen.append(module.value))
    assert seen == [1]


def test_it_is_taken_once_however_often_it_was_asked_for(package):
    seen = []
    for _ in range(3):
        after_import(package, lambda module: seen.append(module.value))
    importlib.import_module(package)
    assert seen == [1]
    assert sum(type(finder).__name__ == "_Watch" for finder in sys.meta_path) == 1


def test_a_refusal_fails_the_import(package):
    def refuse(module):
        raise ValueError("not this one")

    after_import(package, refuse)
    with pytest.raises(ValueError, match="not this one"):
        importlib.import_module(package)


def test_other_imports_are_left_alone(package):
    after_import(package, lambda module: pytest.fail("not imported"))
    assert importlib.import_module("late").__name__ == "late"
