"""Layers whose weight is cut into tiles, each a unit of its own: what is gathered never exceeds a tile."""

from zero_ext.zero.tiling.embedding import TiledEmbedding
from zero_ext.zero.tiling.linear import TiledLinear
from zero_ext.zero.tiling.tile import Tile
from zero_ext.zero.tiling.wholes import Wholes

__all__ = ["Tile", "TiledEmbedding", "TiledLinear", "Wholes"]
