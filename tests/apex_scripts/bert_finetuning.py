"""Fine-tuning in the style of BERT: groups, accumulation, a warm-up schedule, fused companions."""

import argparse
import json

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

try:
    from apex.normalization.fused_layer_norm import FusedLayerNorm as BertLayerNorm
except ImportError:
    from torch.nn import LayerNorm as BertLayerNorm


class BertClassifier(nn.Module):
    def __init__(self, vocab=11, hidden=4):
        super().__init__()
        self.embeddings = nn.Embedding(vocab, hidden)
        self.query = nn.Linear(hidden, hidden)
        self.LayerNorm = BertLayerNorm(hidden, eps=1e-12)
        self.classifier = nn.Linear(hidden, 2)

    def forward(self, input_ids, labels=None):
        hidden = self.embeddings(input_ids)
        scores = torch.matmul(self.query(hidden), hidden.transpose(-1, -2))
        hidden = self.LayerNorm(torch.matmul(torch.softmax(scores, dim=-1), hidden) + hidden)
        logits = self.classifier(hidden[:, 0])
        return nn.functional.cross_entropy(logits.view(-1, 2), labels.view(-1)), logits


def train(args):
    model = BertClassifier()
    no_decay = ["bias", "LayerNorm.weight"]
    named = list(model.named_parameters())
    groups = [
        {"params": [p for n, p in named if not any(nd in n for nd in no_decay)], "weight_decay": 0.01},
        {"params": [p for n, p in named if any(nd in n for nd in no_decay)], "weight_decay": 0.0},
    ]
    if args.optimizer == "lamb":
        from apex.optimizers import FusedLAMB
        optimizer = FusedLAMB(groups, lr=1e-2)
    else:
        try:
            from apex.optimizers import FusedAdam
        except ImportError:
            raise ImportError("Please install apex to use distributed and fp16 training.")
        optimizer = FusedAdam(groups, lr=1e-2, bias_correction=False)
    scheduler = LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 2))
    if args.fp16:
        try:
            from apex import amp
        except ImportError:
            raise ImportError("Please install apex from https://www.github.com/nvidia/apex to use fp16 training.")
        model, optimizer = amp.initialize(model, optimizer, opt_level=args.fp16_opt_level)
    losses = []
    model.zero_grad()
    for step in range(8):
        model.train()
        ids = torch.randint(0, 11, (3, 4))
        loss = model(ids, labels=torch.randint(0, 2, (3,)))[0]
        if args.gradient_accumulation_steps > 1:
            loss = loss / args.gradient_accumulation_steps
        if args.fp16:
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
        else:
            loss.backward()
        losses.append(loss.item())
        if (step + 1) % args.gradient_accumulation_steps == 0:
            if hasattr(optimizer, "_amp_stash"):
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), args.max_grad_norm)
            else:
                torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_grad_norm)
            optimizer.step()
            scheduler.step()
            model.zero_grad()
    print("losses " + json.dumps(losses))


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--fp16", action="store_true")
    parser.add_argument("--fp16_opt_level", type=str, default="O1")
    parser.add_argument("--optimizer", default="adam")
    parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
    parser.add_argument("--max_grad_norm", default=1.0, type=float)
    torch.manual_seed(42)
    train(parser.parse_args())
