import torch, sys
from torch import nn
import colossalai
from colossalai.amp import AMP_TYPE
from colossalai.core import global_context as gpc
def run(fp16, chunks=1, dp=1):
    cfg = dict(parallel=dict(pipeline=2), NUM_MICRO_BATCHES=4, clip_grad_norm=1.0)
    if chunks>1: cfg["NUM_CHUNKS"]=chunks
    if fp16: cfg["fp16"]=dict(mode=AMP_TYPE.NAIVE, initial_scale=2.0**10)
    colossalai.launch_from_torch(config=cfg, verbose=False)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8,32), nn.GELU(), nn.Linear(32,32), nn.GELU(), nn.Linear(32,32), nn.GELU(), nn.Linear(32, 4))
    model = model[:2] if gpc.mesh.axis('pp').rank == 0 else model[2:]
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2)
    engine, *_ = colossalai.initialize(model, opt, nn.CrossEntropyLoss(), verbose=False)
    g = torch.Generator().manual_seed(gpc.mesh.axis("dp").rank)
    losses=[]
    for _ in range(15):
        x = torch.randn(16, 8, generator=g); y = x[:, :4].argmax(1)
        engine.zero_grad()
        _,_,loss = engine.execute_schedule(iter([(x,y)]))
        engine.step()
        losses.append((loss.item(), engine.optimizer.stepped))
    d=[(str(p.dtype), str(p.grad.dtype)) for p in engine.model.unwrap().parameters()][:1]
    gpc.destroy()
    return losses[-3:], d
