"""Many slides: read as other tools store them, encoded in packs, kept in a file each."""

from flexdilated.slides.encode import Clock as Clock
from flexdilated.slides.encode import EncodedSlide as EncodedSlide
from flexdilated.slides.encode import FailedSlide as FailedSlide
from flexdilated.slides.encode import encode_slides as encode_slides
from flexdilated.slides.folder import list_slides as list_slides
from flexdilated.slides.formats import SlideError as SlideError
from flexdilated.slides.formats import Tiles as Tiles
from flexdilated.slides.formats import read_tiles as read_tiles
from flexdilated.slides.grid import Reading as Reading
from flexdilated.slides.grid import grid_cells as grid_cells
from flexdilated.slides.heatmap import class_relevance as class_relevance
from flexdilated.slides.heatmap import tile_relevance as tile_relevance
from flexdilated.slides.heatmap import write_table as write_table
from flexdilated.slides.source import Source as Source
