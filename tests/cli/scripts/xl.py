"""Train a small Transformer-XL: memories of the last segment are passed in and returned."""

import torch
import torch.nn.functional as F
from torch import nn

BATCH_SIZE, TGT_LEN, MEM_LEN, MAX_STEP = 18, 16, 16, 10
N_LAYER, N_HEAD, D_MODEL, N_TOKEN = 2, 2, 32, 100


class TransformerXL(nn.Module):
    def __init__(self, d, mask):
        super().__init__()
        self.emb, self.out = nn.Embedding(N_TOKEN, d), nn.Linear(d, N_TOKEN)
        layers = [nn.MultiheadAttention(d, N_HEAD) for _ in range(N_LAYER)]
        self.layers, self.norm = nn.ModuleList(layers), nn.LayerNorm(d)
        self.register_buffer("mask", mask)

    def forward(self, data, target, *mems):
        hidden, new_mems = self.emb(data), []
        for layer, mem in zip(self.layers, mems, strict=True):
            memory = torch.cat([mem, hidden])
            new_mems.append(memory[-MEM_LEN:].detach())
            attended = layer(hidden, memory, memory, attn_mask=self.mask, need_weights=False)[0]
            hidden = self.norm(hidden + attended)
        loss = F.cross_entropy(self.out(hidden).transpose(1, 2), target, reduction="none")
        return loss, *new_mems


torch.manual_seed(1111)
device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
mask = torch.ones(TGT_LEN, MEM_LEN + TGT_LEN).triu(1 + MEM_LEN).bool()
model = TransformerXL(D_MODEL, mask).to(device)
text = torch.randint(N_TOKEN, (MAX_STEP * TGT_LEN + 1, BATCH_SIZE)).to(device)
para_model = model
if torch.cuda.device_count() > 1:
    para_model = nn.DataParallel(model, dim=1)
optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
mems = [torch.zeros(MEM_LEN, BATCH_SIZE, D_MODEL, device=device)] * N_LAYER
for step in range(MAX_STEP):
    at = slice(step * TGT_LEN, (step + 1) * TGT_LEN)
    loss, *mems = para_model(text[at], text[1:][at], *mems)
    loss = loss.mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
    optimizer.step()
    print(f"step {step} loss {loss.item():.7f}")
