"""`convert`: dilated attention in the place of the attention of a model, torch's or timm's."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from flexdilated.core.checks import check_exchange
from flexdilated.core.pattern import DilatedPattern
from flexdilated.hub.swap import check_unhooked, find_modules, put_modules
from flexdilated.hub.timm import TimmAttention, attention_classes
from flexdilated.nn.attention import MultiheadDilatedAttention
from flexdilated.ordering import Order

PACKAGES = ("timm", "torchvision")  # whose models are not left half converted
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel")
WANTED = "an nn.MultiheadAttention, or timm's Attention, AttentionRope, EvaAttention, RelPosAttention or BEiT's"


def convert(
    model: nn.Module,
    pattern: DilatedPattern,
    *,
    dropout_p: float | None = None,
    is_causal: bool = False,
    backend: str = "auto",
    order: Order | None = None,
    skip: Collection[str] = (),
    mesh: DeviceMesh | None = None,
    exchange: str = "auto",
) -> nn.Module:
    """The model with dilated attention in the place of its attention, on its weights.

    >>> model = torch.nn.TransformerEncoderLayer(32, 4, batch_first=True)
    >>> type(convert(model, DilatedPattern((8, 64), (1, 2))).self_attn).__name__
    'MultiheadDilatedAttention'

    It looks for modules of these classes:

    - `nn.MultiheadAttention`, also inside `nn.TransformerEncoder` and torchvision's vision transformers. A
      `MultiheadDilatedAttention` replaces it. The weights are copies: build the optimizer afterwards. Frozen weights stay frozen.
    - timm's `Attention`, `AttentionRope`, `EvaAttention`, `RelPosAttention` and BEiT's. A `flexdilated.hub.timm.TimmAttention`
      replaces it, with the same parameters under the same names.

    The model changes in place; only a model that is itself such a module is replaced. Under a pattern that keeps everything its
    outputs stay the same. `nn.TransformerEncoderLayer` no longer takes its fused path. A shared layer stays shared.

    A class token is an ordinary first token: it sees its own segment of each branch, in the heads that keep it. Use the mean of all
    tokens instead, a rate-1 branch as long as the sequence, or fine-tune. For transformers' models: `flexdilated.hub.transformers`.

    Args:
        model: Any model.
        pattern: Which positions attend to which.
        dropout_p: Probability of dropping an attention weight in training. Default: each layer's own.
        is_causal: Whether queries see only keys at their own position and before, whatever a call says.
        backend: `"auto"` or the name of a backend.
        order: The order in which attention reads the patches of timm's models, such as the Hilbert curve of
            `flexdilated.ordering.grid_order(grid)`; `model.num_prefix_tokens` tokens stay in front. Default: the model's order.
        skip: Paths in the model of attention layers to leave as they are.
        mesh: A 1-D `DeviceMesh`, such as `mesh["cp"]`: the model, with `nn.MultiheadAttention`, receives equal shards of each
            sequence, positions and class token included, since only attention communicates. Default: sequences are whole.
        exchange: With `mesh`: how keys and values move, as in `flexdilated.dilated_attention`.

    Returns:
        The model.

    Raises:
        ValueError: If the model has no such layer; if a layer is sequence-first, projects keys or values from another width, is
            cross-attention, adds keys of its own, has its own `forward`, hooks or parametrizations, quantized, sharded or adapted
            weights, or shares weights with another layer; if DDP or FSDP1 wraps a part of the model; if it is another kind of
            attention of timm or torchvision; or if `skip` holds an unknown path. The model is unchanged.
        NotImplementedError: For an order with `nn.MultiheadAttention`, or a mesh with timm's layers. The model is unchanged.
        TypeError: If the model is no module, the pattern is no pattern or the order no `Order`.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}")
    check_exchange(exchange, mesh)  # timm's layers would not see it
    if isinstance(skip, str):
        raise TypeError(f"skip must be a collection of paths, got the string {skip!r}")
    _refuse_wrapped(model)
    layers = find_modules(model, lambda m: isinstance(m, (nn.MultiheadAttention, *attention_classes())))
    other_layers = _other_attention(model, layers)
    known_paths = {path for paths in (*layers.values(), *other_layers.values()) for path in paths}
    for path in skip:
        if path not in known_paths:
            raise ValueError(f"skip must hold paths of attention layers, {sorted(known_paths)}, got {path!r}")
    layers = {layer: paths for layer, paths in layers.items() if not set(paths) & set(skip)}
    if not layers:
        converted = find_modules(model, lambda m: isinstance(m, (MultiheadDilatedAttention, TimmAttention)))
        if converted:
            first = next(iter(converted.values()))[0]
            raise ValueError(f"model must hold attention that is not dilated yet, got {first!r}: it is already converted")
        names = [f"{paths[0]!r} of {_named(layer)}" for layer, paths in other_layers.items()]
        description = f"none but {', '.join(names[:3])}{', ...' if names[3:] else ''}" if names else "none"
        is_transformers = any(base.__module__.partition(".")[0] == "transformers" for base in type(model).__mro__)
        remedy = "models of the transformers library take a pattern by flexdilated.hub.transformers"
        if not is_transformers:
            remedy = "where a model calls scaled_dot_product_attention itself, call flexdilated.dilated_attention in its place"
        raise ValueError(f"model must hold {WANTED}, not skipped, got {description}; {remedy}")
    for layer, paths in other_layers.items():
        if type(layer).__module__.partition(".")[0] in PACKAGES and not set(paths) & set(skip):
            raise ValueError(
                f"{paths[0]!r}: module must be {WANTED}, got {_named(layer)}; name its path in skip to leave it as it is"
            )
    cross = {
        layer.multihead_attn for layer in model.modules() if isinstance(layer, nn.TransformerDecoderLayer)
    }  # its keys come from a memory of another length
    owners = _owners(model)

    places: dict[str, nn.Module] = {}
    for layer, paths in layers.items():
        try:
            dilated: nn.Module
            if not isinstance(layer, nn.MultiheadAttention):
                if mesh is not None:
                    raise NotImplementedError(
                        f"mesh must be None where {paths[0]!r} is a {_named(layer)}, got one: its model adds tokens to "
                        "whole images; shard a batch of images instead"
                    )
                dilated = TimmAttention(
                    layer,
                    pattern,
                    dropout_p=dropout_p,
                    is_causal=is_causal,
                    backend=backend,
                    order=order,
                    order_start=0 if order is None else getattr(model, "num_prefix_tokens", 0),
                )
            else:
                if order is not None:
                    raise NotImplementedError(
                        f"order must be None where {paths[0]!r} is an nn.MultiheadAttention, got an order; reorder the tokens "
                        "once, before its encoder (flexdilated.ordering.reorder), and restore them after it"
                    )
                if layer in cross:
                    raise ValueError("module must be self-attention, got the cross-attention of a decoder layer")
                _check(layer, paths, owners)
                dilated = MultiheadDilatedAttention.from_torch(
                    layer, pattern, dropout_p=dropout_p, is_causal=is_causal, backend=backend, mesh=mesh, exchange=exchange
                )
                _freeze_like(dilated, layer)
        except ValueError as error:
            place = repr(paths[0]) if paths[0] else "the model itself"
            raise ValueError(f"{place}: {error}; name its path in skip to leave it as it is") from error
        places.update(dict.fromkeys(paths, dilated))
    if "" in places:
        return places[""]
    put_modules(model, places)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(isinstance(m, MultiheadDilatedAttention) for m in encoder.modules()):
            # It would hand padded batches to its layers as nested tensors, for the sake of their fused path.
            encoder.use_nested_tensor = False
    return model


def _check(layer: nn.MultiheadAttention, paths: list[str], owners: dict[int, set[str]]) -> None:
    """Check that copied weights are everything that a layer holds.

    Raises:
        ValueError: If something would.
    """
    if type(layer).forward is not nn.MultiheadAttention.forward:
        raise ValueError(f"module must have the forward of nn.MultiheadAttention, got that of {_named(layer)}")
    check_unhooked(layer)
    check_unhooked(layer.out_proj)
    if type(layer.out_proj) not in (nn.Linear, NonDynamicallyQuantizableLinear):
        raise ValueError(
            f"module must have a plain out_proj, got {_named(layer.out_proj)}; convert before adapters or quantization are added"
        )
    for parameter in layer.parameters():
        if type(parameter) is not nn.Parameter:
            raise ValueError(
                f"module must have plain weights, got a {type(parameter).__name__}; convert before they are sharded or quantized"
            )
    shared = {path for parameter in layer.parameters() for path in owners[id(parameter)]} - {
        f"{path}{end}" for path in paths for end in ("", ".out_proj" if path else "out_proj")
    }
    if shared:
        raise ValueError(f"module must not share weights, got weights that {sorted(shared)} hold too")


def _refuse_wrapped(model: nn.Module) -> None:
    """Reject a model whose parameters a wrapper (DDP, FSDP) already holds: it would not reduce gradients of new ones.

    Raises:
        ValueError: If there is such a wrapper.
    """
    for path, module in model.named_modules():
        if type(module).__name__ in WRAPPERS and type(module).__module__.startswith("torch."):
            place = repr(path) if path else "the model itself"
            raise ValueError(f"{place}: must be no {type(module).__name__}, got one; convert the model before it is wrapped")


def _other_attention(model: nn.Module, layers: Collection[nn.Module]) -> dict[nn.Module, list[str]]:
    """The modules named as attention, below the model, that are neither among the layers nor hold, or are held by, another one."""
    parts = {part for layer in layers for part in layer.modules()}
    named = find_modules(model, lambda m: m is not model and m not in parts and _is_named_attention(m))
    named = {m: paths for m, paths in named.items() if parts.isdisjoint(m.modules())}
    inner = {part for m in named for part in m.modules() if part is not m}
    return {m: paths for m, paths in named.items() if m not in inner}


def _is_named_attention(module: nn.Module) -> bool:
    name = type(module).__name__
    return not isinstance(module, (MultiheadDilatedAttention, TimmAttention)) and ("Attn" in name or "Attention" in name)


def _named(module: nn.Module) -> str:
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _owners(model: nn.Module) -> dict[int, set[str]]:
    """By the id of a parameter: the paths of the modules that hold it themselves."""
    owners: dict[int, set[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for parameter in module.parameters(recurse=False):
            owners.setdefault(id(parameter), set()).add(path)
    return owners


def _freeze_like(dilated: MultiheadDilatedAttention, layer: nn.MultiheadAttention) -> None:
    for projection in (dilated.q_proj, dilated.k_proj, dilated.v_proj):
        projection.weight.requires_grad_(layer.in_proj_weight.requires_grad)
        if layer.in_proj_bias is not None:
            projection.bias.requires_grad_(layer.in_proj_bias.requires_grad)
    for parameter, source in zip(dilated.out_proj.parameters(), layer.out_proj.parameters()):
        parameter.requires_grad_(source.requires_grad)
