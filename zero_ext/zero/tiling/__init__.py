"""Layers with weights that are cut into tiles. Each tile is a unit, so no more than a tile is gathered."""

from zero_ext.zero.tiling.tiled_layers import TiledEmbedding, TiledLinear
from zero_ext.zero.tiling.tiled_module import FullTensorMap, Tile

__all__ = ["FullTensorMap", "Tile", "TiledEmbedding", "TiledLinear"]
