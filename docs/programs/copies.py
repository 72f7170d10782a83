"""Two copies of a model under DDP, each on sequences that are cut over two ranks: torchrun --nproc-per-node 4 copies.py"""

from contextlib import nullcontext

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import clip_grad_norm_

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM
from flexdilated.distributed import even_shard_lengths, shard_sequence

COPIES, BATCHES = 2, 2  # sequences at a time; batches of each before a step of the optimizer
axes = init_device_mesh("cpu", (COPIES, 2), mesh_dim_names=("dp", "cp"))
rank, copy, mesh = dist.get_rank(), axes.get_local_rank("dp"), axes["cp"]

torch.manual_seed(0)  # the same weights on all ranks
pattern = DilatedPattern((16, 24, 512), (1, 1, 4))
config = LongNetConfig(vocab_size=29, embed_dim=32, num_layers=2, num_heads=4, pattern=pattern)
start = LongNetLM(config).state_dict()
model = LongNetLM(config, mesh=mesh)
model.load_state_dict(start)
model = DistributedDataParallel(model)  # over both axes together
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)


def read(step, batch, copy):
    """Three documents in a row, of other lengths each time: tokens, labels, boundaries."""
    if (step, batch, rank) == (1, 1, 0):
        raise OSError("a file is damaged")
    torch.manual_seed(100 * step + 10 * batch + copy)
    cu_seqlens = F.pad(torch.randint(20, 60, (3,)).cumsum(0), (1, 0)).int()
    tokens = torch.randint(29, (1, cu_seqlens[-1] + 1))
    labels = tokens[:, 1:].clone()
    labels[:, cu_seqlens[1:] - 1] = -100  # the last token of a document has no next one
    return tokens[:, :-1], labels, cu_seqlens


def train(batches):
    """One step of the optimizer."""
    num_labels = torch.tensor(sum((labels >= 0).sum().item() for _, labels, _ in batches))
    dist.all_reduce(num_labels, group=axes["dp"].get_group())  # of all sequences of the step
    for batch, (tokens, labels, cu_seqlens) in enumerate(batches):
        lengths = even_shard_lengths(tokens.shape[1], mesh.size())
        tokens, labels = shard_sequence((tokens, labels), mesh, shard_lengths=lengths)
        with nullcontext() if batch == BATCHES - 1 else model.no_sync():
            logits = model(tokens, cu_seqlens=cu_seqlens, shard_lengths=lengths)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
            (loss * axes.size() / num_labels).backward()  # DDP takes the mean over all ranks
    clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


trained = []
for step in range(3):
    batches = None
    try:
        batches = [read(step, batch, copy) for batch in range(BATCHES)]
    except OSError as error:
        print(f"rank {rank}, step {step}: {error}\n", end="", flush=True)
    is_good = torch.tensor(int(batches is not None))
    dist.all_reduce(is_good, dist.ReduceOp.MIN)  # all ranks train on this step, or none does
    if is_good:
        train(batches)
        trained.append(step)
dist.destroy_process_group()

# -- the same training in one process ---------------------------------------------------------------------------------------------
whole = LongNetLM(config)
whole.load_state_dict(start)
optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
for step in trained:
    rows = [read(step, batch, copy) for batch in range(BATCHES) for copy in range(COPIES)]
    outs = torch.cat([whole(tokens, cu_seqlens=cu_seqlens)[0] for tokens, _, cu_seqlens in rows])
    F.cross_entropy(outs, torch.cat([labels[0] for _, labels, _ in rows])).backward()
    clip_grad_norm_(whole.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
for mine, expected in zip(model.module.parameters(), whole.parameters()):
    torch.testing.assert_close(mine, expected)
if rank == 0:
    print("weights equal the weights of one process", flush=True)
