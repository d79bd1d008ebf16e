"""Train with an exponential moving average of the weights, in the style of older scripts."""

import copy

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast

BATCH_SIZE, WIDTH = 22, 32
torch.manual_seed(3)
torch.backends.cudnn.benchmark = True
cuda = torch.cuda.is_available()
if cuda:
    torch.cuda.set_device(0)
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


model = ResNet(WIDTH).to(device)
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(model)
ema = ModelEMA(model, decay=0.8)
optimizer = torch.optim.RMSprop(model.parameters(), lr=2e-3)
scaler = GradScaler(enabled=False)
for _ in range(10):
    targets = torch.randint(10, (BATCH_SIZE,))
    images = torch.randn(BATCH_SIZE, 3, 12, 12) + targets.view(-1, 1, 1, 1) / 5
    images, targets = images.to(device, non_blocking=True), targets.to(device, non_blocking=True)
    model.train()
    with autocast(enabled=False):
        loss = nn.functional.cross_entropy(model(images), targets)
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
    ema.update(model)
    print(f"loss {loss.item():.7f} average's loss {evaluate(ema.module, images, targets):.7f}")
if cuda:
    print(f"peak memory {torch.cuda.max_memory_allocated() / 2**20:.1f} MiB")
