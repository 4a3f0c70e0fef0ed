"""Exchanges of compressed messages."""

from zero_ext.comm.compressed.one_bit import SignExchange

__all__ = ["SignExchange"]
