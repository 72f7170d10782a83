"""FSDP2 over all ranks, each sequence cut over two of them: torchrun --standalone --nproc-per-node 4 fsdp_shards.py"""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.utils import clip_grad_norm_

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM
from flexdilated.distributed import shard_sequence

TOKENS, VOCAB, STEPS = 500, 29, 3
ranks = init_device_mesh("cpu", (4,))  # "cuda" on GPUs; holds the parameters
axes = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "cp"))
copy, mesh = axes.get_local_rank("dp"), axes["cp"]

torch.manual_seed(0)  # the same weights on all ranks
pattern = DilatedPattern.causal(512, num_kv_heads=4, window=32)
config = LongNetConfig(vocab_size=VOCAB, embed_dim=32, num_layers=2, num_heads=4, pattern=pattern)
start = LongNetLM(config).state_dict()
model = LongNetLM(config, mesh=mesh)
model.load_state_dict(start)
for layer in model.layers:
    fully_shard(layer, mesh=ranks)
fully_shard(model, mesh=ranks)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def read(step, copy):
    """A sequence of its own for each copy, the same on the ranks that share it."""
    generator = torch.Generator().manual_seed(10 * step + copy)
    text = torch.randint(VOCAB, (1, TOKENS + 1), generator=generator)
    return text[:, :-1], text[:, 1:]


for step in range(STEPS):
    tokens, labels = shard_sequence(read(step, copy), mesh)
    logits = model(tokens)
    # Shards are equal, so the mean of this rank. FSDP2 takes the mean over all ranks.
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    loss = loss.detach()
    dist.all_reduce(loss)
    if dist.get_rank() == 0:
        print(f"step {step}: loss {loss / ranks.size():.5f}", flush=True)

# -- the same training in one process ---------------------------------------------------------------------------------------------
whole = LongNetLM(config)
whole.load_state_dict(start)
optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
for step in range(STEPS):
    tokens, labels = (torch.cat(rows) for rows in zip(*(read(step, copy) for copy in range(axes.size(0)))))
    F.cross_entropy(whole(tokens).flatten(0, 1), labels.flatten()).backward()
    clip_grad_norm_(whole.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
for mine, expected in zip(model.parameters(), whole.parameters()):
    torch.testing.assert_close(mine.full_tensor(), expected)
if dist.get_rank() == 0:
    print("weights equal the weights of one process", flush=True)
dist.destroy_process_group()
