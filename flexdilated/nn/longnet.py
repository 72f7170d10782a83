"""LongNet as a language model, `head(norm(blocks(embedding(tokens))))`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import ClassVar

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from flexdilated.core.files import sync
from flexdilated.core.hardware import autocast_dtype
from flexdilated.core.integers import as_integer
from flexdilated.core.tracing import holds_values
from flexdilated.decode import DilatedKVCache
from flexdilated.decode.ranks import draw_alike
from flexdilated.distributed.mesh import canonical_mesh
from flexdilated.distributed.sharding import local_shard_lengths
from flexdilated.distributed.unsharding import gather_tokens
from flexdilated.nn.attention import MultiheadDilatedAttention
from flexdilated.nn.config import LongNetConfig
from flexdilated.nn.initial_weights import reset_modules, set_initial_weights
from flexdilated.nn.position import Rotary, Rotation, XPos, token_positions
from flexdilated.nn.sampling import Sampler, lengths_of_prompts
from flexdilated.nn.transformer import Block, FeedForward

CONFIG_FILE, WEIGHTS_FILE = "config.json", "model.safetensors"


class LongNetLM(nn.Module):
    """Decoder-only causal language model over dilated attention.

    >>> config = LongNetConfig(vocab_size=256, embed_dim=32, num_layers=2, num_heads=4, pattern=DilatedPattern.causal(64, 4))
    >>> LongNetLM(config)(torch.randint(256, (2, 64))).shape
    torch.Size([2, 64, 256])

    `x = embedding(tokens)`; per layer `x += attention(norm(x))`, `x += ffn(norm(x))`; `logits = head(norm(x))`.
    Source: LongNet, arXiv 2307.02486; sub-LayerNorm and initial gains: MAGNETO, arXiv 2210.06423; xPos: arXiv 2212.10554.

    With a mesh `forward` takes this rank's contiguous shard and returns its logits; sum the gradients of the parameters over the
    ranks, and seed ranks differently for residual dropout. Decoding (`caches`, `generate`) uses the mesh for prompts in shards and
    caches over a mesh; otherwise every rank continues its own whole prompts.

    Args:
        config: Sizes, pattern and options.
        mesh: A 1-D `DeviceMesh` over which the sequence is sharded, such as `mesh["cp"]`; it is neither configuration nor
            state. Default: the sequence is whole.
        exchange: With `mesh`: how keys and values move, as in `flexdilated.dilated_attention`.
    """

    block_class: ClassVar[type[Block]] = Block  # a subclass of the model may have one of its own

    def __init__(self, config: LongNetConfig, *, mesh: DeviceMesh | None = None, exchange: str = "auto") -> None:
        super().__init__()
        self.config, self.mesh, self.exchange = config, canonical_mesh(mesh), exchange
        head_dim = config.embed_dim // config.num_heads
        gamma = math.sqrt(math.log(2 * config.num_layers))

        def block() -> Block:
            attention = MultiheadDilatedAttention(
                config.embed_dim,
                config.num_heads,
                config.pattern,
                num_kv_heads=config.num_kv_heads,
                scale=config.scale,
                dropout_p=config.attention_dropout_p,
                gamma_init=gamma,
                is_causal=True,
                backend=config.backend,
                mesh=mesh,
                exchange=exchange,
            )
            ffn = FeedForward(config.embed_dim, config.ffn_dim or 4 * config.embed_dim, gamma_init=gamma)
            return self.block_class(attention, ffn, dropout_p=config.dropout_p)

        self.embedding = nn.Embedding(config.vocab_size, config.embed_dim)
        self.position = (
            Rotary(head_dim) if config.position == "rotary" else XPos(head_dim, config.pattern, scale_base=config.scale_base)
        )
        self.layers = nn.ModuleList(block() for _ in range(config.num_layers))
        self.layer_norm = nn.LayerNorm(config.embed_dim)
        self.head = None if config.tie_embeddings else nn.Linear(config.embed_dim, config.vocab_size, bias=False)
        set_initial_weights(self.embedding, "normal_", std=config.embed_dim**-0.5)

    init_weights = reset_modules

    def forward(
        self,
        tokens: Tensor,
        *,
        key_padding_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        caches: Sequence[DilatedKVCache] | None = None,
        lengths: Tensor | None = None,
        shard_lengths: Sequence[int] | None = None,
        last_only: bool = False,
    ) -> Tensor:
        """Logits `(B, N, vocab_size)` of the token that follows each of `tokens`.

        Args:
            tokens: `(B, N)` int64 or int32 in `[0, vocab_size)`, N at least 1; with a mesh this rank's shard, which may be empty.
            key_padding_mask: `(B, N)` bool, True at padding; with a mesh that of this rank's shard.
            cu_seqlens: `(num_documents + 1,)` boundaries of packed documents in the whole sequence, for B = 1.
            caches: Result of `make_caches`: the tokens follow the tokens that the caches hold, and join them.
            lengths: `(B,)` int64, with `caches`: tokens of each sequence before its padding.
            shard_lengths: With a mesh: tokens of each rank. Default: equally many; with `caches`, all new tokens on every rank.
            last_only: With `caches`: only the logits `(B, 1, vocab_size)` after the last token of each sequence, on every rank.

        Raises:
            ValueError: If a shape is wrong, or there are no tokens.
        """
        self._check_forward(tokens, caches, lengths, last_only, is_shard=shard_lengths is not None)
        x = self.embedding(tokens)
        if caches is None:
            rotation = self._rotation_of_shard(tokens, x.dtype, cu_seqlens, shard_lengths)
        else:
            rotation = self._rotation_of_decoding(tokens, x.dtype, caches[0], shard_lengths)
            caches[0].expect(tokens if shard_lengths is None else None)
        if cu_seqlens is not None and cu_seqlens.is_cuda and not torch.compiler.is_compiling():
            cu_seqlens = cu_seqlens.cpu()  # one wait for the device instead of two in each layer
        for i, layer in enumerate(self.layers):
            decoding = {} if caches is None else {"cache": caches[i], "lengths": lengths}
            x = layer(
                x,
                key_padding_mask=key_padding_mask,
                cu_seqlens=cu_seqlens,
                rotation=rotation,
                shard_lengths=shard_lengths,
                **decoding,
            )
        if last_only and caches is not None:
            num_tokens = x.shape[1] if shard_lengths is None else sum(shard_lengths)
            index = x.new_full(x.shape[:1], num_tokens - 1, dtype=torch.int64) if lengths is None else (lengths - 1).clamp(min=0)
            if shard_lengths is None or caches[0].mesh is None:
                x = x.gather(1, index[:, None, None].expand(-1, 1, x.shape[2]))
            else:
                x = gather_tokens(x, index, caches[0].mesh, shard_lengths=shard_lengths)
        return self._logits(self.layer_norm(x))

    def _check_forward(
        self, tokens: Tensor, caches: Sequence[DilatedKVCache] | None, lengths: Tensor | None, last_only: bool, is_shard: bool
    ) -> None:
        if tokens.dim() != 2:
            raise ValueError(f"tokens must have shape (B, N), got {tuple(tokens.shape)}")
        if self.mesh is None and not is_shard and tokens.shape[1] < 1:  # a shard may be empty
            raise ValueError(f"tokens must have N of at least 1, got {tuple(tokens.shape)}")
        if caches is None:
            if lengths is not None:
                raise ValueError("lengths must come with caches, got no caches; use key_padding_mask")
            if last_only:
                raise ValueError("last_only must come with caches, got no caches; take the last of all logits")
        elif not isinstance(caches, Sequence) or not all(isinstance(cache, DilatedKVCache) for cache in caches):
            raise TypeError(f"caches must be a sequence of DilatedKVCache, got {caches!r}; use make_caches")
        elif len(caches) != len(self.layers):
            raise ValueError(f"caches must be one per layer={len(self.layers)}, got {len(caches)}")
        elif len(set(map(id, caches))) < len(caches):
            raise ValueError("caches must be different objects, got one for two layers; use make_caches")
        elif tokens.shape[0] != caches[0].batch_size:
            raise ValueError(f"tokens must have the batch size of caches={caches[0].batch_size}, got {tokens.shape[0]}")

    def _rotation_of_shard(
        self, tokens: Tensor, dtype: torch.dtype, cu_seqlens: Tensor | None, shard_lengths: Sequence[int] | None
    ) -> Rotation:
        """Of the whole sequence at the positions of this rank's tokens."""
        if self.mesh is None:  # a shard length is refused by the attention
            return self.position(token_positions(tokens.shape[1], cu_seqlens, tokens.device), dtype=dtype)
        rank, shards = local_shard_lengths(self.mesh, tokens.shape[1], shard_lengths)
        positions = token_positions(tokens.shape[1], cu_seqlens, tokens.device, sum(shards[:rank]))
        if isinstance(self.position, XPos):
            return self.position(positions, length=sum(shards), cu_seqlens=cu_seqlens, dtype=dtype)
        return self.position(positions, dtype=dtype)

    def _rotation_of_decoding(
        self, tokens: Tensor, dtype: torch.dtype, cache: DilatedKVCache, shard_lengths: Sequence[int] | None
    ) -> Rotation:
        positions = cache.new_positions(tokens.shape[1], shard_lengths=shard_lengths)
        if isinstance(self.position, XPos):
            return self.position.decode(positions, max_length=cache.max_length, dtype=dtype)
        return self.position(positions, dtype=dtype)

    def _logits(self, x: Tensor) -> Tensor:
        if self.head is not None:
            return self.head(x)
        if type(self.embedding) is nn.Embedding:
            return F.linear(x, self.embedding.weight)
        # An adapter, a quantized table, or one that is a unit of FSDP2 in its place, of which `fully_shard` makes another class:
        # tied to what it gives for each token, which its weight may not be, or not be here.
        return F.linear(x, self.embedding(torch.arange(self.config.vocab_size, device=x.device)))

    def make_caches(
        self, batch_size: int, *, max_length: int | None = None, dtype: torch.dtype | None = None, mesh: DeviceMesh | None = None
    ) -> tuple[DilatedKVCache, ...]:
        """An empty key/value cache for each layer, on the model's device.

        Args:
            batch_size: Number of sequences.
            max_length: Largest number of positions; saves memory below the segment lengths. xPos needs it if the least common
                multiple of the segment lengths is too large. Default: no limit.
            dtype: Of keys and values. Default: that of autocast, or of the weights. Pass it if layers compute in another dtype, as
                under the `MixedPrecisionPolicy` of FSDP2.
            mesh: The `DeviceMesh` of the model, which then shares the rows. Default: this process holds all rows.

        Raises:
            ValueError: If a number is out of range, xPos cannot tell that many positions, or the mesh does not fit.
            NotImplementedError: If the pattern cannot be decoded.
        """
        config, weight = self.config, next(self.parameters())
        cast = autocast_dtype(weight.device)
        if dtype is None:
            dtype = weight.dtype if cast is None or weight.dtype == torch.float64 else cast
        if isinstance(self.position, XPos):
            self.position.decode(torch.zeros(1, 1, dtype=torch.int64, device=weight.device), max_length=max_length)
        return tuple(
            DilatedKVCache(
                config.pattern,
                batch_size=batch_size,
                num_kv_heads=config.num_kv_heads or config.num_heads,
                head_dim=config.embed_dim // config.num_heads,
                max_length=max_length,
                dtype=dtype,
                device=weight.device,
                mesh=mesh,
                exchange="auto" if mesh is None else self.exchange,
            )
            for _ in self.layers
        )

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        *,
        max_new_tokens: int,
        lengths: Tensor | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        stop_tokens: Sequence[int] = (),
        pad_token: int = 0,
        generator: torch.Generator | None = None,
        shard_lengths: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Tokens that continue each prompt, drawn one after another from the model, without dropout.

        Each token costs the same time and memory at any position. Ends early when every sequence has drawn a stop token. Modules
        return to their modes afterwards. The model is called once for the prompts and once per token but the last: hooks run.

        Args:
            tokens: Prompts, `(B, N)`, N at least 1.
            max_new_tokens: Tokens to draw for each, at least 1.
            lengths: `(B,)` int64 in `[1, N]`: tokens of each prompt before its padding. Default: N.
            temperature: The logits are divided by it; 0 takes the likeliest token.
            top_k: Draw among the k likeliest tokens. Default: all.
            top_p: Draw among the fewest tokens whose probabilities, after temperature and `top_k`, reach it. Default: all.
            stop_tokens: A sequence ends with the first of these that it draws.
            pad_token: Fills what follows a stop token.
            generator: Where the random numbers come from. Default: torch's global generator of the model's device.
            shard_lengths: With a mesh, where `tokens` is this rank's shard: tokens of each rank, 0 allowed; N is their sum. Caches
                are sharded too, and rank 0 draws for all. Default: every rank continues its own prompts.
            dtype: Of the caches, as in `make_caches`.

        Returns:
            The new tokens alone, `(B, M)` int64, `1 <= M <= max_new_tokens`; a stop token is among them.

        Raises:
            ValueError: If a number is out of range or a shape is wrong.
            TypeError: If a token or a length is no integer.
            NotImplementedError: If the pattern cannot be decoded, or tokens or model hold no values (meta and fake tensors).
        """
        mesh = None if shard_lengths is None else self.mesh
        with evaluating(self):
            sampler = Sampler(temperature=temperature, top_k=top_k, top_p=top_p)
            stop_tokens = tuple(self._check_token(f"stop_tokens[{i}]", token) for i, token in enumerate(stop_tokens))
            num_tokens = self._num_tokens(tokens, shard_lengths)
            if not (holds_values(tokens) and holds_values(next(self.parameters()))):
                raise NotImplementedError("tokens and the model must hold values to draw from, got meta or fake ones")
            lengths = lengths_of_prompts(tokens, max_new_tokens, lengths, num_tokens)
            pad_token = self._check_token("pad_token", pad_token)
            stops = torch.tensor(stop_tokens, dtype=torch.int64, device=tokens.device)
            # The last token drawn is not read.
            caches = self.make_caches(tokens.shape[0], max_length=num_tokens + max_new_tokens - 1, dtype=dtype, mesh=mesh)
            # The head reads one token, not the prompt.
            logits = self(tokens, caches=caches, lengths=lengths, last_only=True, shard_lengths=shard_lengths)
            ended = torch.zeros(tokens.shape[0], dtype=torch.bool, device=tokens.device)
            drawn: list[Tensor] = []
            while True:
                following = sampler.draw(logits[:, 0], generator=generator).masked_fill(ended, pad_token)
                if mesh is not None:  # generators differ between ranks
                    following = draw_alike(mesh, following, max_new_tokens, stop_tokens, pad_token)
                drawn.append(following)
                ended = ended | torch.isin(following, stops)
                if len(drawn) == max_new_tokens or (stop_tokens and bool(ended.all())):
                    return torch.stack(drawn, dim=1)
                logits = self(following[:, None], caches=caches)

    def _check_token(self, name: str, token: int) -> int:
        token = as_integer(name, token)
        if not 0 <= token < self.config.vocab_size:
            raise ValueError(f"{name} must be in [0, vocab_size={self.config.vocab_size}), got {token}")
        return token

    def _num_tokens(self, tokens: Tensor, shard_lengths: Sequence[int] | None) -> int:
        """Of a prompt."""
        least = int(shard_lengths is None)
        if tokens.dim() != 2 or tokens.shape[0] < 1 or tokens.shape[1] < least:
            raise ValueError(f"tokens must have shape (B, N), B and N at least 1, got {tuple(tokens.shape)}")
        if shard_lengths is None:
            return tokens.shape[1]
        if self.mesh is None:
            raise ValueError(f"shard_lengths must come with mesh, got {shard_lengths} and no mesh")
        return sum(local_shard_lengths(self.mesh, tokens.shape[1], shard_lengths)[1])

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write `config.json` and `model.safetensors` into a folder, made if missing; a file is replaced only when complete.

        Raises:
            RuntimeError: If the weights are shared out over ranks.
        """
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        weights, config = path / (WEIGHTS_FILE + ".part"), path / (CONFIG_FILE + ".part")
        try:
            save_file(_without_aliases(self.state_dict()), weights)
            config.write_text(json.dumps(self.config.to_dict(), indent=2) + "\n")
            sync(weights)
            sync(config)
            weights.replace(path / WEIGHTS_FILE)
            config.replace(path / CONFIG_FILE)
            sync(path)
        finally:
            weights.unlink(missing_ok=True)
            config.unlink(missing_ok=True)

    @classmethod
    def from_pretrained(
        cls,
        folder: str | os.PathLike[str],
        *,
        device: torch.device | str = "cpu",
        dtype: torch.dtype | None = None,
        mesh: DeviceMesh | None = None,
        exchange: str = "auto",
    ) -> LongNetLM:
        """The model that `save_pretrained` wrote, in evaluation mode.

        Args:
            folder: Holds `config.json` and `model.safetensors`.
            device: Where the model goes.
            dtype: Of its parameters. Default: as saved.
            mesh: As in the constructor.
            exchange: As in the constructor.

        Raises:
            FileNotFoundError: If a file is missing.
            ValueError: If the configuration is malformed.
            RuntimeError: If the weights do not fit the configuration, or their file is damaged.
        """
        path = Path(folder)
        for name in (CONFIG_FILE, WEIGHTS_FILE):
            if not (path / name).is_file():
                raise FileNotFoundError(f"folder must hold {CONFIG_FILE} and {WEIGHTS_FILE}, no {name} in {path}")
        try:
            config = LongNetConfig.from_dict(json.loads((path / CONFIG_FILE).read_text()))
        except (TypeError, ValueError) as error:
            raise ValueError(f"{CONFIG_FILE} must hold what save_pretrained writes, got another in {path}: {error}") from error
        model = cls(config, mesh=mesh, exchange=exchange)
        try:
            weights = load_file(path / WEIGHTS_FILE)
        except SafetensorError as error:
            raise RuntimeError(f"{WEIGHTS_FILE} must be whole, got another in {path}: {error}") from error
        model.load_state_dict(weights, assign=True)  # keeps the dtypes of the file
        return model.to(device=device, dtype=dtype).eval()


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Set a model to evaluation mode inside the block, and restore the mode of each module afterwards, also after an error.

    `model.train(was_training)` would give all modules one mode: a frozen part, kept in evaluation mode inside a model in training,
    would be in training mode afterwards.
    """
    modes = [(module, module.training) for module in model.modules()]
    try:
        model.eval()
        yield
    finally:
        for module, training in modes:
            module.training = training


def _without_aliases(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Contiguous, and none in the memory of another: who ties layers finds them equal, and no longer tied."""
    separate, storages = {}, set()
    for name, value in tensors.items():
        if hasattr(value, "full_tensor"):
            raise RuntimeError(f"state_dict must hold whole tensors, got a part of {name}; gather the weights of all ranks first")
        place = value.untyped_storage().data_ptr()
        separate[name] = value.clone(memory_format=torch.contiguous_format) if place in storages else value.contiguous()
        storages.add(place)
    return separate
