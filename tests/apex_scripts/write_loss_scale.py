"""A script that reads and writes the private state of amp, and keeps it in its checkpoints."""

import argparse
import json

import torch
import apex
import apex.amp._amp_state
from apex import amp
from apex.amp._amp_state import _amp_state

parser = argparse.ArgumentParser()
parser.add_argument('--opt-level', default='O2')
args = parser.parse_args()
torch.manual_seed(6)
model = torch.nn.Linear(4, 2)
optimizer = apex.optimizers.FusedAdam(model.parameters(), lr=1e-2)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level, loss_scale='dynamic')
amp._amp_state.loss_scalers[0]._loss_scale = 2 ** 20
assert 'state_dict' in amp.__dict__
assert _amp_state.opt_properties.loss_scale == 'dynamic'
losses = []
scales = []
for step in range(6):
    loss = model(torch.randn(3, 4)).pow(2).mean()
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    if step == 3:
        _amp_state.loss_scalers[0]._loss_scale = 2 ** 6
    if not _amp_state.loss_scalers[0]._has_overflow:
        for p in model.parameters():
            p.data.clamp_(-10, 10)
    optimizer.step()
    for p in model.parameters():
        p.grad = None
    losses.append(loss.item())
    scales.append(apex.amp._amp_state.loss_scalers[0].loss_scale())
optimizer._lazy_init_maybe_master_weights()
optimizer._amp_stash.lazy_init_called = True
saved = [param.clone() for param in amp.master_params(optimizer)]
for param, saved_param in zip(amp.master_params(optimizer), saved):
    param.data.copy_(saved_param.data)
assert _amp_state.loss_scalers[0]._unskipped <= 6
print('scales ' + json.dumps(scales))
print('losses ' + json.dumps(losses))
