"""Ad hoc."""
import sys, torch, statistics
sys.path.insert(0, "benchmarks")
from chain_kernel import replay_ms
from knockon.rollout import *
V,H,G,E,L,K=248320,5120,1024,256,16,2048
g=torch.Generator("cuda").manual_seed(0)
def n(*s,sc): return torch.empty(s,dtype=torch.bfloat16,device="cuda").normal_(0,sc,generator=g)
class Fake:
    def __init__(s,size): s.size=size; s.rank=0
    def all_gather(s,out,x): out.copy_(x.unsqueeze(0).expand_as(out))
    def all_reduce(s,x): x.copy_(x.clone())
    def broadcast(s,x): pass
head=DominoHead(n(3*G,H,sc=H**-.5),n(3*G,G,sc=G**-.5*2),n(E,H+G,sc=G**-.5),n(V,E,sc=E**-.5),prefix_len=1,shift_label=False)
emb=n(V,H,sc=1.0); lm=n(V,H,sc=H**-.5*2)
def prof(call):
    from torch.profiler import profile, ProfilerActivity
    call(); torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as p:
        call(); torch.cuda.synchronize()
    ev=sorted(p.key_averages(), key=lambda e:-e.device_time_total)[:16]
    for e in ev: print(f"      {e.device_time_total:9.1f}us x{e.count:4d} {e.key[:90]}")
for size in (1,2):
    sh=[VocabShard.deal(V,size,r) for r in range(size)]
    grp=SingleRank() if size==1 else Fake(size)
    r=DominoRollout(head,emb,lm[:sh[0].num_padded],sh[0],grp,pool_size=K,exchange="compact" if size>1 else "auto",shards=sh)
    for B in (1,8,64):
        hid=n(B,L,H,sc=1.0); bonus=torch.randint(0,V,(B,),device="cuda",generator=g)
        z=hid[:,1:].transpose(0,1)
        base=replay_ms(lambda: torch.nn.functional.linear(z.reshape(-1,H), lm[:sh[0].num_padded]))
        torch.cuda.reset_peak_memory_stats(); m0=torch.cuda.memory_allocated()
        r(hid,bonus,in_graph=True); torch.cuda.synchronize(); mem=torch.cuda.max_memory_allocated()-m0
        t=replay_ms(lambda: r(hid,bonus,in_graph=True))
        print(f"plain size={size} B={B} base {base:.3f} total {t:.3f} beyond {t-base:.3f} extra mem {mem/2**20:.0f} MiB", flush=True)
        if B!=8: prof(lambda: r(hid,bonus,in_graph=True))
