"""Train a small CNN, epoch by epoch, and keep the checkpoint with the best accuracy."""

import argparse
import shutil

import torch
from meters import AverageMeter, ProgressMeter
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
for name, default in (("epochs", 2), ("batch", 32), ("batches", 5), ("width", 16), ("size", 16)):
    parser.add_argument(f"--{name}", default=default, type=int)
parser.add_argument("--checkpoint", default="", help="file that each epoch is saved in")
parser.add_argument("--resume", default="", help="file to go on from")


def images(n, size):
    target, tints = torch.randint(10, (n,)), torch.linspace(-1, 1, 30).view(10, 3, 1, 1)
    return TensorDataset(tints[target] + torch.randn(n, 3, size, size), target)


def cnn(width):
    layers = []
    for before, after in ((3, width), (width, 2 * width), (2 * width, 4 * width)):
        layers += [nn.Conv2d(before, after, 3, 2), nn.GroupNorm(4, after), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4 * width, 10))


def accuracy(output, target, topk):
    correct = output.topk(max(topk), dim=1).indices.t().eq(target)
    return [correct[:k].float().sum(0).mean().item() * 100 for k in topk]


def run_epoch(loader, model, criterion, device, name, optimizer=None):
    meters = [AverageMeter(of) for of in (f"{name} loss", "acc@1", "acc@5")]
    progress = ProgressMeter(len(loader), meters, name)
    model.train(optimizer is not None)
    for i, (inputs, target) in enumerate(loader, 1):
        inputs = inputs.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        with torch.set_grad_enabled(optimizer is not None):
            output = model(inputs)
            loss = criterion(output, target)
        progress.update([loss.item(), *accuracy(output, target, topk=(1, 5))], len(inputs))
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        progress.display(i)
    return meters[1].average


if __name__ == "__main__":
    args = parser.parse_args()
    torch.manual_seed(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = cnn(args.width).to(device)
    if torch.cuda.device_count() > 1:
        model = nn.DataParallel(model)
    criterion = nn.CrossEntropyLoss().to(device)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=1e-4)
    options = {"batch_size": args.batch, "num_workers": 1, "pin_memory": torch.cuda.is_available()}
    train_loader = DataLoader(images(args.batches * args.batch, args.size), shuffle=True, **options)
    val_loader = DataLoader(images(args.batch, args.size), **options)
    best, start = 0.0, 0
    if args.resume:
        state = torch.load(args.resume, map_location=device)
        best, start = state["best"], state["epoch"]
        getattr(model, "module", model).load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
    for epoch in range(start, args.epochs):
        run_epoch(train_loader, model, criterion, device, f"epoch {epoch}", optimizer)
        top1 = run_epoch(val_loader, model, criterion, device, "validation")
        is_best, best = top1 > best, max(top1, best)
        weights = model.module.state_dict() if hasattr(model, "module") else model.state_dict()
        state = {"epoch": epoch + 1, "best": best, "model": weights}
        if args.checkpoint:
            torch.save(state | {"optimizer": optimizer.state_dict()}, args.checkpoint)
            if is_best:
                shutil.copyfile(args.checkpoint, f"{args.checkpoint}.best")
