from __future__ import annotations

import torch

from knockon.bench.export_folder import export
from knockon.models.config import parse_hf
from knockon.models.gguf_source import GGUFFile
from knockon.models.json_file import read_json_object
from knockon.models.safetensors_source import SafetensorsFolder
from knockon.models.tokenizer import load_tokenizer


def test_the_folder_is_the_same_model(tmp_path, smollm2_path):
    folder = export(str(smollm2_path), tmp_path / "folder")
    gguf, written = GGUFFile(smollm2_path, torch.bfloat16), SafetensorsFolder(folder)
    assert written.names() == gguf.names()
    for name in ("model.layers.7.self_attn.q_proj.weight", "model.norm.weight"):
        assert written.get(name).equal(gguf.get(name))
    assert parse_hf(read_json_object(folder / "config.json")) == gguf.config
    chat = [{"role": "user", "content": "Hello"}]
    texts = [
        load_tokenizer(path).apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        for path in (folder, smollm2_path)
    ]
    assert texts[0] == texts[1]
