"""Layers whose weight is cut into tiles, each a unit of its own: what is gathered never exceeds a tile."""

from zero_ext.zero.tiling.full_tensor_map import Wholes
from zero_ext.zero.tiling.tile import Tile
from zero_ext.zero.tiling.tiled_embedding import TiledEmbedding
from zero_ext.zero.tiling.tiled_linear import TiledLinear

__all__ = ["Tile", "TiledEmbedding", "TiledLinear", "Wholes"]
