"""Image classification with a prefetcher and a learning rate set by hand, in the style of 2019."""

import argparse
import json
import os

import torch
import torch.nn as nn

try:
    from apex.parallel import DistributedDataParallel as DDP
    from apex.fp16_utils import *
    from apex import amp, optimizers
    from apex.multi_tensor_apply import multi_tensor_applier
except ImportError:
    raise ImportError("Please install apex from https://www.github.com/nvidia/apex to run this example.")


def parse():
    parser = argparse.ArgumentParser(description="image classification")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--lr", default=0.1, type=float)
    parser.add_argument("--resume", default="", type=str)
    parser.add_argument("--save", default="", type=str)
    parser.add_argument("--local_rank", default=os.getenv("LOCAL_RANK", 0), type=int)
    parser.add_argument("--sync_bn", action="store_true")
    parser.add_argument("--opt-level", type=str, default="O1")
    parser.add_argument("--keep-batchnorm-fp32", type=str, default=None)
    parser.add_argument("--loss-scale", type=str, default=None)
    return parser.parse_args()


class data_prefetcher():
    def __init__(self, loader):
        self.loader = iter(loader)
        self.mean = torch.tensor([0.485 * 255]).view(1, 1, 1, 1)
        self.std = torch.tensor([0.229 * 255]).view(1, 1, 1, 1)
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = None
            self.next_target = None
            return
        self.next_input = self.next_input.float()
        self.next_input = self.next_input.sub_(self.mean).div_(self.std)

    def next(self):
        input = self.next_input
        target = self.next_target
        self.preload()
        return input, target


class Net(nn.Module):
    def __init__(self):
        super(Net, self).__init__()
        self.conv = nn.Conv2d(1, 2, 3)
        self.bn = nn.BatchNorm2d(2)
        self.relu = nn.ReLU(inplace=True)
        self.fc = nn.Linear(8, 3)

    def forward(self, x):
        x = self.relu(self.bn(self.conv(x)))
        return self.fc(x.view(x.size(0), -1))


def adjust_learning_rate(optimizer, epoch, step, len_epoch):
    factor = epoch // 30
    lr = args.lr * (0.1 ** factor)
    if epoch < 5:
        lr = lr * float(1 + step + epoch * len_epoch) / (5. * len_epoch)
    for param_group in optimizer.param_groups:
        param_group['lr'] = lr


def accuracy(output, target, topk=(1,)):
    _, pred = output.topk(max(topk), 1, True, True)
    correct = pred.t().eq(target.view(1, -1).expand_as(pred.t()))
    return [correct[:k].reshape(-1).float().sum(0, keepdim=True) for k in topk]


def main():
    global args
    args = parse()
    print("opt_level = {}".format(args.opt_level))
    print("keep_batchnorm_fp32 = {}".format(args.keep_batchnorm_fp32), type(args.keep_batchnorm_fp32))
    print("loss_scale = {}".format(args.loss_scale), type(args.loss_scale))
    torch.manual_seed(1)
    assert not multi_tensor_applier.available
    model = Net()
    if args.sync_bn:
        import apex
        model = apex.parallel.convert_syncbn_model(model)
    optimizer = torch.optim.SGD(model.parameters(), args.lr, momentum=0.9, weight_decay=1e-4)
    model, optimizer = amp.initialize(model, optimizer,
                                      opt_level=args.opt_level,
                                      keep_batchnorm_fp32=args.keep_batchnorm_fp32,
                                      loss_scale=args.loss_scale
                                      )
    criterion = nn.CrossEntropyLoss()
    start_epoch = 0
    if args.resume:
        checkpoint = torch.load(args.resume)
        start_epoch = checkpoint['epoch']
        model.load_state_dict(checkpoint['state_dict'])
        optimizer.load_state_dict(checkpoint['optimizer'])
        amp.load_state_dict(checkpoint['amp'])
    images = torch.randint(0, 255, (4, 4, 1, 4, 4), generator=torch.Generator().manual_seed(2))
    targets = torch.randint(0, 3, (4, 4), generator=torch.Generator().manual_seed(3))
    loader = list(zip(images, targets))
    losses = []
    for epoch in range(start_epoch, args.epochs):
        model.train()
        prefetcher = data_prefetcher(loader)
        input, target = prefetcher.next()
        i = 0
        while input is not None:
            i += 1
            adjust_learning_rate(optimizer, epoch, i, len(loader))
            output = model(input)
            loss = criterion(output, target)
            optimizer.zero_grad()
            with amp.scale_loss(loss, optimizer) as scaled_loss:
                scaled_loss.backward()
            optimizer.step()
            prec1, = accuracy(output.data, target)
            losses.append(to_python_float(loss.data))
            input, target = prefetcher.next()
    if args.save:
        torch.save({
            'epoch': args.epochs,
            'state_dict': model.state_dict(),
            'optimizer': optimizer.state_dict(),
            'amp': amp.state_dict(),
        }, args.save)
    print("losses " + json.dumps(losses))


if __name__ == '__main__':
    main()
