"""Exchanges of compressed messages."""

from zero_ext.comm.compressed.onebit_all_reduce import SignExchange

__all__ = ["SignExchange"]
