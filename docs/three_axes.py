"""A `LongNetLM` over three axes of a mesh: copies of the data, shards of the tokens, shards of the heads.

`dp`: each rank its own sequences. `cp`: each rank a shard of every sequence. `tp`: each rank some heads of the attention.
Parameters are sharded by FSDP2 over `dp` and `cp` together.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from flexdilated import LongNetConfig, LongNetLM
from flexdilated.distributed import shard_sequence


def build(config: LongNetConfig, mesh: DeviceMesh, *, compiler: str | None = "inductor") -> LongNetLM:
    """A model over the axes `dp`, `cp` and `tp` of a mesh, each of any size. Seed all ranks equally before.

    With dropout the compiler must be "inductor" or None: under torch's debugging compilers, recomputation draws other random
    numbers, and gradients are wrong.
    """
    model = LongNetLM(config, mesh=mesh["cp"])
    heads = {name: ColwiseParallel(use_local_output=False) for name in ("q_proj", "k_proj", "v_proj")}
    copies = mesh["dp", "cp"]._flatten("dp_cp")  # ranks with different tokens
    for i, layer in enumerate(model.layers):
        parallelize_module(layer.self_attn, mesh["tp"], {**heads, "out_proj": RowwiseParallel()})
        layer = checkpoint_wrapper(layer)  # the backward recomputes the layer and its exchange
        if compiler is not None:
            layer.compile(fullgraph=True, backend=compiler)
        model.layers[i] = fully_shard(layer, mesh=copies)
    return fully_shard(model, mesh=copies)


def accumulate(model: LongNetLM, batches: Sequence[tuple[Tensor, Tensor]], mesh: DeviceMesh) -> Tensor:
    """Accumulate gradients of the mean loss over batches of tokens and labels `(B, N)`, whole on every rank; return the loss."""
    losses = []
    for i, batch in enumerate(batches):
        model.set_requires_gradient_sync(i == len(batches) - 1)  # one reduction, after the last batch
        tokens, labels = shard_sequence(shard_sequence(batch, mesh["dp"], dim=0), mesh["cp"])
        # Equal shards, so the mean over this rank's own tokens: FSDP2 averages the gradients over dp and cp.
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten()) / len(batches)
        loss.backward()
        losses.append(loss.detach())
    return torch.stack(losses).sum()


def clip(model: LongNetLM, max_norm: float) -> Tensor:
    """Scale the gradients to a norm of at most `max_norm`; return the norm before scaling, over all parameters and ranks.

    `clip_grad_norm_` accepts parameters of one mesh. Here the parameters of the attention are also sharded over `tp`.
    """
    meshes: dict[DeviceMesh, list[Tensor]] = {}
    for parameter in model.parameters():
        if isinstance(parameter.grad, DTensor):
            meshes.setdefault(parameter.grad.device_mesh, []).append(parameter)
    norms = [get_total_norm([p.grad for p in each if p.grad is not None], foreach=False) for each in meshes.values()]
    total = torch.stack([norm.full_tensor() for norm in norms if isinstance(norm, DTensor)] or [torch.zeros(())]).norm()
    for each in meshes.values():
        clip_grads_with_norm_(each, max_norm, total, foreach=False)
    return total


def save(model: LongNetLM, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> None:
    """Write the parameters and the state of the optimizer; each rank writes its own shards."""
    weights, state = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=folder)


def load(model: LongNetLM, optimizer: torch.optim.Optimizer, folder: str | os.PathLike[str]) -> None:
    """Read what `save` wrote, also on another mesh or without one."""
    weights, state = get_state_dict(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
