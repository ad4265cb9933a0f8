"""Load a target model from a Hugging Face folder or a GGUF file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from knockon.errors import Refused
from knockon.layers.attention import AttentionBackend, BlockPlan
from knockon.layers.delta_rule import DeltaChunks
from knockon.layers.embedding import LMHead, VocabParallelEmbedding
from knockon.models.config import ModelConfig, parse_hf
from knockon.models.decoder import Decoder, LayerMaker, TargetOutput
from knockon.models.decoder_layer import LayerMemory
from knockon.models.gguf_config import parse_gguf
from knockon.models.gguf_header import is_gguf, read_header
from knockon.models.gguf_source import GGUFFile
from knockon.models.json_file import read_json_object
from knockon.models.llama import LlamaLayer
from knockon.models.qwen3 import Qwen3Layer
from knockon.models.qwen3_5 import qwen3_5_layer
from knockon.models.safetensors_source import SafetensorsFolder
from knockon.models.strict import load_strictly
from knockon.models.weights import WeightSource
from knockon.parallel import Group, HeadShard, VocabShard

__all__ = ["Target", "TargetOutput", "load_target", "read_config"]

LAYERS: dict[str, LayerMaker] = {
    "llama": LlamaLayer,
    "qwen3": Qwen3Layer,
    "qwen3_5": qwen3_5_layer,
}

# Rows of the rotary tables past the model's context: a speculative block begun at the last position
# reaches beyond it, and its rows are computed before they are dropped.
POSITION_SLACK = 256

# Buffers that old checkpoints hold and that are computed from the config.
_NO_WEIGHTS = ("rotary_emb.inv_freq",)
# Heads that some targets bring along to be drafted with: a drafter's affair.
_DRAFT_HEADS = ("mtp.",)
# A text model that is a part of one of images and text: what stands before its names, and the names
# of the part that reads images.
_CONTAINERS = {"qwen3_5": ("model.", "language_model.")}
_IMAGE_READERS = {"qwen3_5": ("visual.",)}


class Target(Protocol):
    """What the engine and the drafters use of a target model."""

    config: ModelConfig
    dtype: torch.dtype
    kv_dtype: torch.dtype
    device: torch.device
    group: Group
    heads: HeadShard
    vocab_shard: VocabShard
    embedding: VocabParallelEmbedding
    lm_head: LMHead
    attention: AttentionBackend

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """Layers that keep KV, KV heads on this rank, head size."""
        ...

    def allocate(
        self, positions: int, states: int = 0, state_dtype: torch.dtype = torch.float32
    ) -> list[LayerMemory]:
        """What every layer keeps of requests: KV of so many slots, or so many states."""
        ...

    def __call__(
        self,
        token_ids: Tensor,
        plan: BlockPlan,
        kv: Sequence[LayerMemory],
        feature_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """Run rows ``[B, T]`` through the model, writing their keys and values."""
        ...

    def forward(
        self,
        token_ids: Tensor,
        plan: BlockPlan,
        kv: Sequence[LayerMemory],
        feature_layers: tuple[int, ...] = (),
    ) -> TargetOutput:
        """The same."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """Embeddings ``[..., H]`` of ``ids [...]``."""
        ...

    def logits(self, hidden: Tensor) -> Tensor:
        """Logits ``[..., V]`` of ``hidden [..., H]``, equal on every rank."""
        ...

    def pack(self) -> None:
        """Repack the linears for CPU inference."""
        ...

    def prefill_by(self, chunks: DeltaChunks) -> None:
        """What takes prompts in where layers are recurrent."""
        ...


def load_target(
    path: str | Path,
    dtype: torch.dtype | None,
    group: Group,
    device: torch.device | str = "cpu",
    max_positions: int | None = None,
) -> Decoder:
    """Load a target model, this rank's shards of it.

    Tensors are read, dequantised, rounded to ``dtype`` and cut one at a time. The linears are left
    plain; :meth:`Decoder.pack` repacks them for inference on a CPU.

    Args:
        path: a Hugging Face folder or a GGUF file.
        dtype: of weights and activations; ``None`` for the checkpoint's own.
        group: the ranks that share the model.
        device: where the weights live.
        max_positions: rows of the rotary tables; by default the model's context and some slack.

    Raises:
        Refused: as :func:`read_config`; weights that do not fit; heads that cannot be dealt.
    """
    path = Path(path)
    config = read_config(path)
    dtype = dtype or config.dtype
    try:
        model = Decoder(
            config,
            LAYERS[config.architecture],
            dtype,
            group,
            max_positions or config.max_positions + POSITION_SLACK,
            device,
        )
    except RuntimeError as error:
        # torch's allocators have no error of their own on a CPU.
        if "memory" not in str(error):
            raise
        raise Refused(
            f"model {path}", str(error).splitlines()[0], "one that fits memory"
        ) from error
    source: WeightSource = GGUFFile(path, dtype) if is_gguf(path) else SafetensorsFolder(path)
    load_weights(model, source)
    return model


def read_config(path: str | Path) -> ModelConfig:
    """The configuration of a Hugging Face folder or a GGUF file, without its weights.

    Raises:
        Refused: neither of the two; no ``config.json``; as :func:`parse_hf` and
            :func:`~knockon.models.gguf_config.parse_gguf`.
    """
    path = Path(path)
    if is_gguf(path):
        return parse_gguf(read_header(path))
    if not path.is_dir():
        found = "no such path" if not path.exists() else "a file"
        raise Refused(f"model {path}", found, "a Hugging Face folder or a GGUF file")
    config = _read_json(path / "config.json")
    if config is None:
        raise Refused(f"model {path}", "no config.json", "a Hugging Face folder")
    return parse_hf(config, _read_json(path / "generation_config.json"))


def load_weights(model: Decoder, source: WeightSource) -> None:
    """Load ``model`` strictly from ``source``.

    A tied checkpoint may hold its head a second time; it must then equal the embedding.
    """
    loaders = model.loaders()
    optional = []
    if model.config.tie_word_embeddings:
        optional.append("lm_head.weight")
        loaders["lm_head.weight"] = lambda full: _check_tied(full, model.embedding)
    load_strictly(
        source,
        loaders,
        optional,
        ignored_suffixes=_NO_WEIGHTS,
        prefixes=_CONTAINERS.get(model.config.architecture, ("model.",)),
        ignored_prefixes=_DRAFT_HEADS + _IMAGE_READERS.get(model.config.architecture, ()),
    )


def _check_tied(full: Tensor, embedding: VocabParallelEmbedding) -> None:
    shard, held = embedding.shard, embedding.weight
    rows = full[shard.start : shard.stop].to(held)
    if full.shape[0] != shard.vocab_size or not torch.equal(rows, held[: shard.num_org]):
        raise Refused("values", "another matrix", "the embedding, with tie_word_embeddings true")


def _read_json(file: Path) -> dict[str, Any] | None:
    return read_json_object(file) if file.is_file() else None
