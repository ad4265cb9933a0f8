from __future__ import annotations

import pytest

from knockon.errors import Refused
from knockon.integrations.vllm.settings import PREFIX, VARIABLES, PluginSettings


def test_nothing_set_gives_what_the_variables_say_is_the_default():
    settings = PluginSettings.from_environment({"PATH": "/bin"})
    assert settings == PluginSettings()
    for variable in VARIABLES:
        assert str(getattr(settings, variable.field)) == variable.default


def test_every_variable_is_read():
    environment = {
        f"{PREFIX}POOL_SIZE": "0",
        f"{PREFIX}EXCHANGE": "compact",
        f"{PREFIX}DRAFT_HEAD": "fp8",
        f"{PREFIX}ROLLOUT": "plain",
    }
    assert set(environment) == {variable.name for variable in VARIABLES}
    assert PluginSettings.from_environment(environment) == PluginSettings(
        0, "compact", "fp8", "plain"
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("POOL_SIZE", "-1"),
        ("POOL_SIZE", "2k"),
        ("POOL_SIZE", ""),
        ("EXCHANGE", "gather"),
        ("DRAFT_HEAD", "int8"),
        ("ROLLOUT", "Fused"),
        ("POOLSIZE", "2048"),
    ],
)
def test_what_is_not_accepted_is_refused_by_name(name, value):
    with pytest.raises(Refused, match=f"^{PREFIX}{name}: found '{value}'"):
        PluginSettings.from_environment({f"{PREFIX}{name}": value})
