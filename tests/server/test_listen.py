"""The port is open before the model is there, and small writes leave at once."""

from __future__ import annotations

import socket

import pytest

from knockon.errors import Refused
from knockon.server.run import listen


def test_small_writes_do_not_wait_for_acknowledgements() -> None:
    """A stream's events are small: held back for the one before, each would take 40 ms."""
    with listen("127.0.0.1", 0) as listener, socket.create_connection(listener.getsockname()):
        accepted, _ = listener.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) != 0


def test_a_taken_port_is_refused_by_its_number() -> None:
    with listen("127.0.0.1", 0) as listener:
        port = listener.getsockname()[1]
        with pytest.raises(Refused, match=f"127.0.0.1:{port}"):
            listen("127.0.0.1", port)
