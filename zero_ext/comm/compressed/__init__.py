"""Collectives of compressed payloads."""

from zero_ext.comm.compressed.onebit_all_reduce import OneBitAllReduce

__all__ = ["OneBitAllReduce"]
