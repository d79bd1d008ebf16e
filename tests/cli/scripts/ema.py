"""Train with an exponential moving average of the weights, in the style of older scripts."""

import argparse
import copy

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=22)
parser.add_argument("--iters", type=int, default=10)
parser.add_argument("--width", type=int, default=32)
parser.add_argument("--amp", action="store_true")
parser.add_argument("--gpu", type=int, default=0)
args = parser.parse_args()

torch.manual_seed(3)
torch.backends.cudnn.benchmark = True
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(args.gpu)
    torch.cuda.manual_seed_all(3)
device = torch.device("cuda" if cuda else "cpu")


class ResNet(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.blocks = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(3))
        self.norm, self.head = nn.GroupNorm(4, width), nn.Linear(width, 10)
        self.register_buffer("scale", torch.full((1,), 0.5))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = x + self.scale * torch.relu(block(self.norm(x)))
        return self.head(x.mean((2, 3)))


class ModelEMA:
    def __init__(self, model, decay):
        self.module, self.decay = copy.deepcopy(model), decay
        self.module.eval()
        for param in self.module.parameters():
            param.requires_grad_(False)

    def update(self, model):
        params = zip(self.module.parameters(), model.parameters(), strict=True)
        for ema_param, param in params:
            ema_param.data.mul_(self.decay).add_(param.data, alpha=1 - self.decay)


def evaluate(model, inputs, targets):
    model.eval()
    with torch.no_grad():
        return nn.functional.cross_entropy(model(inputs), targets).item()


model = ResNet(args.width).to(device)
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(model)
ema = ModelEMA(model, decay=0.8)
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
scaler = GradScaler(enabled=args.amp and cuda)
for _ in range(args.iters):
    targets = torch.randint(10, (args.batch,))
    images = torch.randn(args.batch, 3, 12, 12) + targets.view(-1, 1, 1, 1) / 5
    images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
    model.train()
    with autocast(enabled=args.amp and cuda):
        loss = nn.functional.cross_entropy(model(images), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    ema.update(model)
    print(f"loss {loss.item():.7f} average's loss {evaluate(ema.module, images, targets):.7f}")
if cuda:
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
