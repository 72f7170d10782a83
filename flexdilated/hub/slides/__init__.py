"""Many slides: read as other tools store them, encoded in packs, kept in a file each."""

from flexdilated.hub.slides.encode import Clock as Clock
from flexdilated.hub.slides.encode import EncodedSlide as EncodedSlide
from flexdilated.hub.slides.encode import FailedSlide as FailedSlide
from flexdilated.hub.slides.encode import encode_slides as encode_slides
from flexdilated.hub.slides.folder import list_slides as list_slides
from flexdilated.hub.slides.formats import SlideError as SlideError
from flexdilated.hub.slides.formats import Tiles as Tiles
from flexdilated.hub.slides.formats import read_tiles as read_tiles
from flexdilated.hub.slides.grid import Reading as Reading
from flexdilated.hub.slides.grid import grid_cells as grid_cells
from flexdilated.hub.slides.heatmap import tile_relevance as tile_relevance
from flexdilated.hub.slides.heatmap import write_table as write_table
from flexdilated.hub.slides.source import Source as Source
