"""WGAN-GP: a penalty on the norm of gradients, and two initialize calls in one process."""

import argparse
import json

import torch
from torch import autograd, nn, optim
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument('--level', default='O1')
args = parser.parse_args()
torch.manual_seed(9)
critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
generator = nn.Linear(2, 4)
opt_c = optim.RMSprop(critic.parameters(), lr=1e-3)
opt_g = optim.RMSprop(generator.parameters(), lr=1e-3)
critic, opt_c = amp.initialize(critic, opt_c, opt_level=args.level)
generator, opt_g = amp.initialize(generator, opt_g, opt_level=args.level)


def gradient_penalty(real, fake):
    alpha = torch.rand(real.size(0), 1)
    mixed = (alpha * real + (1 - alpha) * fake).requires_grad_(True)
    scores = critic(mixed)
    gradients = autograd.grad(outputs=scores, inputs=mixed, grad_outputs=torch.ones_like(scores),
                              create_graph=True, retain_graph=True, only_inputs=True)[0]
    return ((gradients.norm(2, dim=1) - 1) ** 2).mean()


losses = []
for step in range(4):
    for p in critic.parameters():
        p.requires_grad = True
    real = torch.randn(5, 4)
    fake = generator(torch.randn(5, 2)).detach()
    loss_c = critic(fake).mean() - critic(real).mean() + 10 * gradient_penalty(real, fake)
    opt_c.zero_grad()
    with amp.scale_loss(loss_c, opt_c) as scaled:
        scaled.backward()
    opt_c.step()
    for p in critic.parameters():
        p.requires_grad = False
    loss_g = -critic(generator(torch.randn(5, 2))).mean()
    opt_g.zero_grad()
    with amp.scale_loss(loss_g, opt_g) as scaled:
        scaled.backward()
    opt_g.step()
    losses += [loss_c.item(), loss_g.item()]
print('losses ' + json.dumps(losses))
