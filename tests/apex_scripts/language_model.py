"""An LSTM language model whose gradients are clipped through amp.master_params."""

import argparse
import json

import torch
import torch.nn as nn
from apex import amp

parser = argparse.ArgumentParser()
parser.add_argument("--opt_level", type=str, default="O2")
parser.add_argument("--clip", type=float, default=0.25)
args = parser.parse_args()
torch.manual_seed(1111)


class RNNModel(nn.Module):
    def __init__(self, ntoken, ninp, nhid):
        super(RNNModel, self).__init__()
        self.encoder = nn.Embedding(ntoken, ninp)
        self.rnn = nn.LSTM(ninp, nhid, 1)
        self.decoder = nn.Linear(nhid, ntoken)
        self.ntoken, self.nhid = ntoken, nhid

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output).view(-1, self.ntoken), hidden

    def init_hidden(self, bsz):
        weight = next(self.parameters())
        return (weight.new_zeros(1, bsz, self.nhid), weight.new_zeros(1, bsz, self.nhid))


def repackage_hidden(h):
    if isinstance(h, torch.Tensor):
        return h.detach()
    return tuple(repackage_hidden(v) for v in h)


model = RNNModel(7, 4, 4)
criterion = nn.CrossEntropyLoss()
optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
model, optimizer = amp.initialize(model, optimizer, opt_level=args.opt_level)
hidden = model.init_hidden(2)
losses = []
for i in range(5):
    data = torch.randint(0, 7, (4, 2))
    hidden = repackage_hidden(hidden)
    model.zero_grad()
    output, hidden = model(data[:-1], hidden)
    loss = criterion(output, data[1:].view(-1))
    with amp.scale_loss(loss, optimizer) as scaled_loss:
        scaled_loss.backward()
    torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.clip)
    optimizer.step()
    losses.append(loss.item())
print("losses " + json.dumps(losses))
