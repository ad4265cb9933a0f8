"""What a training run tells while it runs: JSON lines for plots, the same on the screen."""

from __future__ import annotations

import json
from pathlib import Path


class ProgressLog:
    """Lines of one run.

    Args:
        path: where lines are appended; None for nowhere.
        elapsed: seconds that the run has taken already.
        told: whether anything is printed and written.
    """

    def __init__(self, path: Path | None, elapsed: float, told: bool = True) -> None:
        self.path, self.told = path, told
        self.last: dict[str, float] = {}
        self._tokens, self._since = 0, elapsed

    def count(self, tokens: int) -> None:
        """So many more tokens were read."""
        self._tokens += tokens

    def tell(self, step: int, elapsed: float, progress: float, measures: dict[str, float]) -> None:
        """One line; tokens a second are those since the line before."""
        speed = self._tokens / max(1e-9, elapsed - self._since)
        self._tokens, self._since = 0, elapsed
        line: dict[str, float] = {
            "step": step,
            "seconds": round(elapsed, 1),
            "progress": round(progress, 4),
        }
        line |= {name: round(value, 7 if name == "rate" else 4) for name, value in measures.items()}
        line["tokens_per_second"] = round(speed)
        self.last = line
        if not self.told:
            return
        left = max(0.0, elapsed * (1 - progress) / progress)
        text = " ".join(f"{name} {value:g}" for name, value in line.items())
        print(f"train {text}, {left:.0f} s left", flush=True)
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(line) + "\n")


def keep_lines(log: Path, step: int) -> None:
    """Take up a log where a checkpoint of `step` stands: what came after will be logged again."""
    if not log.exists():
        return
    # A kill may have cut the last line short; it was past the checkpoint then.
    whole = [line for line in log.read_text().splitlines() if line.endswith("}")]
    kept = [line for line in whole if json.loads(line)["step"] <= step]
    log.write_text("".join(line + "\n" for line in kept))
