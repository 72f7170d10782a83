"""torchtitan's debug model on CPU ranks: built and sharded as its trainer does it, without what only GPUs have."""

import contextlib
import warnings
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torchtitan.config import ParallelismConfig
from torchtitan.config.override import OverrideConfig, apply_overrides
from torchtitan.distributed import utils as titan_utils
from torchtitan.distributed.context_parallel import apply_cp_to_forward, prepare_context_parallel_input
from torchtitan.distributed.full_dtensor import parallelize_inputs, validate_config
from torchtitan.distributed.parallel_dims import ParallelDims
from torchtitan.distributed.spmd_types import annotate_input_spmd_types, set_current_spmd_mesh
from torchtitan.models.common.attention import FlexAttention
from torchtitan.models.llama3 import model_registry

from flexdilated import DilatedPattern

LAYERS, TOKENS, VOCAB = 2, 512, 2048
PATTERN = DilatedPattern((37, 300), (1, 4))  # two ranks' border cuts both
FLEX, VARLEN = "flexdilated.hub.torchtitan.dilated_flex", "flexdilated.hub.torchtitan.dilated_varlen"


class Result(NamedTuple):
    """Logits `(B, N, vocabulary)` and gradients by name, whole."""

    logits: Tensor
    gradients: dict[str, Tensor]


@contextlib.contextmanager
def cpu_only() -> Iterator[None]:
    """torchtitan takes the device for CUDA where there is none, and compiles: minutes on a CPU, which has no backward of flex."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch("torchtitan.distributed.parallel_dims.device_type", "cpu"))
        stack.enter_context(mock.patch("torchtitan.models.common.attention._compiled_create_block_mask", create_block_mask))
        stack.enter_context(mock.patch.object(FlexAttention, "_compiled_flex_attn", eager_flex_attention))
        yield


def eager_flex_attention(q: Tensor, k: Tensor, v: Tensor, *, kernel_options: Any, **options: Any) -> Any:
    with warnings.catch_warnings(action="ignore"):  # that it is slow
        return flex_attention(q, k, v, **options)


def model_of(override: str | None, parallelism: ParallelismConfig | None = None, **options: Any) -> Any:
    """Two layers of the debug model after torchtitan's override, on the same weights in every process."""
    config = model_registry("debugmodel", attn_backend="varlen" if override == VARLEN else "flex").model
    config.layers = config.layers[:LAYERS]
    config.update_from_config(config=SimpleNamespace(parallelism=parallelism or ParallelismConfig()))
    if override is not None:
        options = {"pattern": PATTERN.to_dict(), **options}
        assert len(apply_overrides(OverrideConfig(imports=[(override, options)]), config)) == LAYERS
    torch.manual_seed(7)
    model = config.build()
    model.init_states()
    return model


def batch(*documents: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, positions that begin anew in each document of a row, and the gradient of the logits."""
    generator, rows = torch.Generator().manual_seed(11), len(documents)
    tokens = torch.randint(VOCAB, (rows, TOKENS), generator=generator)
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in documents])
    return tokens, positions, torch.randn(rows, TOKENS, VOCAB, generator=generator)


def run_alone(model: Any, tokens: Tensor, positions: Tensor, dout: Tensor) -> Result:
    titan_utils.set_spmd_backend("partial_dtensor")
    with cpu_only():
        logits = model(tokens, positions, model.get_attention_masks(positions))
    logits.backward(dout)
    return Result(logits.detach(), {name: p.grad for name, p in model.named_parameters()})


def forward_sharded(parallelism: ParallelismConfig, override: str | None, inputs: tuple[Tensor, ...], **options: Any) -> Any:
    """The model, this rank's logits and the gradient of those."""
    tokens, positions, dout = inputs
    backend = parallelism.spmd_backend
    titan_utils.set_spmd_backend(backend)
    with cpu_only():
        dims = ParallelDims.from_config(parallelism, dist.get_world_size())
        dims.build_mesh()
        model = model_of(override, parallelism, **options)
        if backend == "partial_dtensor" and dims.cp_enabled:  # as models' `parallelize` of torchtitan do it
            apply_cp_to_forward([layer.attention.inner_attention for layer in model.layers.values()], dims.get_mesh("cp"))
        if backend != "partial_dtensor":
            validate_config(dims, model)
        model.parallelize(dims)
        extra: dict[str, Any] = {"positions": positions, "attention_masks": model.get_attention_masks(positions)}
        if dims.cp_enabled:
            balancer = parallelism.context_parallel_load_balancer
            cp = dims.get_mesh("cp")
            tokens, dout, extra = prepare_context_parallel_input(tokens, dout, extra, cp, torch.device("cpu"), balancer)
        if backend == "full_dtensor":
            tokens, dout, extra = parallelize_inputs(dims, tokens, dout, extra)
        context: Any = contextlib.nullcontext()
        if backend == "spmd_types":
            annotate_input_spmd_types(dims, tokens, dout, extra)
            context = set_current_spmd_mesh(dims.spmd_dense_mesh())
        with context:
            return model, model(tokens, **extra), dout


def run_sharded(parallelism: ParallelismConfig, override: str, inputs: tuple[Tensor, ...], **options: Any) -> Result:
    """The parts of all ranks together: of logits, and of gradients as torchtitan's FSDP would add them up."""
    model, logits, dout = forward_sharded(parallelism, override, inputs, **options)
    shape = (*inputs[0].shape, VOCAB)
    if isinstance(logits, DTensor):
        if not isinstance(dout, DTensor):
            dout = DTensor.from_local(dout, logits.device_mesh, [Replicate()] * logits.device_mesh.ndim, run_check=False)
        logits.backward(dout.redistribute(logits.device_mesh, logits.placements))
    else:
        logits.backward(dout.chunk(VOCAB // logits.shape[2], dim=2)[dist.get_rank() % (VOCAB // logits.shape[2])])  # tp is inner
    whole = {name: p.shape for name, p in model_of(override, **options).named_parameters()}
    gradients = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if name == "tok_embeddings.weight" and parallelism.context_parallel_degree > 1 and isinstance(gradient, DTensor):
            gradient = gradient.to_local()  # that of this rank's tokens, though its placement says replicated: FSDP adds them up
        gradients[name] = whole_gradient(gradient, whole[name], parallelism.tensor_parallel_degree)
    return Result(whole_logits(logits.detach(), shape), gradients)


def whole_logits(part: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`(B, N, vocabulary)` from each rank's tokens, on the outer axis of ranks, and words, on the inner one."""
    if isinstance(part, DTensor):
        return part.full_tensor()
    parts, size = all_parts(part), shape[2] // part.shape[2]
    return torch.cat([torch.cat(parts[first : first + size], 2) for first in range(0, len(parts), size)], 1)


def whole_gradient(part: Tensor, shape: tuple[int, ...], size: int) -> Tensor:
    if isinstance(part, DTensor):
        return part.full_tensor()
    parts = all_parts(part)
    if part.shape == shape:
        return torch.stack(parts).sum(0)
    (dim,) = (dim for dim, (some, all_) in enumerate(zip(part.shape, shape)) if some != all_)
    return torch.cat([torch.stack(parts[rank::size]).sum(0) for rank in range(size)], dim)


def all_parts(part: Tensor) -> list[Tensor]:
    parts = [torch.empty_like(part, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, part.contiguous())
    return parts
