"""The one interface to collectives: gather, reduce-scatter and small all-reduces, with byte counters."""

from zero_ext.comm.collectives import Collectives
from zero_ext.comm.exchange import Exchange, GroupExchange, Pending
from zero_ext.comm.host_exchange import HostExchange, fastest_exchange
from zero_ext.comm.wire import WireLog

__all__ = [
    "Collectives",
    "Exchange",
    "GroupExchange",
    "HostExchange",
    "Pending",
    "WireLog",
    "fastest_exchange",
]
