"""``knockon doctor``: what is installed, what the machine offers, what will be used and why."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import platform
from typing import Annotated, Any

import typer

from knockon import __version__

_PACKAGES = (
    "torch",
    "triton",
    "fla-core",
    "transformers",
    "safetensors",
    "gguf",
    "huggingface-hub",
    "numpy",
)


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Show versions, devices and models, and what will be used and why."""
    report = examine()
    print(json.dumps(report, indent=2) if as_json else render(report))


def examine() -> dict[str, Any]:
    """The report as plain data, ready for JSON; sizes in bytes."""
    import torch

    from knockon.engine import defaults, hardware
    from knockon.integrations.vllm.report import examine_vllm
    from knockon.models import catalog

    machine = hardware.detect()
    dtype = defaults.choose_dtype(machine)
    choices = {
        "device": defaults.choose_device(machine),
        "dtype": dtype,
        "attention": defaults.choose_attention(machine),
        "linear_attention": defaults.choose_linear_attention(machine, dtype.value),
        "steps": defaults.choose_steps(machine),
        "rollout": defaults.choose_rollout(machine),
        "draft_head": defaults.choose_draft_head(machine),
        "distributed": defaults.choose_distributed(machine),
    }
    return {
        "versions": {
            "knockon": __version__,
            "python": platform.python_version(),
            **{name: _version(name) for name in _PACKAGES},
            # The build matters here (+cpu, +cu130), which the package's metadata may leave out.
            "torch": str(torch.__version__),
        },
        "machine": {**dataclasses.asdict(machine), "torch_threads": torch.get_num_threads()},
        "used": {name: dataclasses.asdict(choice) for name, choice in choices.items()},
        "cache": str(catalog.cache_folder()),
        "models": [
            {
                "name": entry.name,
                "kind": entry.kind,
                "path": None if (path := catalog.location(entry)) is None else str(path),
            }
            for entry in catalog.entries()
        ],
        "vllm": examine_vllm(),
    }


def render(report: dict[str, Any]) -> str:
    """The report for people, one fact a line."""
    machine = report["machine"]
    gpus = [
        f"{gpu['name']}, {_gib(gpu['memory'])}, compute capability "
        + ".".join(map(str, gpu["capability"]))
        for gpu in machine["gpus"]
    ]
    available = _gib(machine["memory_available"])
    sections: dict[str, list[tuple[str, str]]] = {
        "versions": [
            (name, found or "not installed") for name, found in report["versions"].items()
        ],
        "machine": [
            ("cpu", machine["cpu"]),
            ("cpu flags", " ".join(machine["cpu_flags"]) or "none that matter"),
            ("cores", f"{machine['cores']} usable, {machine['torch_threads']} torch threads"),
            ("memory", f"{_gib(machine['memory'])}, {available} available"),
            ("gpus", "; ".join(gpus) or "none"),
        ],
        "will be used": [
            (name, f"{choice['value']} ({choice['why']})")
            for name, choice in report["used"].items()
        ],
        f"models (cache: {report['cache']})": [
            (model["name"], model["path"] or _absence(model)) for model in report["models"]
        ],
    }
    vllm = report["vllm"]
    if vllm is not None:
        sections["domino in vllm (docs/vllm.md)"] = [
            ("vllm", f"{vllm['version']}: {vllm['refused'] or 'Domino drafters are served'}"),
            *(
                (setting["name"], "{value} ({meaning}: {accepted})".format(**setting))
                for setting in vllm["settings"]
            ),
        ]
    width = max(len(name) for facts in sections.values() for name, _ in facts)
    lines = []
    for title, facts in sections.items():
        lines += ["", title, *(f"  {name:<{width}}  {fact}" for name, fact in facts)]
    return "\n".join(lines[1:])


def _absence(model: dict[str, Any]) -> str:
    if model["kind"] == "drafter":
        return "not in this installation"
    return f"not pulled: knockon models pull {model['name']}"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
