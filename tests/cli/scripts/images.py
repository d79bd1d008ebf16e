"""Train a small CNN, epoch by epoch, and keep the weights with the best accuracy."""

import argparse

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

parser = argparse.ArgumentParser()
for name, default in (("epochs", 2), ("batch", 32), ("batches", 5), ("width", 16), ("size", 16)):
    parser.add_argument(f"--{name}", default=default, type=int)


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
    num_right = 0.0
    model.train(optimizer is not None)
    for i, (inputs, target) in enumerate(loader, 1):
        inputs = inputs.to(device, non_blocking=True)
        target = target.to(device, non_blocking=True)
        with torch.set_grad_enabled(optimizer is not None):
            output = model(inputs)
            loss = criterion(output, target)
        top1, top5 = accuracy(output, target, topk=(1, 5))
        num_right += top1 * len(inputs)
        if optimizer is not None:
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"{name}[{i}/{len(loader)}] loss {loss.item():.7f} acc@1 {top1:.3f} acc@5 {top5:.3f}")
    return num_right / len(loader.dataset)


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
    best = 0.0
    for epoch in range(args.epochs):
        run_epoch(train_loader, model, criterion, device, f"epoch {epoch}", optimizer)
        top1 = run_epoch(val_loader, model, criterion, device, "validation")
        if top1 > best:
            best = top1
            weights = model.module.state_dict() if hasattr(model, "module") else model.state_dict()
