"""Train a small model on sequences that are cut over the ranks: torchrun --standalone --nproc-per-node 2 train_shards.py"""

from datetime import timedelta

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from flexdilated import DilatedPattern, MultiheadDilatedAttention
from flexdilated.distributed import even_shard_lengths, shard_sequence

TOKENS, WIDTH, VOCAB = 1_001, 64, 256
pattern = DilatedPattern((64, 96, 1024), (1, 1, 4))


class Model(nn.Module):
    def __init__(self, mesh):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCAB, WIDTH), nn.Embedding(TOKENS, WIDTH)
        self.attention = MultiheadDilatedAttention(WIDTH, 4, pattern, is_causal=True, mesh=mesh)
        self.head = nn.Linear(WIDTH, VOCAB)

    def forward(self, tokens, positions, shard_lengths):
        x = self.embedding(tokens) + self.position(positions)
        x = x + self.attention(x, x, x, shard_lengths=shard_lengths)[0]
        return self.head(x)


dist.init_process_group("gloo", timeout=timedelta(minutes=2))  # "nccl" on GPUs
mesh = init_device_mesh("cpu", (dist.get_world_size(),))  # "cuda" on GPUs
torch.manual_seed(0)  # the same weights on all ranks
model = Model(mesh)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
lengths = even_shard_lengths(TOKENS, mesh.size())

for step in range(3):
    # The same whole batch on all ranks, which then cut it.
    text = torch.randint(VOCAB, (1, TOKENS + 1), generator=torch.Generator().manual_seed(step))
    whole = text[:, :-1], text[:, 1:], torch.arange(TOKENS)[None]
    tokens, labels, positions = shard_sequence(whole, mesh, shard_lengths=lengths)

    logits = model(tokens, positions, lengths)
    # The sum over this rank's labels, divided by the number of all labels.
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum") / TOKENS
    loss.backward()
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)  # a rank's gradient is that of its own tokens
    optimizer.step()
    optimizer.zero_grad()

    loss = loss.detach()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss:.5f}", flush=True)

dist.destroy_process_group()
