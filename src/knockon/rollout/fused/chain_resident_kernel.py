"""The chain for small batches: weights stay in registers, programs talk by tagged words.

One program an SM keeps its rows of ``W_hh``, of the state half of ``W1`` and, where they fit, of
the pool's ``W2`` in registers for the whole block. What programs tell each other (state, hidden
activations, best sums) travels as 64-bit words that carry a tag beside the value, so that a reader
polls the data itself: one trip through L2 where a barrier would take three.

All programs must be on the device at once (cooperative launch), and the boxes must be zero.

What is polled must not be held by two threads: one could see a word that the other does not yet,
and only one of them is asked whether it is there. So polled tiles have an element for every
thread at least, padded where need be.
"""

# Kernel signatures are Triton's, not Python's.
# mypy: disable-error-code="no-untyped-def"

from __future__ import annotations

from knockon.rollout.fused.chain_pieces import gru_cell, pack, pool_sums, silu, unpack_id
from knockon.triton_backend import jit, tl


@jit
def _tagged(x):
    """An FP32 value in the low half of a word whose high half is 1."""
    return (x.to(tl.int32, bitcast=True).to(tl.int64) & 0xFFFFFFFF) | (1 << 32)


@jit
def _value(word):
    return word.to(tl.int32).to(tl.float32, bitcast=True)


@jit
def chain_resident(
    table,  # [V, 3G]
    stacked,  # [3G + E, G]: W_hh, then the columns of W1 that read the state
    correction_out,  # [V, E]; [V, E / 2] int32 where PACKED
    draft_part,  # [T - p, B, E] FP32
    bonus,  # [B] int64
    tokens,  # [B, T] int64, the first p columns filled
    pool_ids,  # [B, K] int32
    base,  # see INDEXED
    state_box,  # [T, B, G] int64
    hidden_box,  # [T, B, E] int64
    best_box,  # [T, BATCH, PER] int64
    st_gates,  # [B, 3G] FP32, the state's gates of the coming step; each program reads its own
    batch,
    pool,
    steps,
    prefix,
    base_step,  # strides of base in elements
    base_row,
    G: tl.constexpr,
    E: tl.constexpr,
    G_BLOCK: tl.constexpr,  # G and E, padded to the number of threads at least
    E_BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,  # of a row of correction_out
    WIDTH_BLOCK: tl.constexpr,  # E_BLOCK, or half of it where PACKED
    BATCH: tl.constexpr,  # batch, as a power of two
    PER: tl.constexpr,  # programs for each request's pool; the grid is BATCH * PER
    PER_BLOCK: tl.constexpr,  # so that BATCH * PER_BLOCK is the number of threads at least
    UNITS: tl.constexpr,  # GRU units of a program
    HIDDEN: tl.constexpr,  # correction units of a program
    ROWS: tl.constexpr,  # pool rows of a program, taken CHUNK at a time
    CHUNK: tl.constexpr,
    PACKED: tl.constexpr,
    INDEXED: tl.constexpr,  # base is [T, B, N] and read at the ids; else [T - p, B, K]
):
    pid = tl.program_id(0)
    g = tl.arange(0, G_BLOCK)
    g_in = g < G
    unit = pid * UNITS + tl.arange(0, UNITS)
    unit_in = unit < G
    weights = stacked + unit[:, None] * G + g[None, :]
    inside = unit_in[:, None] & g_in[None, :]
    w_reset = tl.load(weights, mask=inside, other=0.0)
    w_update = tl.load(weights + G * G, mask=inside, other=0.0)
    w_new = tl.load(weights + 2 * G * G, mask=inside, other=0.0)
    out = pid * HIDDEN + tl.arange(0, HIDDEN)
    out_in = out < E
    w_hidden = tl.load(
        stacked + (3 * G + out[:, None]) * G + g[None, :],
        mask=out_in[:, None] & g_in[None, :],
        other=0.0,
    )

    e = tl.arange(0, WIDTH_BLOCK)
    e_in = e < WIDTH
    column = tl.arange(0, E_BLOCK)
    own = pid // PER  # the request whose pool this program scores
    wide_step = tl.zeros([], tl.int64) + base_step
    k = (pid % PER) * ROWS + tl.arange(0, CHUNK)
    k_in = (k < pool) & (own + 0 * k < batch)  # one shape, which the interpreter wants
    ids = tl.load(pool_ids + own * pool + k, mask=k_in, other=0).to(tl.int64)
    rows = tl.load(
        correction_out + ids[:, None] * WIDTH + e[None, :],
        mask=k_in[:, None] & e_in[None, :],
        other=0,
    )

    b = tl.arange(0, BATCH)
    b_in = b < batch
    mine = b_in[:, None] & unit_in[None, :]
    state = tl.zeros([BATCH, UNITS], tl.float32)
    own_gates = st_gates + b[:, None] * (3 * G) + unit[None, :]
    per = tl.arange(0, PER_BLOCK)

    for j in range(0, steps):
        tl.debug_barrier()  # the gates were stored by other threads of this program
        later = mine & (j > 0)
        st_reset = tl.load(own_gates, mask=later, other=0.0, cache_modifier=".cg")
        st_update = tl.load(own_gates + G, mask=later, other=0.0, cache_modifier=".cg")
        st_new = tl.load(own_gates + 2 * G, mask=later, other=0.0, cache_modifier=".cg")
        if j == 0:
            token = tl.load(bonus + b, mask=b_in, other=0)
        elif j <= prefix:
            token = tl.load(tokens + b * steps + j - 1, mask=b_in, other=0)
        else:
            box = best_box + (j - 1) * BATCH * PER + b[:, None] * PER + per[None, :]
            box_in = (b[:, None] < batch) & (per[None, :] < PER)
            best = tl.load(box, mask=box_in, other=1, volatile=True)
            while tl.min(tl.min((best != 0).to(tl.int32), 1), 0) == 0:
                best = tl.load(box, mask=box_in, other=1, volatile=True)
            token = unpack_id(tl.max(best, 1))
            token = tl.where(b_in, token, 0)
            if pid == 0:
                tl.store(tokens + b * steps + j - 1, token, mask=b_in)
        gates = table + token[:, None] * (3 * G) + unit[None, :]
        in_reset = tl.load(gates, mask=mine, other=0.0).to(tl.float32)
        in_update = tl.load(gates + G, mask=mine, other=0.0).to(tl.float32)
        in_new = tl.load(gates + 2 * G, mask=mine, other=0.0).to(tl.float32)
        state = gru_cell(state, in_reset, in_update, in_new, st_reset, st_update, st_new)
        tl.store(
            state_box + (j * batch + b[:, None]) * G + unit[None, :], _tagged(state), mask=mine
        )

        first = state_box + j * batch * G
        word = tl.load(first + g, mask=g_in, other=1 << 32, volatile=True)
        for r in range(0, batch):
            while tl.min((word >> 32).to(tl.int32), 0) == 0:
                word = tl.load(first + r * G + g, mask=g_in, other=1 << 32, volatile=True)
            seen = _value(word)
            if r + 1 < batch:
                word = tl.load(first + (r + 1) * G + g, mask=g_in, other=1 << 32, volatile=True)
            if j >= prefix:
                total = tl.sum(w_hidden.to(tl.float32) * seen[None, :], 1)
                z = tl.load(
                    draft_part + ((j - prefix) * batch + r) * E + out, mask=out_in, other=0.0
                )
                tl.store(
                    hidden_box + (j * batch + r) * E + out, _tagged(silu(total + z)), mask=out_in
                )
            if j < steps - 1:
                at = st_gates + r * 3 * G + unit
                tl.store(at, tl.sum(w_reset.to(tl.float32) * seen[None, :], 1), mask=unit_in)
                tl.store(at + G, tl.sum(w_update.to(tl.float32) * seen[None, :], 1), mask=unit_in)
                tl.store(at + 2 * G, tl.sum(w_new.to(tl.float32) * seen[None, :], 1), mask=unit_in)

        if j >= prefix:  # noqa: SIM102
            if own < batch:
                at = hidden_box + (j * batch + own) * E + column
                heard = tl.load(at, mask=column < E, other=1 << 32, volatile=True)
                while tl.min((heard >> 32).to(tl.int32), 0) == 0:
                    heard = tl.load(at, mask=column < E, other=1 << 32, volatile=True)
                acts = tl.where(column < E, _value(heard), 0.0)
                if PACKED:
                    even, odd = tl.split(tl.reshape(acts, [E_BLOCK // 2, 2]))
                else:
                    even = acts
                    odd = acts
                best_here = tl.full([CHUNK], 1, tl.int64)
                for start in range(0, ROWS, CHUNK):
                    if ROWS > CHUNK:
                        # After the last chunk comes the first, for the next step.
                        ahead = (pid % PER) * ROWS + (start + CHUNK) % ROWS + tl.arange(0, CHUNK)
                        ahead_in = ahead < pool
                        ahead_ids = tl.load(
                            pool_ids + own * pool + ahead, mask=ahead_in, other=0
                        ).to(tl.int64)
                        ahead_rows = tl.load(
                            correction_out + ahead_ids[:, None] * WIDTH + e[None, :],
                            mask=ahead_in[:, None] & e_in[None, :],
                            other=0,
                        )
                    if INDEXED:
                        base_at = base + j * wide_step + own * base_row + ids
                    else:
                        base_at = base + (j - prefix) * wide_step + own * base_row + k
                    logit = tl.load(base_at, mask=k_in, other=0.0).to(tl.float32)
                    total = pool_sums(rows, even, odd, PACKED) + logit
                    best_here = tl.maximum(best_here, tl.where(k_in, pack(total, ids), 1))
                    if ROWS > CHUNK:
                        rows, ids, k, k_in = ahead_rows, ahead_ids, ahead, ahead_in
                tl.store(best_box + j * BATCH * PER + pid, tl.max(best_here, 0))

    if pid == 0:
        last = best_box + (steps - 1) * BATCH * PER + b[:, None] * PER + per[None, :]
        last_in = (b[:, None] < batch) & (per[None, :] < PER)
        best = tl.load(last, mask=last_in, other=1, volatile=True)
        while tl.min(tl.min((best != 0).to(tl.int32), 1), 0) == 0:
            best = tl.load(last, mask=last_in, other=1, volatile=True)
        tl.store(tokens + b * steps + steps - 1, unpack_id(tl.max(best, 1)), mask=b_in)
