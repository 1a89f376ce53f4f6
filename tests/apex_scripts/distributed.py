"""Data parallel training with the companions of apex.parallel, one process a rank."""

import argparse
import json
import os

import torch
import torch.distributed as dist
import apex
from apex import amp
from apex.parallel import DistributedDataParallel as DDP, LARC, convert_syncbn_model

parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", default=int(os.environ.get("LOCAL_RANK", 0)), type=int)
parser.add_argument("--opt_level", default="O1")
parser.add_argument("--larc", action="store_true")
parser.add_argument("--fp32_allreduce", action="store_true")
args = parser.parse_args()

dist.init_process_group(backend="gloo", init_method="env://")
torch.manual_seed(args.local_rank)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
model = convert_syncbn_model(model)
optimizer = apex.optimizers.FusedSGD(model.parameters(), lr=0.1, momentum=0.9)
if args.larc:
    optimizer = LARC(optimizer, trust_coefficient=0.1, clip=False)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale=128.0)
model = DDP(model, delay_allreduce=True, allreduce_always_fp32=args.fp32_allreduce)
losses = []
for step in range(4):
    x = torch.randn(8, 4)
    loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
    optimizer.zero_grad()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    reduced = loss.data.clone()
    dist.all_reduce(reduced)
    losses.append((reduced / dist.get_world_size()).item())
total = sum(p.double().sum() for p in model.parameters()).item()
totals = [None] * dist.get_world_size()
dist.all_gather_object(totals, total)
assert len(set(totals)) == 1, totals
if dist.get_rank() == 0:
    print("losses " + json.dumps(losses))
dist.destroy_process_group()
