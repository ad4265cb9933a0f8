"""The chain for larger batches: state products on the tensor cores, grid-wide barriers between.

Every program owns a few GRU units, a few correction units and a share of one request's pool, so
that a step is three phases: the cell of its units; one product of the whole state with its rows of
``W_hh`` and ``W1``; the sums of its pool rows. All programs must be on the device at once
(cooperative launch); ``barrier`` and ``best`` must be zero.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.rollout.fused.chain_pieces import gru_cell, pack, pool_sums, silu, unpack_id
from knockon.triton_backend import jit, tl


@jit
def _load_acquire(pointer):
    """Many programs may poll so at once; atomics on one address would queue up."""
    return tl.inline_asm_elementwise(
        "ld.acquire.gpu.global.s32 $0, [$1];",
        "=r,l",
        [pointer],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@jit
def _wait_for_all(barrier, target, SEVERAL: tl.constexpr):
    """Returns once the barrier was entered ``target`` times; what came before is visible after."""
    tl.debug_barrier()
    tl.atomic_add(barrier, 1, sem="release", scope="gpu")
    if SEVERAL:
        while _load_acquire(barrier) < target:
            pass
    tl.debug_barrier()


@jit
def _parts(x):
    """Three BF16 numbers whose sum is the FP32 ``x``, all 24 bits of it."""
    high = x.to(tl.bfloat16)
    rest = x - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    return high, middle, (rest - middle.to(tl.float32)).to(tl.bfloat16)


@jit
def _tile_ids(pool_ids, own, k, k_in, pool):
    return tl.load(pool_ids + own * pool + k, mask=k_in, other=0)


@jit
def _tile_rows(correction_out, ids, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr):
    """Rows of ``W2`` at ``ids``; those of places that are not real are read too, and not used."""
    e = tl.arange(0, WIDTH_BLOCK)
    at = correction_out + ids.to(tl.int64)[:, None] * WIDTH + e[None, :]
    return tl.load(at, mask=e[None, :] < WIDTH, other=0)


@jit
def chain_tiled(
    table,  # [V, 3G]
    stacked,  # [3G + E, G]: W_hh, then the columns of W1 that read the state
    correction_out,  # [V, E]; [V, E / 2] int32 where PACKED
    draft_part,  # [T - p, B, E] FP32
    bonus,  # [B] int64
    tokens,  # [B, T] int64, the first p columns filled
    pool_ids,  # [B, K] int32
    base,  # see INDEXED
    states,  # [B, G] FP32, each program's own units
    shared,  # [2, parts, B, G], the state as the product reads it: see SPLIT
    own_gates,  # [PROGRAMS, B, N] FP32, each program's own
    hidden,  # [B, E] FP32
    best,  # [T, B] int64
    barrier,  # [1] int32
    batch,
    pool,
    steps,
    prefix,
    base_step,  # strides of base in elements
    base_row,
    turns,  # pool tiles of a program; not a constant, or the loop over them would be unrolled
    depth,  # G, for the same reason
    G: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,  # of a row of correction_out
    WIDTH_BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    PER: tl.constexpr,  # programs for each request's pool
    UNITS: tl.constexpr,  # GRU units of a program
    HIDDEN: tl.constexpr,  # correction units of a program
    M: tl.constexpr,  # requests of a tile of the state product
    N: tl.constexpr,  # its rows: UNITS for each gate, then HIDDEN
    BLOCK: tl.constexpr,  # of G in a turn
    STAGES: tl.constexpr,  # turns in flight
    POOL_ROWS: tl.constexpr,  # of a pool tile
    INDEXED: tl.constexpr,  # base is [T, B, N] and read at the ids; else [T - p, B, K]
    SPLIT: tl.constexpr,  # three BF16 parts, whose products a tensor core sums in FP32; or FP32
    PACKED: tl.constexpr,
):
    pid = tl.program_id(0)
    entered = 0
    PARTS: tl.constexpr = 3 if SPLIT else 1
    unit = pid * UNITS + tl.arange(0, UNITS)
    n = tl.arange(0, N)
    gate_row = (n // UNITS) * G + pid * UNITS + n % UNITS
    hidden_unit = pid * HIDDEN + n - 3 * UNITS
    is_gate = n < 3 * UNITS
    is_hidden = (n >= 3 * UNITS) & (n < 3 * UNITS + HIDDEN) & (hidden_unit < E)
    row = tl.where(is_gate, gate_row, 3 * G + hidden_unit)
    row_in = is_hidden | (is_gate & (pid * UNITS + n % UNITS < G))
    own_gates += pid * batch * N

    e = tl.arange(0, WIDTH_BLOCK)
    e_in = e < WIDTH
    PAIR: tl.constexpr = 2 if PACKED else 1
    wide_step = tl.zeros([], tl.int64) + base_step
    own = pid // PER  # the request whose pool this program scores
    start = (tl.zeros([], tl.int64) + base_row) * own
    first = (pid % PER) * (turns * POOL_ROWS)

    for j in range(0, steps):
        tl.debug_barrier()  # the gates were stored by other threads of this program
        for first_request in range(0, batch, M):
            b = first_request + tl.arange(0, M)
            b_in = b < batch
            if j == 0:
                token = tl.load(bonus + b, mask=b_in, other=0)
            elif j <= prefix:
                token = tl.load(tokens + b * steps + j - 1, mask=b_in, other=0)
            else:
                packed = tl.load(
                    best + (j - 1) * batch + b, mask=b_in, other=0, cache_modifier=".cg"
                )
                token = tl.where(b_in, unpack_id(packed), 0)
                if pid == 0:
                    tl.store(tokens + b * steps + j - 1, token, mask=b_in)
            inside = b_in[:, None] & (unit[None, :] < G)
            at = table + token[:, None] * (3 * G) + unit[None, :]
            in_reset = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            in_update = tl.load(at + G, mask=inside, other=0.0).to(tl.float32)
            in_new = tl.load(at + 2 * G, mask=inside, other=0.0).to(tl.float32)
            later = inside & (j > 0)
            at = states + b[:, None] * G + unit[None, :]
            old = tl.load(at, mask=later, other=0.0, cache_modifier=".cg")
            gates = own_gates + b[:, None] * N + tl.arange(0, UNITS)[None, :]
            st_reset = tl.load(gates, mask=later, other=0.0, cache_modifier=".cg")
            st_update = tl.load(gates + UNITS, mask=later, other=0.0, cache_modifier=".cg")
            st_new = tl.load(gates + 2 * UNITS, mask=later, other=0.0, cache_modifier=".cg")
            new = gru_cell(old, in_reset, in_update, in_new, st_reset, st_update, st_new)
            tl.store(at, new, mask=inside)
            at = shared + (j % 2) * PARTS * batch * G + b[:, None] * G + unit[None, :]
            if SPLIT:
                high, middle, low = _parts(new)
                tl.store(at, high, mask=inside)
                tl.store(at + batch * G, middle, mask=inside)
                tl.store(at + 2 * batch * G, low, mask=inside)
            else:
                tl.store(at, new, mask=inside)
        entered += 1
        _wait_for_all(barrier, entered * PROGRAMS, PROGRAMS > 1)

        for first_request in range(0, batch, M):
            b = first_request + tl.arange(0, M)
            b_in = b < batch
            z_in = b_in[:, None] & is_hidden[None, :] & (j + 0 * n[None, :] >= prefix)
            z_at = draft_part + ((j - prefix) * batch + b[:, None]) * E + hidden_unit[None, :]
            z = tl.load(z_at, mask=z_in, other=0.0)
            acc = tl.zeros([M, N], tl.float32)
            for turn in tl.range(0, depth, BLOCK, num_stages=STAGES):
                g = turn + tl.arange(0, BLOCK)
                x_at = shared + (j % 2) * PARTS * batch * G + b[:, None] * G + g[None, :]
                x_in = b_in[:, None] & (g[None, :] < G)
                w = tl.load(
                    stacked + row[None, :] * G + g[:, None],
                    mask=row_in[None, :] & (g[:, None] < G),
                    other=0.0,
                )
                high = tl.load(x_at, mask=x_in, other=0.0, cache_modifier=".cg")
                if SPLIT:
                    x_at += batch * G
                    middle = tl.load(x_at, mask=x_in, other=0.0, cache_modifier=".cg")
                    x_at += batch * G
                    low = tl.load(x_at, mask=x_in, other=0.0, cache_modifier=".cg")
                    acc = tl.dot(low, w, acc)
                    acc = tl.dot(middle, w, acc)
                    acc = tl.dot(high, w, acc)
                else:
                    acc = tl.dot(high, w.to(tl.float32), acc, input_precision="ieee")
            tl.store(own_gates + b[:, None] * N + n[None, :], acc, mask=b_in[:, None])
            tl.store(hidden + b[:, None] * E + hidden_unit[None, :], silu(acc + z), mask=z_in)

        if j >= prefix:
            entered += 1
            _wait_for_all(barrier, entered * PROGRAMS, PROGRAMS > 1)
            if own < batch:
                at = hidden + own * E + PAIR * e
                even = tl.load(at, mask=e_in, other=0.0, cache_modifier=".cg")
                odd = tl.load(at + PAIR - 1, mask=e_in, other=0.0, cache_modifier=".cg")
                winner = tl.zeros([POOL_ROWS], tl.int64)
                k = first + tl.arange(0, POOL_ROWS)
                ids = _tile_ids(pool_ids, own, k, k < pool, pool)
                for _ in range(0, turns):
                    rows = _tile_rows(correction_out, ids, WIDTH, WIDTH_BLOCK)
                    base_at = base + start + (j - prefix) * wide_step + k
                    if INDEXED:
                        base_at = base + start + j * wide_step + ids
                    logit = tl.load(base_at, mask=k < pool, other=0.0)
                    # The next tile's ids are on their way while this one's rows are.
                    ahead = k + POOL_ROWS
                    ahead_in = ahead < tl.minimum(pool, first + turns * POOL_ROWS)
                    ahead_ids = _tile_ids(pool_ids, own, ahead, ahead_in, pool)
                    total = pool_sums(rows, even, odd, PACKED) + logit.to(tl.float32)
                    winner = tl.maximum(winner, tl.where(k < pool, pack(total, ids), 0))
                    k, ids = ahead, ahead_ids
                tl.atomic_max(best + j * batch + own, tl.max(winner, 0), sem="relaxed", scope="gpu")
            entered += 1
            _wait_for_all(barrier, entered * PROGRAMS, PROGRAMS > 1)

    if pid == 0:
        for b in range(0, batch):
            packed = tl.load(best + (steps - 1) * batch + b, cache_modifier=".cg")
            tl.store(tokens + b * steps + steps - 1, unpack_id(packed))
