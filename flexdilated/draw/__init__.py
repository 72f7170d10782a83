"""Pictures, as figures of matplotlib: of patterns, blocks, traffic, losses and attention maps."""

from flexdilated.draw.blocks import draw_blocks as draw_blocks
from flexdilated.draw.losses import draw_losses as draw_losses
from flexdilated.draw.map import draw_attention_map as draw_attention_map
from flexdilated.draw.pattern import draw as draw
from flexdilated.draw.pattern import multiplicity as multiplicity
from flexdilated.draw.plan import draw_traffic as draw_traffic

__all__ = ["draw", "draw_attention_map", "draw_blocks", "draw_losses", "draw_traffic", "multiplicity"]
