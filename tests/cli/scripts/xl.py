"""Train a small Transformer-XL: memories of the last segment are passed in and returned."""

import argparse

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DataParallel, parallel_apply
from torch.nn.parallel.scatter_gather import scatter_kwargs

parser = argparse.ArgumentParser()
for name, value in (("batch_size", 18), ("tgt_len", 16), ("mem_len", 16), ("max_step", 10)):
    parser.add_argument(f"--{name}", type=int, default=value)
for name, value in (("n_layer", 2), ("n_head", 2), ("d_model", 32), ("n_token", 100)):
    parser.add_argument(f"--{name}", type=int, default=value)
parser.add_argument("--own", action="store_true", help="split by the class in this file")
parser.add_argument("--gpu0_bsz", type=int, default=2, help="samples of device 0, with --own")
args = parser.parse_args()


class BalancedDataParallel(DataParallel):
    def __init__(self, gpu0_bsz, *args, **kwargs):
        self.gpu0_bsz = gpu0_bsz
        super().__init__(*args, **kwargs)

    def forward(self, *inputs, **kwargs):
        inputs, kwargs = self.scatter(inputs, kwargs, self.device_ids)
        replicas = self.replicate(self.module, self.device_ids[: len(inputs)])
        outputs = self.parallel_apply(replicas, self.device_ids[: len(inputs)], inputs, kwargs)
        return self.gather(outputs, self.output_device)

    def scatter(self, inputs, kwargs, device_ids):
        rest, others = inputs[0].size(self.dim) - self.gpu0_bsz, len(device_ids) - 1
        if rest < others * self.gpu0_bsz:
            return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)
        sizes = [self.gpu0_bsz, *(rest // others + (i < rest % others) for i in range(others))]
        chunks = [tensor.split(sizes, self.dim) for tensor in inputs]
        moved = [[chunk.cuda(i) for i, chunk in zip(device_ids, c, strict=True)] for c in chunks]
        return list(zip(*moved, strict=True)), [{}] * len(device_ids)

    def parallel_apply(self, replicas, device_ids, inputs, kwargs):
        return parallel_apply(replicas, inputs, kwargs, device_ids)


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
if torch.cuda.device_count() > 1 and args.own:
    para_model = BalancedDataParallel(args.gpu0_bsz, model, dim=1)
elif torch.cuda.device_count() > 1:
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
