"""Train a small GPT on random text: mixed precision, accumulated gradients, averaged weights."""

import argparse
import math

import torch
import torch.nn.functional as F
from torch import nn

defaults = {"n-layer": 2, "n-head": 2, "n-embd": 32, "block-size": 32, "vocab": 64, "batch": 16}
parser = argparse.ArgumentParser()
for name, value in {**defaults, "iters": 10, "accumulate": 2, "ema": 0}.items():
    parser.add_argument(f"--{name}", type=int, default=value)
parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
args = parser.parse_args()
learning_rate, min_lr, warmup_iters, grad_clip, width = 3e-3, 3e-4, 2, 1.0, args.n_embd
device_type = device = "cuda" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337)
data = torch.randint(args.vocab, (1000 + args.block_size,))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        mlp = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.mlp = nn.Sequential(*mlp)

    def forward(self, x):
        qkv = self.attn(self.ln_1(x)).unflatten(2, (3, args.n_head, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(*qkv, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(args.vocab, width), nn.Embedding(args.block_size, width)
        self.h = nn.Sequential(*(Block() for _ in range(args.n_layer)), nn.LayerNorm(width))
        self.lm_head = nn.Linear(width, args.vocab, bias=False)
        self.lm_head.weight = self.wte.weight
        nn.init.normal_(self.wte.weight, std=0.02)

    def forward(self, idx, targets):
        logits = self.lm_head(self.h(self.wte(idx) + self.wpe.weight[: idx.shape[1]]))
        return logits, F.cross_entropy(logits.view(-1, args.vocab), targets.view(-1))


def get_batch():
    starts = torch.randint(1000, (args.batch,))
    x, y = (torch.stack([data[i : i + args.block_size] for i in starts + k]) for k in (0, 1))
    if device_type == "cuda":
        x, y = (z.pin_memory().to(device, non_blocking=True) for z in (x, y))
    return x, y


dtype = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[args.dtype]
ctx = torch.amp.autocast(device_type=device_type, dtype=dtype, enabled=dtype is not None)
model = GPT().to(device)
if torch.cuda.device_count() > 1:
    model = nn.DataParallel(model)
raw_model = model.module if isinstance(model, nn.DataParallel) else model
optimizer = torch.optim.AdamW(raw_model.parameters(), betas=(0.9, 0.95), weight_decay=0.1)
scaler = torch.amp.GradScaler(device_type, enabled=args.dtype == "float16")
moving = {"multi_avg_fn": torch.optim.swa_utils.get_ema_multi_avg_fn(args.ema / 100)}
ema = torch.optim.swa_utils.AveragedModel(model, **moving) if args.ema else None
for it in range(args.iters):
    ratio = max(0, it - warmup_iters) / max(1, args.iters - warmup_iters)
    cosine = min_lr + 0.5 * (1 + math.cos(math.pi * ratio)) * (learning_rate - min_lr)
    optimizer.param_groups[0]["lr"] = min(cosine, learning_rate * (it + 1) / warmup_iters)
    for _ in range(args.accumulate):
        x, y = get_batch()
        with ctx:
            logits, loss = model(x, y)
            loss = loss.mean() / args.accumulate
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
    print(f"iter {it}: loss {loss.item() * args.accumulate:.7f}")
    if ema:
        ema.update_parameters(model)
        with torch.no_grad():
            print(f"average's loss {ema(x, y)[1].mean().item():.7f}")
