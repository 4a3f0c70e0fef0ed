"""Layers with weights that are cut into tiles. Each tile is a unit, so no more than a tile is gathered."""

from zero_ext.zero.tiling.full_tensor_map import FullTensorMap
from zero_ext.zero.tiling.tile import Tile
from zero_ext.zero.tiling.tiled_embedding import TiledEmbedding
from zero_ext.zero.tiling.tiled_linear import TiledLinear

__all__ = ["FullTensorMap", "Tile", "TiledEmbedding", "TiledLinear"]
