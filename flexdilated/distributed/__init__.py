"""A sequence over several devices: cut it in shards, put it together again."""

from flexdilated.distributed.sharding import even_shard_lengths as even_shard_lengths
from flexdilated.distributed.sharding import shard_sequence as shard_sequence
from flexdilated.distributed.unsharding import gather_tokens as gather_tokens
from flexdilated.distributed.unsharding import unshard_sequence as unshard_sequence

__all__ = [
    "even_shard_lengths",
    "gather_tokens",
    "shard_sequence",
    "unshard_sequence",
]
