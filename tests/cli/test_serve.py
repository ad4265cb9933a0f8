"""The launch lines that serving engineers know are taken; what has no meaning here is answered."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from knockon.cli.app import app
from knockon.cli.foreign_flags import FOREIGN
from knockon.cli.serve import choose_draft, read_chat_template
from knockon.errors import KnockonError, Refused
from knockon.server.settings import ServerSettings

# The launch line of the published serving numbers, from its first flag on.
PUBLISHED = shlex.split("""
    --model-path TARGET --tp-size 2 --dtype bfloat16
    --attention-backend flashinfer
    --max-running-requests 32 --cuda-graph-max-bs-decode 32
    --cuda-graph-backend-prefill disabled
    --mamba-radix-cache-strategy extra_buffer --mamba-ssm-dtype bfloat16
    --linear-attn-backend triton
    --mem-fraction-static 0.80
    --page-size 1 --random-seed 42
    --max-mamba-cache-size 160
    --speculative-algorithm DFLASH
    --speculative-draft-model-path DOMINO
    --speculative-dflash-block-size 16
    --speculative-draft-attention-backend flashinfer
    --speculative-domino-candidate-pool-size 2048
""")


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[ServerSettings]:
    """What ``serve`` was called with."""
    found: list[ServerSettings] = []
    monkeypatch.setattr("knockon.server.run.serve", found.append)
    return found


def launch(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["serve", *arguments])


def test_the_published_launch_line_is_taken_as_written(served: list[ServerSettings]) -> None:
    done = launch(*PUBLISHED)
    assert done.exit_code == 0, done.output
    engine = served[0].engine
    assert engine["model"] == "TARGET" and engine["draft"] == "DOMINO"
    assert engine["tp_size"] == 2 and engine["dtype"] == "bfloat16"
    assert engine["max_batch_size"] == 32 and engine["page_size"] == 1
    assert engine["mem_fraction_static"] == 0.8
    assert engine["max_mamba_cache_size"] == 160 and engine["mamba_ssm_dtype"] == "bfloat16"
    assert engine["verify_width"] == 16
    assert engine["cuda_graph_max_bs"] == 32
    assert engine["speculative_domino_candidate_pool_size"] == 2048
    assert served[0].random_seed == 42
    for flag in PUBLISHED:
        if flag in FOREIGN:
            assert f"note: {flag} " in done.stderr
    assert "--attention-backend flashinfer" in done.stderr
    note = "note: --linear-attn-backend triton is not one of auto, torch, fla: using auto"
    assert note in done.stderr
    assert engine["linear_attn_backend"] == "auto"


def test_flags_reach_their_settings(served: list[ServerSettings]) -> None:
    done = launch(
        *("--model-path", "m", "--host", "0.0.0.0", "--port", "8000", "--api-key", "k"),
        *("--served-model-name", "it", "--context-length", "99", "--disable-radix-cache"),
        *("--speculative-num-draft-tokens", "auto", "--speculative-draft-model-path", "d"),
        *("--log-level", "warning", "--chat-template", "{{ messages }}"),
        *("--cuda-graph-max-bs", "8", "--linear-attn-backend", "fla"),
    )
    assert done.exit_code == 0, done.output
    settings = served[0]
    assert (settings.host, settings.port, settings.api_key) == ("0.0.0.0", 8000, "k")
    assert settings.model_name == "it" and settings.log_level == "warning"
    assert settings.chat_template == "{{ messages }}"
    assert settings.engine["max_model_len"] == 99
    assert settings.engine["prefix_cache"] is False
    assert settings.engine["verify_width"] == "auto"
    assert settings.engine["cuda_graph_max_bs"] == 8
    assert settings.engine["linear_attn_backend"] == "fla"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such-flag"],
        ["--no-such-flag", "3"],
        ["--mamba-radix-cache-strategy"],
        ["stray"],
        ["--speculative-algorithm", "EAGLE"],
        ["--speculative-algorithm", "DFLASH"],
        ["--linear-attn-backend", "mamba"],
        ["--log-level", "loud"],
        ["--port", "70000"],
    ],
)
def test_what_is_not_known_is_refused(served: list[ServerSettings], arguments: list[str]) -> None:
    done = launch("--model-path", "m", *arguments)
    assert isinstance(done.exception, Refused)
    assert served == []


@pytest.mark.parametrize("draft", [None, "d"])
def test_an_mtp_head_may_be_the_targets_own(
    served: list[ServerSettings], draft: str | None
) -> None:
    arguments = ["--speculative-algorithm", "mtp", "--speculative-num-steps", "5"]
    if draft is not None:
        arguments += ["--speculative-draft-model-path", draft]
    done = launch("--model-path", "m", *arguments)
    assert done.exit_code == 0, done.output
    engine = served[0].engine
    assert (engine["draft"], engine["speculative_algorithm"]) == (draft, "MTP")
    assert engine["speculative_num_steps"] == 5


def test_none_leaves_the_drafter_out() -> None:
    assert choose_draft("NONE", "d") is None
    assert choose_draft("none", None) is None
    assert choose_draft("DFLASH", "d") == "d"
    assert choose_draft(None, "d") == "d"


def test_a_chat_template_comes_from_a_file_or_as_it_stands(tmp_path: Path) -> None:
    file = tmp_path / "chat.jinja"
    file.write_text("{{ messages }}")
    assert read_chat_template(str(file)) == read_chat_template("{{ messages }}")
    with pytest.raises(Refused, match="--chat-template"):
        read_chat_template(str(tmp_path / "nothing"))


@pytest.mark.parametrize(
    "arguments, error",
    [
        (["--verify-width", "4"], "--verify-width: found 4, wanted 1 where no draft is given"),
        (
            ["--speculative-num-draft-tokens", "x"],
            "--verify-width: found 'x', wanted an integer or",
        ),
        (["--context-length", "1"], "--context-length: found 1, wanted an integer of at least 2"),
        (["--max-running-requests", "0"], "--max-running-requests: found 0, wanted an integer"),
        (["--port", "99999"], "--port: found 99999, wanted 0 to 65535"),
        (
            ["--speculative-num-steps", "3"],
            "--speculative-num-steps: found 3, wanted none where no",
        ),
    ],
)
def test_what_is_refused_names_the_flag_a_forgotten_drafters_settings_too(
    served: list[ServerSettings], arguments: list[str], error: str
) -> None:
    done = launch("--model-path", "m", *arguments)
    assert isinstance(done.exception, Refused) and error in str(done.exception)
    assert not served


def test_what_the_engines_process_says_names_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    said = [
        KnockonError("kv_memory: found 7, wanted more"),
        KnockonError("something else: broke"),
        Refused("dflash_config.block_size", 0, "more", "Look there."),
        Refused("draft", "x", "a drafter", "Look there."),
    ]

    def serve(settings: ServerSettings) -> None:
        raise said.pop(0)

    monkeypatch.setattr("knockon.server.run.serve", serve)
    assert [str(launch("--model-path", "m").exception) for _ in range(4)] == [
        "--kv-memory: found 7, wanted more",
        "something else: broke",
        "dflash_config.block_size: found 0, wanted more. Look there.",
        "--speculative-draft-model-path: found 'x', wanted a drafter. Look there.",
    ]
