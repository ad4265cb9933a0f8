"""What a matrix was measured on and with, as its servers and its settings tell."""

from __future__ import annotations

from collections import Counter
from typing import Any

from knockon.bench.matrix.report.results import Results
from knockon.bench.workload_files import title_of

UNKNOWN = "a machine that its server did not tell of"


def machines(results: Results) -> Counter[str]:
    """Machines by the cells measured on them."""
    return Counter(machine(record.get("server")) for record in results.done.values())


def machine(server: dict[str, Any] | None) -> str:
    """``"CPU (AMD EPYC 9R14, 2 cores, torch threads: 2)"`` or ``"2 x NVIDIA H200"``."""
    if not server or not server.get("environment") or not server.get("engine"):
        return UNKNOWN
    found, engine = server["environment"], server["engine"]
    if engine["device"] == "cuda":
        ranks = engine["tp_size"]
        return (f"{ranks} x " if ranks > 1 else "") + found["gpus"][0]
    return f"CPU ({found['cpu']}, {found['cores']} cores, torch threads: {found['torch_threads']})"


def on_cpu(results: Results) -> bool:
    """Whether all was measured on a CPU."""
    return bool(results.done) and all(name.startswith("CPU") for name in machines(results))


def numerics(results: Results) -> str:
    """``"bfloat16, TP 1"``; every kind that occurs."""
    kinds = {
        f"{record['server']['engine']['dtype']}, TP {record['server']['engine']['tp_size']}"
        for record in results.done.values()
        if record.get("server") and record["server"].get("engine")
    }
    return " and ".join(sorted(kinds))


def facts(results: Results) -> list[str]:
    """How it was measured, a line each."""
    settings = results.settings
    servers = [record["server"] for record in results.done.values() if record.get("server")]
    found = [f"Model: {settings['model']}{_sizes(servers)}."]
    for kind, path in settings["drafters"].items():
        found.append(f"Drafter {kind}: {path or 'the head among the weights of the model'}.")
    found.append(f"Machine: {'; '.join(machines(results)) or 'none yet'}. {numerics(results)}.")
    versions = sorted({_versions(server) for server in servers if server.get("environment")})
    found += [f"Versions: {each}." for each in versions]
    dates = sorted(record["began"][:10] for record in results.done.values())
    if dates:
        between = dates[0] if dates[0] == dates[-1] else f"{dates[0]} to {dates[-1]}"
        found.append(f"Measured: {between}, a fresh server for each cell, {_repeats(results)}.")
    ahead = sorted({record.get("servers_ahead", 0) for record in results.done.values()} - {0})
    if ahead:
        told = " or ".join(map(str, ahead))
        found.append(
            f"Servers beside the one that was asked: up to {told}, all ready and idle by then."
        )
    return [*found, *_requests(results)]


def _requests(results: Results) -> list[str]:
    settings = results.settings
    prompts = []
    for name in results.workloads:
        whole = settings["workloads"][name]["prompts"]
        counts = [_count(settings, whole, c) for c in results.concurrencies]
        told = "/".join(str(count) for count in dict.fromkeys(counts))
        prompts.append(f"{title_of(name)} {told}")
    each = "/".join(map(str, results.concurrencies))
    warm = settings["warmup_requests"]
    drawn = settings["temperature"]
    end = "exactly" if settings["ignore_eos"] else "at most"
    through = "chat template" if settings["chat"] else "plain completions"
    rate = settings["request_rate"]
    sent = "as places come free" if rate == "inf" else f"{rate} a second at Poisson times"
    found = [
        f"Prompts of a cell at {each} in flight: {', '.join(prompts)}; seed {settings['seed']}.",
        f"Requests: {through}, {'greedy' if drawn == 0 else f'temperature {drawn:g}'}, {end} "
        f"{settings['output_len']} tokens, sent {sent}. Before them "
        f"{'as many as the concurrency' if warm is None else warm} to warm up; then the prefix "
        "cache is emptied.",
    ]
    if settings["serve_arguments"]:
        found.append(f"Servers are also told: {' '.join(settings['serve_arguments'])}.")
    return found


def _count(settings: dict[str, Any], whole: int, concurrency: int) -> int:
    most = settings["num_prompts"].get(str(concurrency))
    return whole if most is None else min(most, whole)


def _sizes(servers: list[dict[str, Any]]) -> str:
    sizes = next((server["model_sizes"] for server in servers if server.get("model_sizes")), None)
    if sizes is None:
        return ""
    heads = f"{sizes.get('num_heads')} heads ({sizes.get('num_kv_heads')} KV)"
    return (
        f", {sizes.get('architecture')}: {sizes.get('num_layers')} layers, hidden "
        f"{sizes.get('hidden_size')}, {heads}, vocabulary {sizes.get('vocab_size')}"
    )


def _versions(server: dict[str, Any]) -> str:
    return ", ".join(f"{k} {v}" for k, v in server["environment"]["versions"].items())


def _repeats(results: Results) -> str:
    return "1 repeat" if results.repeats == 1 else f"{results.repeats} repeats"
