"""An engine process that computes nothing: front_end.py starts it in place of the real one.

Every running sequence gets so many tokens of a fixed text a step, a step takes so long, and answers
are of 150 to 500 tokens, or what was asked for. How many and how long is in the environment.
"""

from __future__ import annotations

import os
import random
import sys
import time
from dataclasses import dataclass

import zmq

from knockon.engine.occupancy import Capacity
from knockon.server import messages as m

STEP_MS, TOKENS = "FRONT_END_STEP_MS", "FRONT_END_TOKENS_PER_STEP"
VOCAB_SIZE = 49152
TEXTS = (" the", " sum of", " both", " parts is", "\n\n", " so we", " add 42", " and", " stop.")


@dataclass
class Answer:
    """What a sequence has got."""

    asked: int
    given: int = 0


def main(address: str, parent: int) -> None:
    """Until told to stop, or alone."""
    step, each = float(os.environ[STEP_MS]) / 1000, int(os.environ[TOKENS])
    socket: zmq.Socket[bytes] = zmq.Context().socket(zmq.PAIR)
    socket.set_hwm(0)
    socket.connect(address)
    load = m.decode_to_engine(socket.recv())
    assert isinstance(load, m.Load)
    most = int(load.config["max_batch_size"])
    capacity = Capacity(8192, most, 1 << 16, 16, VOCAB_SIZE)
    socket.send(m.encode(m.Ready(capacity, load.config, {}, {})))
    waiting: dict[int, Answer] = {}
    running: dict[int, Answer] = {}
    due = time.perf_counter()
    while os.getppid() == parent:
        while socket.poll(0 if running else 200):
            message = m.decode_to_engine(socket.recv())
            if isinstance(message, m.Stop):
                return
            if isinstance(message, m.Add):
                length = random.Random(message.number).randint(150, 500)
                waiting[message.number] = Answer(min(length, message.params.max_tokens))
            elif isinstance(message, m.Abort):
                for number in message.numbers:
                    waiting.pop(number, None)
                    running.pop(number, None)
            elif isinstance(message, m.AskFlush):
                socket.send(m.encode(m.Flushed(message.ticket, 0)))
            elif isinstance(message, m.AskStats):
                socket.send(m.encode(m.Stats(message.ticket, {}, {})))
            if waiting and not running:
                break
        while waiting and len(running) < most:
            number = next(iter(waiting))
            running[number] = waiting.pop(number)
        if running:
            due = max(due, time.perf_counter() - step) + step
            deltas = [gain(number, running, each) for number in list(running)]
            time.sleep(max(0.0, due - time.perf_counter()))
            socket.send(m.encode(m.Outputs(deltas, step)))
        else:
            socket.send(m.encode(m.Alive()))


def gain(number: int, running: dict[int, Answer], each: int) -> m.Delta:
    """What a step gives a sequence, which may end it."""
    answer = running[number]
    count = min(each, answer.asked - answer.given)
    text = "".join(TEXTS[(answer.given + i) % len(TEXTS)] for i in range(count))
    answer.given += count
    end = None
    if answer.given == answer.asked:
        del running[number]
        verified = -(-answer.asked // each)
        end = m.End("length", None, [each] * verified, 0, 0.0, 0)
    return m.Delta(number, text, [1] * count, None, end)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
