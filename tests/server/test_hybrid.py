"""A text model with recurrent layers, published within one of images and text, over HTTP."""

from __future__ import annotations

import json
from pathlib import Path

import openai
import pytest
from safetensors.torch import load_file, save_file

from tests.engine.generation import TinyShelf
from tests.server.running import KEY, NAME, ServerProcess
from tests.tiny_models import TinyMTP, TinyTarget


def as_published(folder: Path) -> Path:
    """Settings and names nested as in a model of images and text."""
    text = json.loads((folder / "config.json").read_text())
    nested = {
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "model_type": "qwen3_5",
        "text_config": text | {"architectures": None},
        "vision_config": {"depth": 1},
    }
    (folder / "config.json").write_text(json.dumps(nested))
    weights = load_file(folder / "model.safetensors")
    renamed = {name.replace("model.", "model.language_model.", 1): w for name, w in weights.items()}
    save_file(renamed, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_served_with_its_own_head_and_cached_states(tiny: TinyShelf, tmp_path: Path) -> None:
    model = as_published(TinyMTP(own=True).save(tmp_path / "m", tiny.target(TinyTarget("qwen3_5"))))
    arguments = [
        *("--model-path", str(model), "--served-model-name", NAME, "--api-key", KEY),
        *("--dtype", "float32", "--max-running-requests", "2", "--max-mamba-cache-size", "5"),
        *("--page-size", "4", "--speculative-algorithm", "MTP"),
    ]
    messages = [{"role": "user", "content": "One, two, three and four: what comes next?"}]
    with ServerProcess(tmp_path / "log", *arguments) as server:
        client = server.wait_ready().client()

        def ask() -> openai.types.chat.ChatCompletion:
            return client.chat.completions.create(
                model=NAME, messages=messages, temperature=0, max_tokens=12
            )

        first, again = ask(), ask()
        assert first.choices[0].message.content == again.choices[0].message.content
        found = [a.usage.prompt_tokens_details.cached_tokens for a in (first, again)]
        assert found[0] == 0 < found[1]
        info = server.info()
        assert info["capacity"]["num_checkpoints"] == 3
        assert 0 < info["occupancy"]["cached_states"] <= 3
        assert info["metrics"]["draft"] == "mtp"
        assert info["engine"]["max_mamba_cache_size"] == 5
        assert info["engine"]["mamba_ssm_dtype"] == "float32"
        assert info["model_sizes"]["recurrent"]["num_layers"] == 3
        with server.http() as http:
            assert "knockon_cached_states 0.0" not in http.get("/metrics").text
        assert "5 states of recurrent layers in float32" in server.log
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        with pytest.raises(openai.BadRequestError, match="takes text only"):
            client.chat.completions.create(
                model=NAME, messages=[{"role": "user", "content": [image]}]
            )
