"""The diversion of vLLM's classes, on modules that look like them."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import pytest

from knockon.errors import Refused
from knockon.integrations.vllm.adapter import Adapter, Diversion


@pytest.fixture
def theirs(monkeypatch):
    """A module with a class to divert, and one with our subclass of it."""

    class Drafter:
        def __init__(self, vllm_config, device):
            self.given = (vllm_config, device)

        def load_model(self): ...

    class Other(Drafter): ...

    class Ours(Drafter): ...

    module, ours = ModuleType("their_module"), ModuleType("our_module")
    module.Drafter, module.Other, ours.Ours = Drafter, Other, Ours
    monkeypatch.setitem(sys.modules, "their_module", module)
    monkeypatch.setitem(sys.modules, "our_module", ours)
    return module, ours


def adapter(*overridden: str) -> Adapter:
    diversion = Diversion("their_module", "Drafter", "our_module:Ours", overridden)
    return Adapter("9.9", (diversion,), lambda vllm_config, config: None)


def config(projector: str | None, architecture: str = "DFlashDraftModel") -> SimpleNamespace:
    dflash = {"projector_type": projector} if projector else {}
    hf = SimpleNamespace(architectures=[architecture], dflash_config=dflash)
    draft = SimpleNamespace(hf_config=hf)
    return SimpleNamespace(speculative_config=SimpleNamespace(draft_model_config=draft))


def test_a_domino_checkpoint_gives_our_class_and_plain_dflash_theirs(theirs):
    module, ours = theirs
    adapter("load_model").install()
    domino, plain = config("domino"), config(None)
    made = module.Drafter(domino, device="cpu")
    assert type(made) is ours.Ours and made.given == (domino, "cpu")
    assert type(module.Drafter(plain, "cpu")) is module.Drafter
    assert type(module.Drafter(config(None, "DFlashDominoDraftModel"), "cpu")) is ours.Ours


def test_other_subclasses_stay_what_they_are(theirs):
    module, _ = theirs
    adapter("load_model").install()
    assert type(module.Other(config("domino"), "cpu")) is module.Other


def test_installing_twice_is_installing_once(theirs):
    module, ours = theirs
    adapter("load_model").install()
    new = module.Drafter.__new__
    adapter("load_model").install()
    assert module.Drafter.__new__ is new
    assert type(module.Drafter(config("domino"), "cpu")) is ours.Ours


def test_a_class_without_a_method_that_we_override_is_refused_untouched(theirs):
    module, _ = theirs
    with pytest.raises(Refused, match=r"their_module\.Drafter: found 'without capture'"):
        adapter("load_model", "capture").install()
    assert type(module.Drafter(config("domino"), "cpu")) is module.Drafter
