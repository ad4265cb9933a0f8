"""The chain for larger batches: state products on the tensor cores, grid-wide barriers between.

Every step has three phases: the GRU cell; the correction's hidden activations; and, side by side,
the pool's sums and the next step's state gates, both of which read what the second phase's barrier
has made visible. All programs must be on the device at once (cooperative launch); ``barrier`` and
``best`` must be zero.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.rollout.fused.chain_pieces import gru_cell, pack, pool_sums, silu, unpack_id
from knockon.rollout.fused.triton_jit import jit, tl


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
def _wait_for_all(barrier, target, ACQUIRE: tl.constexpr):
    """Returns once the barrier was entered ``target`` times; what came before is visible after."""
    tl.debug_barrier()
    tl.atomic_add(barrier, 1, sem="release", scope="gpu")
    if ACQUIRE:
        while _load_acquire(barrier) < target:
            pass
    tl.debug_barrier()


@jit
def _dot(x, w, acc, SPLIT: tl.constexpr):
    """``acc + x · w`` in FP32, ``x`` FP32; ``w`` is BF16 where SPLIT.

    A BF16 matrix product would round the state. Three BF16 parts hold all 24 bits of it.
    """
    if SPLIT:
        high = x.to(tl.bfloat16)
        rest = x - high.to(tl.float32)
        middle = rest.to(tl.bfloat16)
        low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
        acc = tl.dot(low, w, acc)
        acc = tl.dot(middle, w, acc)
        return tl.dot(high, w, acc)
    return tl.dot(x, w.to(tl.float32), acc, input_precision="ieee")


@jit
def _state_product(
    state,  # [B, G] FP32 of one step
    weight,  # [rows, G]
    first_row,
    rows,
    first_request,
    batch,
    G: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    STAGES: tl.constexpr,
):
    """A tile ``[M requests, N rows]`` of ``state · weightᵀ``."""
    b = first_request + tl.arange(0, M)
    n = first_row + tl.arange(0, N)
    acc = tl.zeros([M, N], tl.float32)
    for start in tl.range(0, G, BLOCK, num_stages=STAGES):
        k = start + tl.arange(0, BLOCK)
        x = tl.load(
            state + b[:, None] * G + k[None, :],
            mask=(b[:, None] < batch) & (k[None, :] < G),
            other=0.0,
            cache_modifier=".cg",
        )
        w = tl.load(
            weight + n[None, :] * G + k[:, None],
            mask=(n[None, :] < rows) & (k[:, None] < G),
            other=0.0,
        )
        acc = _dot(x, w, acc, SPLIT)
    return acc


@jit
def _place(first, owned, turn, tiles_of_request, pool, POOL_ROWS: tl.constexpr):
    """The request of a program's pool tile at a turn, its places, and which of them are real."""
    tile = first + turn % tl.maximum(owned, 1)
    k = (tile % tiles_of_request) * POOL_ROWS + tl.arange(0, POOL_ROWS)
    return tile // tiles_of_request, k, k < pool


@jit
def _tile_ids(pool_ids, first, owned, turn, tiles_of_request, pool, POOL_ROWS: tl.constexpr):
    request, k, k_in = _place(first, owned, turn, tiles_of_request, pool, POOL_ROWS)
    return tl.load(pool_ids + request * pool + k, mask=k_in, other=0)


@jit
def _tile_rows(correction_out, ids, WIDTH: tl.constexpr, WIDTH_BLOCK: tl.constexpr):
    """Rows of ``W2`` at ``ids``; those of places that are not real are read too, and not used."""
    e = tl.arange(0, WIDTH_BLOCK)
    at = correction_out + ids.to(tl.int64)[:, None] * WIDTH + e[None, :]
    return tl.load(at, mask=e[None, :] < WIDTH, other=0)


@jit
def chain_tiled(
    table,  # [V, 3G]
    gru_state,  # [3G, G]
    state_half,  # [E, G], the columns of W1 that read the state
    correction_out,  # [V, E]; [V, E / 2] int32 where PACKED
    draft_part,  # [T - p, B, E] FP32
    bonus,  # [B] int64
    tokens,  # [B, T] int64, the first p columns filled
    pool_ids,  # [B, K] int32
    base,  # see INDEXED
    states,  # [T, B, G] FP32
    gates,  # [B, 3G] FP32
    hidden,  # [B, E] FP32
    best,  # [T, B] int64
    barrier,  # [1] int32
    batch,
    pool,
    steps,
    prefix,
    base_step,  # strides of base in elements
    base_row,
    skip,  # pool tiles that a program with a gate tile leaves to others
    G: tl.constexpr,
    E: tl.constexpr,
    WIDTH: tl.constexpr,  # of a row of correction_out
    WIDTH_BLOCK: tl.constexpr,
    PROGRAMS: tl.constexpr,
    CELL_REQUESTS: tl.constexpr,
    CELL_UNITS: tl.constexpr,
    HIDDEN_M: tl.constexpr,  # requests, rows and a turn's share of G in a tile of the hidden product
    HIDDEN_ROWS: tl.constexpr,
    HIDDEN_BLOCK: tl.constexpr,
    M: tl.constexpr,  # the same of the gate product
    GATE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    STAGES: tl.constexpr,  # turns in flight
    POOL_ROWS: tl.constexpr,
    INDEXED: tl.constexpr,  # base is [T, B, N] and read at the ids; else [T - p, B, K]
    SPLIT: tl.constexpr,
    PACKED: tl.constexpr,
):
    pid = tl.program_id(0)
    entered = 0
    request_tiles = tl.cdiv(batch, M)
    hidden_requests = tl.cdiv(batch, HIDDEN_M)
    unit_tiles: tl.constexpr = (G + CELL_UNITS - 1) // CELL_UNITS
    hidden_tiles: tl.constexpr = (E + HIDDEN_ROWS - 1) // HIDDEN_ROWS
    gate_tiles: tl.constexpr = (3 * G + GATE_ROWS - 1) // GATE_ROWS
    cells = tl.cdiv(batch, CELL_REQUESTS) * unit_tiles

    # Pool tiles are dealt once, contiguously; programs with a gate tile get fewer of them.
    tiles_of_request = tl.cdiv(pool, POOL_ROWS)
    pool_tiles = batch * tiles_of_request
    gaters = tl.minimum(request_tiles * gate_tiles, PROGRAMS)
    share = tl.cdiv(pool_tiles + gaters * skip, PROGRAMS)
    gater_share = tl.maximum(share - skip, 0)
    rest = PROGRAMS - gaters
    if rest > 0:
        share = tl.cdiv(tl.maximum(pool_tiles - gaters * gater_share, 0), rest)
    else:
        gater_share = tl.cdiv(pool_tiles, PROGRAMS)
    if pid < gaters:
        first_tile = pid * gater_share
        last_tile = first_tile + gater_share
    else:
        first_tile = gaters * gater_share + (pid - gaters) * share
        last_tile = first_tile + share
    last_tile = tl.minimum(last_tile, pool_tiles)
    owned = tl.maximum(last_tile - first_tile, 0)
    first_tile = tl.minimum(first_tile, pool_tiles - 1)  # a program without tiles reads one

    e = tl.arange(0, WIDTH_BLOCK)
    e_in = e < WIDTH
    PAIR: tl.constexpr = 2 if PACKED else 1

    # One tile is summed while the next one's rows, and the ids after those, are on their way; after
    # a program's last tile comes its first, for the next step, across the barriers.
    ids = _tile_ids(pool_ids, first_tile, owned, 0, tiles_of_request, pool, POOL_ROWS)
    rows = _tile_rows(correction_out, ids, WIDTH, WIDTH_BLOCK)
    next_ids = _tile_ids(pool_ids, first_tile, owned, 1, tiles_of_request, pool, POOL_ROWS)
    wide_step = tl.zeros([], tl.int64) + base_step
    wide_row = tl.zeros([], tl.int64) + base_row
    for j in range(0, steps):
        for tile in range(pid, cells, PROGRAMS):
            b = (tile // unit_tiles) * CELL_REQUESTS + tl.arange(0, CELL_REQUESTS)
            u = (tile % unit_tiles) * CELL_UNITS + tl.arange(0, CELL_UNITS)
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
                if tile % unit_tiles == 0:
                    tl.store(tokens + b * steps + j - 1, token, mask=b_in)
            inside = b_in[:, None] & (u[None, :] < G)
            at = table + token[:, None] * (3 * G) + u[None, :]
            in_reset = tl.load(at, mask=inside, other=0.0).to(tl.float32)
            in_update = tl.load(at + G, mask=inside, other=0.0).to(tl.float32)
            in_new = tl.load(at + 2 * G, mask=inside, other=0.0).to(tl.float32)
            unit_at = b[:, None] * G + u[None, :]
            later = inside & (j > 0)
            old = tl.load(
                states + (j - 1) * batch * G + unit_at, mask=later, other=0.0, cache_modifier=".cg"
            )
            own = gates + b[:, None] * (3 * G) + u[None, :]
            st_reset = tl.load(own, mask=later, other=0.0, cache_modifier=".cg")
            st_update = tl.load(own + G, mask=later, other=0.0, cache_modifier=".cg")
            st_new = tl.load(own + 2 * G, mask=later, other=0.0, cache_modifier=".cg")
            new = gru_cell(old, in_reset, in_update, in_new, st_reset, st_update, st_new)
            tl.store(states + j * batch * G + unit_at, new, mask=inside)
        entered += 1
        _wait_for_all(barrier, entered * PROGRAMS, PROGRAMS > 1)
        state = states + j * batch * G

        if j >= prefix:
            for tile in range(pid, hidden_requests * hidden_tiles, PROGRAMS):
                first_request = (tile // hidden_tiles) * HIDDEN_M
                first_row = (tile % hidden_tiles) * HIDDEN_ROWS
                total = _state_product(
                    state, state_half, first_row, E, first_request, batch,
                    G, HIDDEN_M, HIDDEN_ROWS, HIDDEN_BLOCK, SPLIT, STAGES,
                )  # fmt: skip
                b = first_request + tl.arange(0, HIDDEN_M)
                n = first_row + tl.arange(0, HIDDEN_ROWS)
                inside = (b[:, None] < batch) & (n[None, :] < E)
                z_at = draft_part + ((j - prefix) * batch + b[:, None]) * E + n[None, :]
                total += tl.load(z_at, mask=inside, other=0.0)
                tl.store(hidden + b[:, None] * E + n[None, :], silu(total), mask=inside)
            entered += 1
            _wait_for_all(barrier, entered * PROGRAMS, PROGRAMS > 1)

        if j < steps - 1:
            for tile in range(pid, request_tiles * gate_tiles, PROGRAMS):
                first_request = (tile // gate_tiles) * M
                first_row = (tile % gate_tiles) * GATE_ROWS
                total = _state_product(
                    state, gru_state, first_row, 3 * G, first_request, batch,
                    G, M, GATE_ROWS, BLOCK, SPLIT, STAGES,
                )  # fmt: skip
                b = first_request + tl.arange(0, M)
                n = first_row + tl.arange(0, GATE_ROWS)
                inside = (b[:, None] < batch) & (n[None, :] < 3 * G)
                tl.store(gates + b[:, None] * (3 * G) + n[None, :], total, mask=inside)
        if j >= prefix:
            for turn in range(0, owned):
                coming = _tile_rows(correction_out, next_ids, WIDTH, WIDTH_BLOCK)
                after_ids = _tile_ids(
                    pool_ids, first_tile, owned, turn + 2, tiles_of_request, pool, POOL_ROWS
                )
                request, k, k_in = _place(
                    first_tile, owned, turn, tiles_of_request, pool, POOL_ROWS
                )
                start = request * wide_row
                if INDEXED:
                    base_at = base + start + j * wide_step + ids
                else:
                    base_at = base + start + (j - prefix) * wide_step + k
                logit = tl.load(base_at, mask=k_in, other=0.0).to(tl.float32)
                at = hidden + request * E + PAIR * e
                even = tl.load(at, mask=e_in, other=0.0, cache_modifier=".cg")
                odd = tl.load(at + PAIR - 1, mask=e_in, other=0.0, cache_modifier=".cg")
                total = pool_sums(rows, even, odd, PACKED) + logit
                packed = tl.max(tl.where(k_in, pack(total, ids), 0), 0)
                tl.atomic_max(best + j * batch + request, packed, sem="relaxed", scope="gpu")
                rows, ids, next_ids = coming, next_ids, after_ids
        entered += 1
        _wait_for_all(barrier, entered * PROGRAMS, PROGRAMS > 1)

    for b in range(pid, batch, PROGRAMS):
        packed = tl.load(best + (steps - 1) * batch + b, cache_modifier=".cg")
        tl.store(tokens + b * steps + steps - 1, unpack_id(packed))
