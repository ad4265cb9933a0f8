"""Ranks are real processes here: what is claimed of their failures is shown by killing them."""

from __future__ import annotations

import functools
import gc
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from knockon.errors import RankFailed, Refused
from knockon.parallel.launch import RankPool
from tests.parallel import rank_workers

SOON = 8.0  # s: "within seconds", with room for a busy machine

pytestmark = pytest.mark.skipif(not Path("/proc").is_dir(), reason="looks processes up in /proc")


def alive(pid: int) -> bool:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return stat.rpartition(")")[2].split()[0] not in "ZX"


def wait_until(condition: Callable[[], bool], seconds: float = SOON) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.02)
    return True


def listening_ports() -> set[int]:
    """TCP ports on which *this* process listens."""
    inodes = set()
    for fd in Path("/proc/self/fd").iterdir():
        try:
            inodes.add(os.readlink(fd))
        except OSError:
            continue
    ports = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            cells = line.split()
            if cells[3] == "0A" and f"socket:[{cells[9]}]" in inodes:
                ports.add(int(cells[1].rpartition(":")[2], 16))
    return ports


def ends_with_rank_failed(run: Callable[[], object], pids: tuple[int, ...]) -> str:
    """The message of the `RankFailed` that ``run`` must raise soon, with no rank left after it."""
    begun = time.monotonic()
    with pytest.raises(RankFailed) as caught:
        run()
    assert time.monotonic() - begun < SOON
    assert not any(map(alive, pids))
    return str(caught.value)


@pytest.fixture(scope="module")
def shared_pool() -> Iterator[RankPool]:
    """Two ranks for the tests that leave them whole."""
    with RankPool(2, rank_workers.build, {"label": "a"}, threads_per_rank=1, timeout=60) as pool:
        yield pool


def test_every_rank_runs_the_call_and_rank_0_answers(shared_pool: RankPool) -> None:
    assert shared_pool.call("add", 10) == 21
    first, second = shared_pool.call_all("describe")
    assert first[:4] == (0, 2, "a", 1)
    assert second[:4] == (1, 2, "a", 1)
    assert shared_pool.pids == (first[4], second[4])
    assert shared_pool.failure is None


def test_ranks_see_the_parents_environment(
    shared_pool: RankPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert shared_pool.call_all("environ", "PATH") == [os.environ["PATH"]] * 2


def test_ranks_keep_what_their_start_has_made_from_the_collector(shared_pool: RankPool) -> None:
    assert shared_pool.call("kept_objects") > 10_000  # torch is imported there


def test_large_values_pass(shared_pool: RankPool) -> None:
    value = os.urandom(3_000_000)
    assert shared_pool.call_all("echo", value) == [value] * 2


def test_casts_and_calls_keep_their_order(shared_pool: RankPool) -> None:
    for number in range(50):
        shared_pool.cast("note", number)
    assert shared_pool.call_all("noted") == [list(range(50))] * 2


def test_calls_from_many_threads_reach_all_ranks_in_one_order(shared_pool: RankPool) -> None:
    # Were the order not the same, ranks would sum different numbers.
    sums: dict[int, float] = {}
    threads = [
        threading.Thread(target=lambda n=n: sums.__setitem__(n, shared_pool.call("add", n)))
        for n in range(20)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sums == {n: 2 * n + 1 for n in range(20)}


def test_a_refusal_by_every_rank_is_raised_as_itself_and_ends_nothing(
    shared_pool: RankPool,
) -> None:
    with pytest.raises(Refused, match="max_tokens: found -1, wanted a positive number") as caught:
        shared_pool.call("refuse", -1)
    assert caught.value.field == "max_tokens"
    assert shared_pool.call("add", 0) == 1


def test_arguments_that_cannot_be_pickled_end_nothing(shared_pool: RankPool) -> None:
    with pytest.raises(Exception, match="pickle"):
        shared_pool.call("echo", lambda: None)
    assert shared_pool.call("add", 0) == 1


def test_a_rank_that_raises_is_named_with_its_traceback_and_stderr() -> None:
    pool = RankPool(2, "tests.parallel.rank_workers:build", threads_per_rank=1, timeout=60)
    message = ends_with_rank_failed(lambda: pool.call("raise_on", 1), pool.pids)
    assert message.startswith("rank 1 of 2 raised in 'raise_on': ValueError: this rank only")
    assert "rank_workers.py" in message and "Traceback" in message
    assert "a last word from the rank" in message
    with pytest.raises(RankFailed, match="rank 1 of 2 raised"):
        pool.call("add", 0)
    pool.close()


def test_a_rank_killed_in_a_collective_is_named_not_its_peers() -> None:
    with RankPool(3, rank_workers.build, threads_per_rank=1, timeout=60) as pool:
        assert pool.call("add", 0) == 3
        message = ends_with_rank_failed(lambda: pool.call("kill_in_collective", 1), pool.pids)
    assert message.startswith("rank 1 of 3 was killed by SIGKILL in 'kill_in_collective'")


def test_a_death_between_calls_is_noticed_without_a_call() -> None:
    with RankPool(2, rank_workers.build, threads_per_rank=1, timeout=60) as pool:
        os.kill(pool.pids[1], signal.SIGKILL)
        assert wait_until(lambda: pool.failure is not None)
        message = ends_with_rank_failed(lambda: pool.call("add", 0), ())
        assert wait_until(lambda: not any(map(alive, pool.pids)))
    assert message == "rank 1 of 2 was killed by SIGKILL between calls"


def test_an_exit_is_named_and_a_failed_cast_is_raised_by_the_next_call() -> None:
    with RankPool(2, rank_workers.build, threads_per_rank=1, timeout=60) as pool:
        pool.cast("leave", 0)
        message = ends_with_rank_failed(lambda: pool.call("add", 0), pool.pids)
    assert message.startswith("rank 0 of 2 ended with exit code 7 in 'leave'")


def test_a_timeout_names_the_ranks_that_have_not_answered() -> None:
    with RankPool(2, rank_workers.build, threads_per_rank=1, timeout=60) as pool:
        message = ends_with_rank_failed(lambda: pool.call("hang", 1, timeout=0.4), pool.pids)
    assert message == "rank 1 of 2 did not finish 'hang' within 0.4 s"


def test_a_value_that_cannot_be_sent_is_an_error_of_its_call() -> None:
    with RankPool(1, rank_workers.build, threads_per_rank=1, timeout=60) as pool:
        message = ends_with_rank_failed(lambda: pool.call("unpicklable"), pool.pids)
    assert message.startswith("rank 0 of 1 raised in 'unpicklable'")


def test_a_refusal_at_construction_is_the_same_refusal_here() -> None:
    with pytest.raises(Refused) as caught:
        RankPool(2, rank_workers.refuse_all, threads_per_rank=1, timeout=60)
    assert str(caught.value) == "tp_size: found 2, wanted a divisor of 4. Use 4"


@pytest.mark.parametrize(
    ("size", "factory", "expected"),
    [
        (2, "die_at_start", "rank 1 of 2 ended with exit code 3 in its start"),
        (2, "raise_at_start", "rank 1 of 2 raised in its start: OSError: cannot read the weights"),
        (1, "absent", "raised in its start: AttributeError"),
    ],
)
def test_a_rank_that_fails_at_start_is_named(size: int, factory: str, expected: str) -> None:
    with pytest.raises(RankFailed) as caught:
        RankPool(size, f"tests.parallel.rank_workers:{factory}", threads_per_rank=1, timeout=60)
    assert expected in str(caught.value)
    if factory == "die_at_start":
        assert "no memory for the weights" in str(caught.value)


@pytest.mark.parametrize(
    ("field", "arguments"),
    [
        ("size", {"size": 0}),
        ("backend", {"backend": "smoke"}),
        ("threads_per_rank", {"threads_per_rank": 0}),
        ("timeout", {"timeout": float("nan")}),
        ("factory", {"factory": "no_colon"}),
        ("size", {"backend": "nccl", "size": 4096}),
    ],
)
def test_wrong_arguments_are_refused_before_anything_starts(
    field: str, arguments: dict[str, object]
) -> None:
    arguments = {"size": 2, "factory": rank_workers.build, **arguments}
    with pytest.raises(Refused) as caught:
        RankPool(**arguments)  # type: ignore[arg-type]
    assert caught.value.field in (field, "backend")


def test_a_factory_of_the_users_script_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def factory() -> None: ...

    monkeypatch.setattr(factory, "__module__", "__main__")
    monkeypatch.setattr(factory, "__qualname__", "factory")
    monkeypatch.setattr(sys.modules["__main__"], "factory", factory, raising=False)
    with pytest.raises(Refused, match="__main__"):
        RankPool(2, functools.partial(factory))


def test_close_leaves_no_process_port_or_file_and_may_be_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ports, descriptors = listening_ports(), len(os.listdir("/proc/self/fd"))
    pools: list[RankPool] = []

    def make() -> None:
        pools.append(RankPool(2, rank_workers.build, threads_per_rank=1, timeout=60))

    maker = threading.Thread(target=make)  # its end must not end the ranks
    maker.start()
    maker.join()
    pool = pools[0]
    time.sleep(0.3)
    assert pool.call("add", 1) == 3
    assert listening_ports() != ports
    pids = pool.pids
    pool.close()
    pool.close()
    assert not any(map(alive, pids))
    assert listening_ports() == ports
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(RankFailed, match="closed"):
        pool.call("add", 1)


def test_garbage_collection_ends_the_ranks() -> None:
    pool = RankPool(1, rank_workers.build, threads_per_rank=1, timeout=60)
    pids = pool.pids
    del pool
    gc.collect()
    assert not any(map(alive, pids))


def test_close_ends_a_rank_that_hangs_and_ignores_sigterm() -> None:
    pool = RankPool(1, rank_workers.build, threads_per_rank=1, timeout=60)
    pids = pool.pids
    pool.cast("ignore_terminate_and_hang")
    time.sleep(0.3)
    begun = time.monotonic()
    pool.close()
    assert time.monotonic() - begun < SOON
    assert not any(map(alive, pids))


SCRIPT = """
from tests.parallel import rank_workers
from knockon.parallel.launch import RankPool

pool = RankPool(2, rank_workers.build, threads_per_rank=1, timeout=60)  # no __main__ guard
print(*pool.pids, flush=True)
pool.call("hang", 1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_parent_that_is_killed_or_interrupted_leaves_no_orphan(
    tmp_path: Path, number: signal.Signals
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    path = os.pathsep.join(sys.path)
    with subprocess.Popen(
        [sys.executable, str(script)],
        # A test run started in the background of a script ignores the signal, and so would this.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
        process_group=0,
    ) as parent:
        assert parent.stdout is not None and parent.stderr is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(alive, pids))
        time.sleep(0.3)
        if number == signal.SIGINT:
            for pid in pids:  # as a terminal or notebook might, were they in the parent's group
                os.kill(pid, signal.SIGINT)
            time.sleep(0.2)
            assert all(map(alive, pids))
        parent.send_signal(number)
        assert wait_until(lambda: not any(map(alive, pids)))
        assert parent.wait(SOON) == -number
        if number == signal.SIGINT:
            assert "KeyboardInterrupt" in parent.stderr.read()
