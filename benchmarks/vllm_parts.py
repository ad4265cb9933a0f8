"""The engines of vllm_h200.py: which runs each does, and what parts of the report they give."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from knockon.bench.vllm.by_hand import chains_alike, rollout_by_hand
from knockon.bench.vllm.run import VllmAnswer, VllmRun, run_together
from knockon.models.tokenizer import load_tokenizer

SPEED, STEP = (1, 8), (1, 8, 32)
LAYERS, ACCEPT_LENGTH = 36, 6.878
# Requests of the CUDA graphs; a batch between two of them is padded to the larger.
GRAPHS = (1, 2, 4, 8, 16, 24, 32)


def read_prompts(file: Path, tokenizer: Path, count: int) -> list[list[int]]:
    """``prompt`` of every line, at most ``count``, as the token ids of a chat of one turn."""
    lines = [json.loads(line) for line in file.read_text().splitlines()][:count]
    encode = load_tokenizer(tokenizer)
    return [
        encode.apply_chat_template(
            [{"role": "user", "content": line["prompt"]}],
            add_generation_prompt=True,
            return_dict=True,
        )["input_ids"]
        for line in lines
    ]


def few_graphs(run: VllmRun, most: int) -> VllmRun:
    """``run`` with whole-step CUDA graphs of a few batch sizes, up to ``most`` requests.

    vLLM captures up to 51 sizes, each of them twice, which takes longer than what is measured
    here. Decoding steps replay a graph all the same, whichever drafter is there.
    """
    if run.eager:
        return run
    tokens = run.proposals + 1 if run.draft else 1
    sizes = [tokens * n for n in GRAPHS if n <= most]
    options = {"cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": sizes}
    return replace(run, engine={**run.engine, "compilation_config": options})


@dataclass
class Bench:
    """What the parts have in common, and the report that grows with every engine that has ended.

    Attributes:
        run: of the small target: its prompts, their longest answers.
        drafters: folders by name; ``None`` for the target alone.
    """

    run: VllmRun
    drafters: dict[str, Path | None]
    parts: tuple[str, ...]
    work: Path
    device: str
    gguf: Path
    report: dict[str, Any] = field(default_factory=dict)
    _greedy: dict[str, list[list[int]]] = field(default_factory=dict)

    def engines(self) -> dict[str, Callable[[], None]]:
        """What is to be run, by name: a process each."""
        found: dict[str, Callable[[], None]] = {}
        if "agreement" in self.parts:
            found["domino, eager"] = self.eager
        small = {"lossless", "speed"} & set(self.parts)
        for name in ("domino", "target", "dflash"):
            if small and name in self.drafters and ("speed" in small or name != "dflash"):
                found[name] = lambda name=name: self.small(name)
        if "knockon" in self.parts:
            found["knockon"] = self.knockon
        if "step" in self.parts:
            found["dflash, 8B"] = lambda: self.step("dflash")
            found["domino, 8B"] = lambda: self.step("domino")
        return found

    def measure(self, name: str, engine: Callable[[], None]) -> None:
        """Run one; where it fails, that is in the report and the others' results stay."""
        start, found = time.perf_counter(), {}
        try:
            engine()
        except Exception:
            found["error"] = traceback.format_exc()
            print(f"{name} failed\n{found['error']}", flush=True)
        found["seconds"] = time.perf_counter() - start
        self.report.setdefault("runs", {})[name] = found

    def eager(self) -> None:
        """Every block that the rollout is handed, and the answers."""
        domino = self.drafters["domino"]
        run = replace(self.run, draft=str(domino), eager=True, record=True)
        (answer,) = run_together([run], self.work / "eager")
        if "lossless" in self.parts:
            self._drafted("eager", answer)
        if "agreement" in self.parts:
            found = self.report["agreement"] = {"accept_length": answer.accept_length}
            for implementation in ("plain", "fused") if self.device == "cuda" else ("plain",):
                dtype = getattr(torch, run.dtype)
                rollout = rollout_by_hand(
                    Path(run.target), domino, dtype, self.device, implementation=implementation
                )
                same, total = chains_alike(answer, rollout)
                found[implementation] = {"same": same, "of": total}

    def small(self, name: str) -> None:
        """Greedy answers and speeds of one drafter, in CUDA graphs."""
        draft = self.drafters[name]
        run = few_graphs(replace(self.run, draft=None if draft is None else str(draft)), max(SPEED))
        greedy, timed = [], []
        if "lossless" in self.parts and name != "dflash":
            greedy = [replace(run, compare=dict(self._greedy) if draft is None else {})]
        if "speed" in self.parts:
            for concurrency in SPEED:
                prompts = run.prompts[: 4 * concurrency]
                closed = replace(run, prompts=prompts, concurrency=concurrency, repeats=2)
                timed.append(replace(closed, sampling={"ignore_eos": True}))
        answers = run_together([*greedy, *timed], self.work / name)
        for answer in answers[: len(greedy)]:
            if draft is None:
                self._alone(answer)
            else:
                self._drafted("graphs", answer)
        for asked, answer in zip(timed, answers[len(greedy) :], strict=True):
            self.report.setdefault("speed", []).append(_row(name, asked, answer))

    def _drafted(self, name: str, answer: VllmAnswer) -> None:
        self._greedy[name] = answer.tokens
        lossless = self.report.setdefault("lossless", {})
        lossless[name] = {
            "accept_length": answer.accept_length,
            "kept_length": answer.kept_length,
        }

    def _alone(self, answer: VllmAnswer) -> None:
        lossless = self.report.setdefault("lossless", {})
        lossless |= {"vllm": answer.version, "answers": len(answer.tokens)}
        for name, gaps in answer.differences.items():
            found = [asdict(gap) | {"near_tie": gap.near_tie} for gap in gaps]
            lossless[name]["differences"] = found

    def knockon(self) -> None:
        """Mean accept length of Knockon's engine on the same prompts, at the same verify width.

        In a process of its own, so that its memory is given back.
        """
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            asked = (self.gguf, self.drafters["domino"], self.run)
            length = pool.submit(_knockon, *asked).result()
        self.report["knockon"] = {"accept_length": length}

    def step(self, name: str) -> None:
        """Steps at Qwen3-8B's sizes: all requests are alike, their acceptance is vLLM's to draw."""
        folders = qwen3_8b_folders(self.work / "qwen3-8b")
        shared = VllmRun(
            str(folders["target"]),
            [],
            draft=str(folders[name]),
            max_tokens=512,
            max_model_len=1024,
            repeats=2,
            speculative={
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_length": ACCEPT_LENGTH,
            },
            engine={"load_format": "dummy", "gpu_memory_utilization": 0.6},
            sampling={"ignore_eos": True},
        )
        runs = []
        for concurrency in STEP:
            prompts = [[100 + i, *range(1000, 1255)] for i in range(concurrency)]
            run = replace(shared, prompts=prompts, concurrency=concurrency)
            runs.append(few_graphs(run, max(STEP)))
        for run, answer in zip(runs, run_together(runs, self.work / f"{name}_8b"), strict=True):
            row = _row(name, run, answer)
            row["whole_ms"] = 1e3 * sum(answer.seconds) * run.concurrency / answer.drafts
            self.report.setdefault("step", []).append(row)


def _row(name: str, run: VllmRun, answer: VllmAnswer) -> dict[str, Any]:
    row = {
        "drafter": name,
        "concurrency": run.concurrency,
        "tokens_per_second": answer.tokens_per_second,
        "accept_length": answer.accept_length,
        "kept_length": answer.kept_length,
        "step_ms": answer.step_ms,
        "full_steps": len(answer.full_steps),
    }
    print(json.dumps(row), flush=True)
    return row


def _knockon(gguf: Path, draft: Path, run: VllmRun) -> float:
    from knockon.engine.llm import LLM
    from knockon.engine.sampling_params import SamplingParams

    engine = LLM(
        gguf,
        draft=draft,
        dtype=run.dtype,
        max_model_len=run.max_model_len,
        verify_width=run.proposals + 1,
    )
    params = SamplingParams(temperature=0.0, max_tokens=run.max_tokens)
    outputs = engine.generate([list(prompt) for prompt in run.prompts], params)
    lengths = [length for output in outputs for length in output.metrics.accept_lengths]
    return sum(lengths) / len(lengths)


def qwen3_8b_folders(work: Path) -> dict[str, Path]:
    """Configurations without weights: vLLM makes them up (``load_format="dummy"``)."""
    sizes = {
        "model_type": "qwen3",
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000.0,
        "max_position_embeddings": 40960,
    }
    target = sizes | {
        "architectures": ["Qwen3ForCausalLM"],
        "num_hidden_layers": LAYERS,
        "tie_word_embeddings": False,
        "eos_token_id": 151645,
    }
    dflash = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
    draft = sizes | {
        "architectures": ["DFlashDraftModel"],
        "num_hidden_layers": 5,
        "layer_types": ["full_attention"] * 5,
        "block_size": 16,
        "num_target_layers": LAYERS,
    }
    domino = dflash | {
        "projector_type": "domino",
        "pure_draft_prefix_len": 1,
        "gru_hidden_dim": 1024,
        "emb_dim": 256,
        "shift_label": True,
    }
    configs = {
        "target": target,
        "dflash": draft | {"dflash_config": dflash},
        "domino": draft | {"dflash_config": domino},
    }
    folders = {}
    for name, config in configs.items():
        folders[name] = work / name
        folders[name].mkdir(parents=True, exist_ok=True)
        (folders[name] / "config.json").write_text(json.dumps(config, indent=1))
    return folders
