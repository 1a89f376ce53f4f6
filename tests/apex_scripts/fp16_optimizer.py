"""Half precision by hand, as before amp: network_to_half and FP16_Optimizer."""

import argparse
import json

import torch
from apex.fp16_utils import FP16_Optimizer, network_to_half
from apex.fp16_utils import *

parser = argparse.ArgumentParser()
parser.add_argument("--static-loss-scale", type=float, default=128.0)
parser.add_argument("--dynamic-loss-scale", action="store_true")
parser.add_argument("--save", default="")
args = parser.parse_args()
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.BatchNorm1d(6), torch.nn.ReLU(), torch.nn.Linear(6, 1))
model = network_to_half(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
optimizer = FP16_Optimizer(optimizer,
                           static_loss_scale=args.static_loss_scale,
                           dynamic_loss_scale=args.dynamic_loss_scale,
                           dynamic_loss_args={'init_scale': 2 ** 16})
losses = []
for t in range(6):
    x = torch.randn(8, 4)
    y = x.sum(1, keepdim=True)
    optimizer.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x).float(), y)
    optimizer.backward(loss)
    optimizer.clip_master_grads(5.0)
    optimizer.step()
    losses.append(to_python_float(loss.data))
if args.save:
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, args.save)
print("losses " + json.dumps(losses))
