"""A language model over ranks, and tokens for it."""

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from flexdilated import DilatedPattern, LongNetConfig, LongNetLM

NESTED = DilatedPattern((5, 15), (1, 3))
RAGGED = DilatedPattern((7, 11), (2, 3))
TOKENS = 34  # of two equal shards


def build(mesh: DeviceMesh | None = None, exchange: str = "auto", **changes: Any) -> LongNetLM:
    torch.manual_seed(2307)
    sizes: dict[str, Any] = {"vocab_size": 29, "embed_dim": 24, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 19}
    config = LongNetConfig(**{**sizes, "pattern": NESTED, **changes})
    return LongNetLM(config, mesh=mesh, exchange=exchange).double()


def draw_tokens(batch: int = 2, tokens: int = TOKENS) -> Tensor:
    return torch.randint(0, 29, (batch, tokens), generator=torch.Generator().manual_seed(2210))
