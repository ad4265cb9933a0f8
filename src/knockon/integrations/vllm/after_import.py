"""Do something to a module as soon as it has been imported, and import nothing before its time.

vLLM loads plugins in every process, also those that must not touch a GPU and never draft.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

Action = Callable[[ModuleType], None]


def after_import(name: str, action: Action) -> None:
    """Call ``action`` with module ``name``: now where it is imported, else right after it is.

    An action's exception is the import's.
    """
    module = sys.modules.get(name)
    if module is not None:
        action(module)
        return
    for finder in sys.meta_path:
        if isinstance(finder, _Watch):
            break
    else:
        finder = _Watch()
        sys.meta_path.insert(0, finder)
    finder.actions[name] = action


class _Watch(importlib.abc.MetaPathFinder):
    """Finds nothing itself: wraps the loader that the other finders give for a watched name."""

    def __init__(self) -> None:
        self.actions: dict[str, Action] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname not in self.actions:
            return None
        for finder in sys.meta_path:
            if finder is self:
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    self._wrap(spec.loader, fullname)
                return spec
        return None

    def _wrap(self, loader: importlib.abc.Loader, name: str) -> None:
        execute = loader.exec_module

        def execute_then_act(module: ModuleType) -> None:
            execute(module)
            self.actions.pop(name)(module)

        loader.exec_module = execute_then_act  # type: ignore[method-assign]
