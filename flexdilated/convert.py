"""`convert`: dilated attention in the place of every `nn.MultiheadAttention` of a model."""

from __future__ import annotations

from collections.abc import Collection

from torch import nn

from flexdilated.nn import MultiheadDilatedAttention
from flexdilated.pattern import DilatedPattern
from flexdilated.swap import check_unhooked, find_modules, put_modules

__all__ = ["convert"]


def convert(
    model: nn.Module,
    pattern: DilatedPattern,
    *,
    dropout_p: float | None = None,
    is_causal: bool = False,
    backend: str = "auto",
    skip: Collection[str] = (),
) -> nn.Module:
    """The model with every `nn.MultiheadAttention` replaced by a `MultiheadDilatedAttention` with its weights.

    In place; only a model that is itself a `nn.MultiheadAttention` comes back as another module. Under a pattern that keeps
    everything it computes what it did. `nn.TransformerEncoderLayer` then takes its ordinary path, since its fused one knows no
    pattern, and `nn.TransformerEncoder` makes no nested tensors. A layer that the model holds at several places stays one
    layer. The weights are copies, as the packed projection is taken apart: build the optimizer afterwards. Frozen weights stay
    frozen. Attention weights cannot be asked for any more.

    Args:
        model: Any model.
        pattern: Which positions attend to which.
        dropout_p: Probability of dropping an attention weight in training. Default: each layer's own.
        is_causal: Whether queries see only keys at their own position and before, whatever a call says.
        backend: `"auto"` or the name of an engine.
        skip: Paths in the model of attention layers to leave as they are.

    Returns:
        The model.

    Raises:
        ValueError: If the model has no such layer; or, by its path, if a layer is sequence-first, projects keys or values from
            another width, is the cross-attention of a `nn.TransformerDecoderLayer`, adds keys of its own, has a `forward` of its
            own, hooks or parametrizations, or shares weights with another layer; or if `skip` holds what is no layer's path.
            Nothing is changed then.
        TypeError: If the model is no module or the pattern is no pattern.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be an nn.Module, got {type(model).__name__}")
    if not isinstance(pattern, DilatedPattern):
        raise TypeError(f"pattern must be a DilatedPattern, got {type(pattern).__name__}")
    if isinstance(skip, str):
        raise TypeError(f"skip must be a collection of paths, got the string {skip!r}")
    layers = find_modules(model, nn.MultiheadAttention)
    known = {path for paths in layers.values() for path in paths}
    for path in skip:
        if path not in known:
            raise ValueError(f"skip must hold paths of attention layers, {sorted(known)}, got {path!r}")
    layers = {layer: paths for layer, paths in layers.items() if not set(paths) & set(skip)}
    if not layers:
        raise ValueError("model must hold an nn.MultiheadAttention that is not skipped, got none")
    cross = {
        layer.multihead_attn for layer in model.modules() if isinstance(layer, nn.TransformerDecoderLayer)
    }  # its keys come from a memory of another length
    owners = _owners(model)

    places: dict[str, nn.Module] = {}
    for layer, paths in layers.items():
        try:
            if layer in cross:
                raise ValueError("module must be self-attention, got the cross-attention of a decoder layer")
            if type(layer).forward is not nn.MultiheadAttention.forward:
                raise ValueError(f"module must have the forward of nn.MultiheadAttention, got that of {type(layer).__name__}")
            check_unhooked(layer)
            check_unhooked(layer.out_proj)
            shared = {path for parameter in layer.parameters() for path in owners[id(parameter)]} - {
                f"{path}{end}" for path in paths for end in ("", ".out_proj" if path else "out_proj")
            }
            if shared:
                raise ValueError(f"module must not share weights, got weights that {sorted(shared)} hold too")
            dilated = MultiheadDilatedAttention.from_torch(
                layer, pattern, dropout_p=dropout_p, is_causal=is_causal, backend=backend
            )
        except ValueError as error:
            where = repr(paths[0]) if paths[0] else "the model itself"
            raise ValueError(f"{where}: {error}; name its path in skip to leave it as it is") from error
        _freeze_like(dilated, layer)
        places.update(dict.fromkeys(paths, dilated))
    if "" in places:
        return places[""]
    put_modules(model, places)
    for encoder in model.modules():
        if isinstance(encoder, nn.TransformerEncoder) and any(isinstance(m, MultiheadDilatedAttention) for m in encoder.modules()):
            # It would hand padded batches to its layers as nested tensors, for the sake of their fused path.
            encoder.use_nested_tensor = False
    return model


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
