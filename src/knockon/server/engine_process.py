"""The engine's process: ``python -m knockon.server.engine_process ADDRESS PARENT_PID``.

Started by :mod:`knockon.server.engine_client`, not by hand. It ends with the HTTP process, whose
signals it leaves to it: a SIGTERM to the whole service must not end answers that are to be drained.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

import zmq

from knockon.errors import KnockonError, Refused
from knockon.server import messages as m
from knockon.startup_heap import keep_startup_objects

if TYPE_CHECKING:
    from knockon.engine.llm import LLM

logger = logging.getLogger("knockon.server.engine_process")
LINGER = 2000  # ms for the last words to get through


def main(address: str, parent: int) -> int:
    """Load what the first message names, serve, and return the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    faulthandler.enable()
    context = zmq.Context()
    socket: zmq.Socket[bytes] = context.socket(zmq.PAIR)
    socket.set_hwm(0)  # both sides bound what they send by what is asked for
    socket.linger = LINGER
    socket.connect(address)
    try:
        return _serve(socket, parent)
    finally:
        socket.close()
        context.term()


def _serve(socket: zmq.Socket[bytes], parent: int) -> int:
    while not socket.poll(1000):
        if os.getppid() != parent:
            return 1
    first = m.decode_to_engine(socket.recv())
    assert isinstance(first, m.Load)
    logging.basicConfig(
        level=first.log_level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s"
    )
    logging.getLogger("transformers").setLevel(logging.ERROR)
    began = time.perf_counter()
    from knockon.engine.environment import environment
    from knockon.engine.llm import LLM
    from knockon.server.engine_loop import EngineLoop

    logger.info("libraries imported: %.1f s", time.perf_counter() - began)
    try:
        config = dict(first.config)
        llm = LLM(config.pop("model"), config.pop("draft", None), **config)
    except KnockonError as error:
        socket.send(m.encode(m.Failed(str(error), refused=isinstance(error, Refused))))
        return 2
    except Exception:
        socket.send(m.encode(m.Failed(traceback.format_exc(), refused=False)))
        return 1
    with llm:
        loop = EngineLoop(llm, socket, parent)
        logger.info("objects that garbage collection leaves out: %d", keep_startup_objects())
        loop.send(m.Ready(llm.capacity(), in_force(llm), environment(), llm.model_sizes()))
        try:
            loop.run()
        except KnockonError as error:
            loop.send(m.Failed(str(error), refused=False))
            return 1
        except Exception:
            loop.send(m.Failed(traceback.format_exc(), refused=False))
            return 1
    return 0


def in_force(llm: LLM) -> dict[str, Any]:
    """The engine's settings, with what was decided where nothing was asked for."""
    metrics, config, capacity = llm.metrics(), llm.config, llm.capacity()
    algorithm = {None: "NONE", "mtp": "MTP"}.get(metrics.draft, "DFLASH")
    decided = config.replace(
        max_model_len=capacity.max_length,
        verify_width=metrics.verify_width,
        speculative_algorithm=algorithm,
        speculative_num_steps=config.mtp_steps() if algorithm == "MTP" else None,
    )
    if capacity.state_dtype:
        states = capacity.max_batch_size + capacity.num_checkpoints
        decided = decided.replace(max_mamba_cache_size=states, mamba_ssm_dtype=capacity.state_dtype)
    return dataclasses.asdict(decided)


if __name__ == "__main__":
    code = main(sys.argv[1], int(sys.argv[2]))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without taking torch apart, which lasts a second
