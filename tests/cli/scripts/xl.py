"""Train a small Transformer-XL: memories of the last segment are passed in and returned."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn

parser = argparse.ArgumentParser()
for name, value in (("batch_size", 18), ("tgt_len", 16), ("mem_len", 16), ("max_step", 10)):
    parser.add_argument(f"--{name}", type=int, default=value)
for name, value in (("n_layer", 2), ("n_head", 2), ("d_model", 32), ("n_token", 100)):
    parser.add_argument(f"--{name}", type=int, default=value)
args = parser.parse_args()


class TransformerXL(nn.Module):
    def __init__(self, d, mask):
        super().__init__()
        self.emb, self.out = nn.Embedding(args.n_token, d), nn.Linear(d, args.n_token)
        layers = [nn.MultiheadAttention(d, args.n_head) for _ in range(args.n_layer)]
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(d)
        self.register_buffer("mask", mask)

    def forward(self, data, target, *mems):
        hidden, new_mems = self.emb(data), []
        for layer, mem in zip(self.layers, mems, strict=True):
            memory = torch.cat([mem, hidden])
            new_mems.append(memory[-args.mem_len :].detach())
            attended = layer(hidden, memory, memory, attn_mask=self.mask, need_weights=False)[0]
            hidden = self.norm(hidden + attended)
        loss = F.cross_entropy(self.out(hidden).transpose(1, 2), target, reduction="none")
        return loss, *new_mems


torch.manual_seed(1111)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
mask = torch.ones(args.tgt_len, args.mem_len + args.tgt_len).triu(1 + args.mem_len).bool()
model = TransformerXL(args.d_model, mask).to(device)
text = torch.randint(args.n_token, (args.max_step * args.tgt_len + 1, args.batch_size)).to(device)
para_model = model
if torch.cuda.device_count() > 1:
    para_model = nn.DataParallel(model, dim=1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
mems = [torch.zeros(args.mem_len, args.batch_size, args.d_model, device=device)] * args.n_layer
for step in range(args.max_step):
    at = slice(step * args.tgt_len, (step + 1) * args.tgt_len)
    loss, *mems = para_model(text[at], text[1:][at], *mems)
    loss = loss.mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    print(f"step {step} loss {loss.item():.7f}")
