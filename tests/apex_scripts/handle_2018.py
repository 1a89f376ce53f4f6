"""The interface of 2018: amp.init(), a wrapped optimizer, functions registered by name."""

import json

import torch

from apex import amp

amp.register_float_function(torch, 'sigmoid')
amp.register_half_function(torch, 'einsum')
amp_handle = amp.init(enabled=True)

torch.manual_seed(3)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
other = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
optimizer_other = amp_handle.wrap_optimizer(torch.optim.Adam(other.parameters(), lr=0.01), num_loss=2)


@amp.float_function
def squared(output, target):
    assert output.dtype == torch.float32
    return (output - target).pow(2).mean()


losses = []
for step in range(5):
    x = torch.randn(6, 4)
    y = x.sum(dim=1, keepdim=True)
    optimizer.zero_grad()
    optimizer_other.zero_grad()
    output = model(x)
    assert output.dtype == torch.float16
    assert torch.sigmoid(output).dtype == torch.float32
    assert torch.einsum('ij,kj->ik', x, x).dtype == torch.float16
    loss = squared(output, y)
    with amp_handle.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    optimizer.step()
    first, second = squared(other(x), y), other(x).float().abs().mean()
    with optimizer_other.scale_loss(first) as scaled_loss:
        scaled_loss.backward()
    with optimizer_other.scale_loss(second) as scaled_loss:
        scaled_loss.backward()
    optimizer_other.step()
    losses += [loss.item(), first.item(), second.item()]

assert amp_handle.is_active()
with amp_handle._disable_casts():
    assert model(x).dtype == torch.float32
print("losses " + json.dumps(losses))
