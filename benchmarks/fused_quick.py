import sys, time, torch

sys.path.insert(0, "benchmarks")
from chain_kernel import replay_ms
from knockon.rollout import DominoHead, DominoRollout, SingleRank, VocabShard

V, H, G, E, L, K = 248320, 5120, 1024, 256, 16, 2048
g = torch.Generator("cuda").manual_seed(0)


def n(*s, sc):
    return torch.empty(s, dtype=torch.bfloat16, device="cuda").normal_(0, sc, generator=g)


class Fake:
    def __init__(s, size):
        s.size = size
        s.rank = 0

    def all_gather(s, out, x):
        out.copy_(x.unsqueeze(0).expand_as(out))

    def all_reduce(s, x):
        x.copy_(x.clone())

    def broadcast(s, x):
        pass


head = DominoHead(
    n(3 * G, H, sc=H**-0.5),
    n(3 * G, G, sc=G**-0.5 * 2),
    n(E, H + G, sc=G**-0.5),
    n(V, E, sc=E**-0.5),
    prefix_len=1,
    shift_label=False,
)
emb = n(V, H, sc=1.0)
lm = n(V, H, sc=H**-0.5 * 2)


def prof(call):
    from torch.profiler import profile, ProfilerActivity

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        call()
        torch.cuda.synchronize()
    for e in sorted(p.key_averages(), key=lambda e: -e.device_time_total)[:18]:
        print(f"      {e.device_time_total:9.1f}us x{e.count:3d} {e.key[:70]}")


for size in (1, 2):
    sh = [VocabShard.deal(V, size, r) for r in range(size)]
    grp = SingleRank() if size == 1 else Fake(size)
    ex = "compact" if size > 1 else "auto"
    plain = DominoRollout(
        head,
        emb,
        lm[: sh[0].num_padded],
        sh[0],
        grp,
        pool_size=K,
        exchange=ex,
        shards=sh,
        implementation="plain",
    )
    fused = plain.with_settings(K, ex, "fused")
    for B in (1, 8, 64):
        hid = n(B, L, H, sc=1.0)
        bonus = torch.randint(0, V, (B,), device="cuda", generator=g)
        z = hid[:, 1:].transpose(0, 1)
        t0 = time.time()
        a = fused(hid, bonus, in_graph=True)
        torch.cuda.synchronize()
        t1 = time.time()
        b = plain(hid, bonus, in_graph=True)
        base = replay_ms(
            lambda: torch.nn.functional.linear(z.reshape(-1, H), lm[: sh[0].num_padded])
        )
        tp = replay_ms(lambda: plain(hid, bonus, in_graph=True), 2, 50)
        tf = replay_ms(lambda: fused(hid, bonus, in_graph=True))
        print(
            f"size={size} B={B} base {base:.3f} plain +{tp - base:.3f} fused +{tf - base:.4f} same {(a == b).all(1).float().mean().item():.3f} compile {t1 - t0:.1f}s",
            flush=True,
        )
        prof(lambda: fused(hid, bonus, in_graph=True))
