"""benchmarks/serving_soak.py: what in a server's log counts as a fault."""

from __future__ import annotations

from tests.benchmark_scripts import load_script

STAMP = "2026-11-30 09:34:40,123"


def test_whatever_a_log_holds_beside_information_is_a_fault() -> None:
    script = load_script("serving_soak")
    fine = [
        f"{STAMP} INFO knockon.server: listening: http://127.0.0.1:1",
        f"{STAMP} INFO uvicorn.error: Finished server process [12]",
    ]
    bad = [
        f"{STAMP} WARNING asyncio: Executing took 1.2 seconds",
        "Traceback (most recent call last):",
        "ValueError: an INFO of its own: none",
    ]
    assert script.faults("\n".join([fine[0], *bad, fine[1], ""])) == bad
    assert script.faults("\n".join(fine)) == []
