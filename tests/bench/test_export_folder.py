from __future__ import annotations

import pytest
import torch

from knockon.bench.export_folder import export, main
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


def test_the_command_tells_what_it_wants_and_what_is_wrong(tmp_path, capsys):
    with pytest.raises(SystemExit) as ended:
        main([])
    assert ended.value.code == 2
    assert "the following arguments are required: MODEL, FOLDER" in capsys.readouterr().err
    with pytest.raises(SystemExit) as ended:
        main(["--help"])
    assert ended.value.code == 0 and "a catalogue name or a GGUF file" in capsys.readouterr().out

    out = tmp_path / "out"
    folder, text = tmp_path / "model", tmp_path / "model.gguf"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    text.write_text("no GGUF file")
    for model, said in (
        (folder, "wanted a GGUF file; this is a folder already"),
        (text, "GGUF"),
        (tmp_path / "nothing.gguf", "nothing.gguf"),
    ):
        assert main([str(model), str(out)]) == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ") and said in error and error.count("\n") == 1
    assert not out.exists()


def test_the_command_says_where_a_folder_cannot_be_written(tmp_path, capsys, smollm2_path):
    (tmp_path / "file").write_text("")
    assert main([str(smollm2_path), str(tmp_path / "file")]) == 2
    assert "File exists" in capsys.readouterr().err
