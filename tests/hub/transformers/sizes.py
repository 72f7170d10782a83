"""Sizes and inputs of tiny models, for the survey of all model types."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

TOKENS = 23

SIZES: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 48,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 66,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "n_embd": 48,
    "n_layer": 1,
    "n_head": 6,
    "n_positions": 64,
    "d_model": 48,
    "ffn_dim": 16,
    "n_layers": 1,
    "n_heads": 6,
    "dim": 48,
    "emb_dim": 48,
    "embed_dim": 48,
    "hidden_dim": 16,
    "num_local_experts": 2,
    "num_experts": 2,
    "n_routed_experts": 2,
    "num_experts_per_tok": 1,
    "moe_intermediate_size": 8,
    "embedding_size": 48,
    "type_vocab_size": 2,
    "word_embed_proj_dim": 48,
    "image_size": 32,
    "patch_size": 8,
    "num_labels": 2,
    "encoder_layers": 1,
    "decoder_layers": 1,
    "num_encoder_layers": 1,
    "num_decoder_layers": 1,
    "encoder_attention_heads": 6,
    "decoder_attention_heads": 6,
    "encoder_ffn_dim": 16,
    "decoder_ffn_dim": 16,
    "num_layers": 1,
    "num_heads": 6,
    "d_kv": 8,
    "d_ff": 16,
    "q_lora_rank": 5,
    "kv_lora_rank": 5,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 6,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "shared_expert_intermediate_size": 8,
    "num_conv_pos_embedding_groups": 2,
    "num_mel_bins": 16,
    "rotary_dim": 4,
    "depth": 1,
    "num_frames": 2,
    "tubelet_size": 2,
    "prediction_length": 3,
}

# Other proportions, for what the first do not fit.
SPARSER: list[dict[str, Any]] = [
    {"num_hidden_layers": 4, "n_layer": 4, "num_layers": 4},
    {"num_key_value_heads": 6},
    {
        "num_key_value_heads": 6,
        "head_dim": 8,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
        "num_hidden_layers": 2,
    },
    {"image_size": 64, "patch_size": 16},
]

# Fields by which a model has what a dilated pattern does not have, and what turns it off. A window is as long as no sequence
# is: to have none its layers need another type, which in some models changes their rotary positions.
WINDOWS = ("sliding_window", "attention_chunk_size")
NARROW, LONGEST = 2, 1 << 20
FIELDS: dict[str, Any] = {**dict.fromkeys(WINDOWS, LONGEST), "attn_logit_softcapping": None}

SECTIONS = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]}}
WHOLE_SECTIONS = {"rope_parameters": {**SECTIONS["rope_parameters"], "partial_rotary_factor": 1.0}}

# Where a type's sizes must agree in a way of their own.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "bamba": {"mamba_n_heads": 12, "mamba_d_head": 8, "attn_layer_indices": [0]},
    "deepseek_v2": {"num_key_value_heads": 6, "kv_lora_rank": 8},
    "glm4v_moe_text": WHOLE_SECTIONS,
    "glm4v_text": WHOLE_SECTIONS,
    "glm_image_text": WHOLE_SECTIONS,
    "granitemoehybrid": {"mamba_n_heads": 12, "mamba_d_head": 8, "layer_types": ["attention"]},
    "jamba": {"num_hidden_layers": 8},
    "jetmoe": {"num_key_value_heads": 3, "num_experts_per_tok": 2, "kv_channels": 8},
    "lfm2_moe": {"layer_types": ["full_attention"]},
    "qwen2_5_vl_text": SECTIONS,
    "qwen2_vl_text": SECTIONS,
    "xmod": {"default_language": "en_XX"},
}


def _patches(config: Any) -> dict[str, Any]:
    """Images as patches of several shapes."""
    pixels = torch.randn(2, 16, config.num_channels * config.patch_size**2, generator=torch.Generator().manual_seed(3))
    mask, shapes = torch.ones(2, 16, dtype=torch.int64), torch.tensor([[4, 4], [2, 8]])
    return {"pixel_values": pixels, "pixel_attention_mask": mask, "spatial_shapes": shapes}


def _sound(config: Any) -> dict[str, Any]:
    """Long enough for a pattern to hide some of its frames."""
    return {"input_values": torch.randn(2, 1, 48_000, generator=torch.Generator().manual_seed(3))}


OWN_INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "mimi": _sound,
    "mimi_encoder": _sound,
    "siglip2_vision_model": _patches,
}


def draw(names: Sequence[str], config: Any) -> Iterator[dict[str, Tensor]]:
    """Random inputs of these names, in every shape that models give them; none where a name is not known."""
    choices = [list(_draw(name, config)) for name in names]
    for inputs in itertools.product(*choices):
        yield dict(zip(names, inputs))


def _draw(name: str, config: Any) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    channels = getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3
    if name in ("input_ids", "decoder_input_ids"):
        yield torch.randint(4, 30, (2, TOKENS if name == "input_ids" else 7), generator=generator)
    elif name == "attention_mask":
        yield torch.ones(2, TOKENS, dtype=torch.int64)
    elif name == "bbox":
        yield torch.zeros(2, TOKENS, 4, dtype=torch.int64)
    elif name in ("pixel_values", "pixel_values_videos"):
        size = getattr(config, "image_size", None) or 64
        height, width = (
            (size, size) if isinstance(size, int) else (size["height"], size["width"]) if isinstance(size, dict) else size
        )
        frames = getattr(config, "num_frames", None) or getattr(config, "frames_per_clip", None) or 2
        if name == "pixel_values":
            yield normal(2, channels, height, width)
        yield normal(2, frames, channels, height, width)
        yield normal(2, channels, frames, height, width)
    elif name in ("input_values", "audio_values"):
        yield normal(2, 1601)
        yield normal(2, 1, 3200)
        yield normal(2, getattr(config, "max_length", 64), getattr(config, "num_mel_bins", 16))
    elif name in ("input_features", "audio_mel"):
        bins = next(
            (
                getattr(config, field)
                for field in ("num_mel_bins", "input_feat_size", "feature_size", "n_mels", "mel_bins", "input_dim")
                if isinstance(getattr(config, field, None), int)
            ),
            16,
        )
        longest = 2 * (getattr(config, "max_source_positions", None) or 32)
        for length in (64, longest):
            yield normal(2, bins, length)
            yield normal(2, length, bins)
    elif name in ("hidden_states", "inputs_embeds"):
        patch, frames = getattr(config, "patch_size", 8), getattr(config, "temporal_patch_size", 1)
        if isinstance(patch, int):
            yield normal(16, channels * frames * patch * patch)
        yield normal(2, TOKENS, getattr(config, "hidden_size", 48))
    elif name in ("grid_thw", "image_grid_thw", "image_grid_hws"):
        yield torch.tensor([[1, 4, 4]])
        yield torch.tensor([[4, 4]])
    elif name in ("past_values",):
        yield normal(2, getattr(config, "context_length", None) or 32, getattr(config, "num_input_channels", 1))
        yield normal(2, getattr(config, "context_length", None) or 32)
