"""A Llama-family GGUF file as a Hugging Face folder, for engines that do not read GGUF files.

    python -m knockon.bench.export_folder smollm2-135m FOLDER

Weights are dequantised to BF16: the same numbers that Knockon computes with.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file

from knockon.errors import KnockonError, Refused
from knockon.models.catalog import resolve
from knockon.models.gguf_source import GGUFFile
from knockon.models.tokenizer import load_tokenizer


def export(model: str, folder: Path) -> Path:
    """Write ``config.json``, the weights and the tokenizer of ``model`` to ``folder``.

    Raises:
        Refused: a model that is not here, that is no GGUF file, or is not of the Llama family.
        OSError: ``folder`` cannot be written to.
    """
    path = resolve(model)
    if path.is_dir():
        raise Refused("model", str(path), "a GGUF file; this is a folder already")
    source = GGUFFile(path, torch.bfloat16)
    found = source.config
    if found.architecture != "llama" or found.rope.kind != "default":
        raise Refused(
            f"{path}: model",
            f"{found.architecture}, {found.rope.kind} RoPE",
            "Llama with default RoPE",
        )
    folder.mkdir(parents=True, exist_ok=True)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": found.vocab_size,
        "hidden_size": found.hidden_size,
        "intermediate_size": found.intermediate_size,
        "num_hidden_layers": found.num_layers,
        "num_attention_heads": found.num_heads,
        "num_key_value_heads": found.num_kv_heads,
        "head_dim": found.head_dim,
        "rms_norm_eps": found.rms_norm_eps,
        "rope_theta": found.rope.theta,
        "max_position_embeddings": found.max_positions,
        "tie_word_embeddings": found.tie_word_embeddings,
        "bos_token_id": found.bos_token_id,
        "eos_token_id": list(found.eos_token_ids),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    weights = {
        name: source.get(name).to(torch.bfloat16).contiguous() for name in sorted(source.names())
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    load_tokenizer(path).save_pretrained(folder)
    return folder


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 2 where nothing could be exported."""
    parser = argparse.ArgumentParser(
        prog="python -m knockon.bench.export_folder",
        description="Write a Llama-family GGUF file as a Hugging Face folder in BF16.",
    )
    parser.add_argument("model", metavar="MODEL", help="a catalogue name or a GGUF file")
    parser.add_argument("folder", metavar="FOLDER", type=Path, help="where to write it")
    args = parser.parse_args(arguments)
    try:
        print(export(args.model, args.folder))
    except (KnockonError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
