"""A script that edits the lists of functions before initialize."""

import json

import torch
import torch.nn.functional as F
from apex import amp
from apex.amp.lists import functional_overrides, torch_overrides

functional_overrides.FP32_FUNCS.remove('softmax')
torch_overrides.FP32_FUNCS.remove('softmax')
functional_overrides.FP16_FUNCS.append('gelu')
torch_overrides.FP32_FUNCS.append('sigmoid')


class Gate(torch.nn.Module):
    def __init__(self):
        super(Gate, self).__init__()
        self.inner = torch.nn.Linear(4, 6)
        self.outer = torch.nn.Linear(6, 3)

    def forward(self, x):
        x = F.gelu(self.inner(x))
        assert x.dtype == torch.float16
        weights = F.softmax(x, dim=-1)
        assert weights.dtype == torch.float16
        gates = torch.sigmoid(x)
        assert gates.dtype == torch.float32
        return self.outer(gates * weights)


torch.manual_seed(4)
model = Gate()
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = amp.initialize(model, optimizer, opt_level='O1')
losses = []
for _ in range(4):
    loss = F.cross_entropy(model(torch.randn(6, 4)), torch.randint(0, 3, (6,)))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss.item())
print('losses ' + json.dumps(losses))
