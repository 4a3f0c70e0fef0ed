"""Steps in which the ranks exchange compressed values instead of gradients."""

from zero_ext.zero.step.one_bit.onebit_updates import OneBitUpdates

__all__ = ["OneBitUpdates"]
