"""Sizes and inputs of tiny models, for the survey of all model types."""

import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

TOKENS = 23

_read = json.loads(Path(__file__).with_name("sizes.json").read_text())
SIZES: dict[str, Any] = _read["all"]
SPARSER: list[dict[str, Any]] = _read["sparser"]  # other proportions, for what the first do not fit
OWN_SIZES: dict[str, dict[str, Any]] = _read["own"]  # where a type's sizes must agree in a way of their own

# Fields by which a model has a window, which a dilated pattern does not have. A window is as long as no sequence
# is: to have none its layers need another type, which in some models changes their rotary positions.
WINDOWS = ("sliding_window", "attention_chunk_size")
NARROW, LONGEST = 2, 1 << 20
FIELDS: dict[str, Any] = dict.fromkeys(WINDOWS, LONGEST)


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(3))


def _merged_patches(config: Any) -> dict[str, Any]:
    side = config.spatial_merge_size * config.patch_size
    return {"pixel_values": _normal(4, side, side, config.num_channels), "image_grid_thw": torch.tensor([[1, 2, 2]])}


def _strip_of_patches(config: Any) -> dict[str, Any]:
    strip = _normal(1, 3, config.patch_size, 32 * config.patch_size)
    return {"pixel_values": strip, "target_sizes": torch.tensor([[4, 4], [4, 4]])}


def _sound(config: Any) -> dict[str, Any]:
    """Long enough for a pattern to hide some of its frames."""
    return {"input_values": _normal(2, 1, 48_000)}


def _games(config: Any) -> dict[str, Any]:
    parts = {"states": config.state_dim, "actions": config.act_dim, "rewards": 1, "returns_to_go": 1}
    times = {"timesteps": torch.arange(8).expand(2, -1), "attention_mask": _ones(2, 8)}
    return {name: _normal(2, 8, size) for name, size in parts.items()} | times


def _ones(*shape: int) -> Tensor:
    return torch.ones(shape, dtype=torch.int64)


OWN_INPUTS: dict[str, Callable[[Any], dict[str, Any]]] = {
    "blip_2_qformer": lambda config: {  # as many queries as there are tokens of the other model
        "query_embeds": _normal(2, TOKENS, config.hidden_size),
        "encoder_hidden_states": _normal(2, TOKENS, config.encoder_hidden_size),
    },
    "decision_transformer": _games,
    "fun_asr_nano_encoder": lambda config: {
        "input_features": _normal(2, TOKENS, config.num_mel_bins * config.num_stacked_frames),
        "input_features_mask": _ones(2, TOKENS),
    },
    "gemma3n_audio": lambda config: {
        "audio_mel": _normal(2, 64, config.input_feat_size),
        "audio_mel_mask": torch.zeros(2, 64, dtype=torch.bool),
    },
    "gemma4_audio": lambda config: {"input_features": _normal(2, 64, 128), "attention_mask": _ones(2, 64).bool()},
    "gemma4_vision": lambda config: {
        "pixel_values": _normal(2, 36, 3 * config.patch_size**2),
        "pixel_position_ids": torch.cartesian_prod(torch.arange(6), torch.arange(6)).expand(2, -1, -1),
    },
    "inkling2_vision": _merged_patches,
    "mimi": _sound,
    "mimi_decoder": lambda config: {"latents": _normal(2, config.hidden_size, TOKENS)},
    "mimi_encoder": _sound,
    "minicpm_ocr_vision": _strip_of_patches,
    "minicpmv4_7_vision": _strip_of_patches,
    "muse_glimmer_assistant": lambda config: {  # behind tokens of the model that it drafts for
        "noise_embeds": _normal(2, config.block_size, config.hidden_size),
        "context_hidden_states": _normal(2, 7, config.hidden_size * len(config.target_layer_ids)),
    },
    "muse_spark_audio": lambda config: {"input_values": _normal(2, 2 * 1920)},
    "pocket_tts_audio_tokenizer_decoder": lambda config: {"latents": _normal(2, config.hidden_size, 11)},
    "qwen3_asr_encoder": lambda config: {
        "input_features": _normal(2, config.num_mel_bins, 4 * config.n_window),
        "input_features_mask": _ones(2, 4 * config.n_window),
    },
    "siglip2_vision_model": lambda config: {  # patches of several shapes
        "pixel_values": _normal(2, 16, config.num_channels * config.patch_size**2),
        "pixel_attention_mask": _ones(2, 16),
        "spatial_shapes": torch.tensor([[4, 4], [2, 8]]),
    },
    "timesfm": lambda config: {
        "past_values": _normal(2, 16 * config.patch_length),
        "past_values_padding": torch.zeros(2, 16 * config.patch_length),
        "freq": torch.zeros(2, 1, dtype=torch.int64),
    },
    "vibevoice_acoustic_tokenizer_decoder": lambda config: {"hidden_states": _normal(2, config.hidden_size, TOKENS)},
    "vibevoice_acoustic_tokenizer_encoder": lambda config: {"hidden_states": _normal(2, 1, 64)},
}
# Fields by which models name the width of their sounds.
BINS = ["num_mel_bins", "input_feat_size", "feature_size", "feature_projection_input_dim", "n_mels", "mel_bins", "input_dim"]


def draw(names: Sequence[str], config: Any) -> Iterator[dict[str, Tensor]]:
    """Random inputs of these names, in every shape that models give them; none where a name is not known."""
    choices = [list(_draw(name, config)) for name in names]
    for inputs in itertools.product(*choices):
        yield dict(zip(names, inputs))


def _draw(name: str, config: Any) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    channels = _channels(config)
    if name in ("input_ids", "decoder_input_ids"):
        yield torch.randint(4, 30, (2, TOKENS if name == "input_ids" else 7), generator=generator)
    elif name == "attention_mask":
        yield _ones(2, TOKENS)
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
        if name == "pixel_values":
            yield from _packed(config, normal)
    elif name in ("input_values", "audio_values"):
        yield normal(2, 1601)
        yield normal(2, 1, 3200)
        yield normal(2, getattr(config, "max_length", 64), getattr(config, "num_mel_bins", 16))
    elif name in ("input_features", "audio_mel"):
        bins = next((getattr(config, field) for field in BINS if isinstance(getattr(config, field, None), int)), 16)
        longest = 2 * (getattr(config, "max_source_positions", None) or 32)
        for length in (64, longest):
            yield normal(2, bins, length)
            yield normal(2, length, bins)
    elif name in ("hidden_states", "inputs_embeds"):
        yield from _packed(config, normal)
        yield normal(2, TOKENS, getattr(config, "hidden_size", 48))
    elif name in ("grid_thw", "image_grid_thw", "image_grid_hws"):
        yield torch.tensor([[1, 4, 4]])
        yield torch.tensor([[4, 4]])
    elif name == "input_features_mask":
        yield _ones(2, 64)
    elif name == "merge_sizes":
        yield torch.tensor([1])
    elif name == "past_values":
        length = getattr(config, "context_length", None) or 32
        yield normal(2, length, getattr(config, "num_input_channels", 1))
        yield normal(2, length)


def _channels(config: Any) -> int:
    return getattr(config, "num_channels", None) or getattr(config, "in_channels", None) or 3


def _packed(config: Any, normal: Callable[..., Tensor]) -> Iterator[Tensor]:
    """The patches of one image, or of two frames, in a row."""
    patch = getattr(config, "patch_size", 8)
    if isinstance(patch, int):
        frames = getattr(config, "temporal_patch_size", None) or getattr(config, "patch_temporal", 1)
        yield normal(16, _channels(config) * frames * patch * patch)
        yield normal(16, _channels(config), patch, patch)
