"""Steps in which the ranks exchange compressed values instead of gradients."""

from zero_ext.zero.compressed.updates import CompressedUpdates

__all__ = ["CompressedUpdates"]
