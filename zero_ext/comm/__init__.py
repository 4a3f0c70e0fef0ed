"""The one interface to collectives: gather, reduce-scatter and small all-reduces, with byte counters."""

from zero_ext.comm.by_device import ExchangeByDevice
from zero_ext.comm.collectives import Collectives, Traffic
from zero_ext.comm.device_backend import BackendExchange
from zero_ext.comm.exchange import Exchange, GroupExchange, Pending, PointToPoint
from zero_ext.comm.host_exchange import HostExchange, fastest_exchange
from zero_ext.comm.node_map import NodeMap
from zero_ext.comm.staged import StagedExchange
from zero_ext.comm.wire import WireLog

__all__ = [
    "BackendExchange",
    "Collectives",
    "Exchange",
    "ExchangeByDevice",
    "GroupExchange",
    "HostExchange",
    "NodeMap",
    "Pending",
    "PointToPoint",
    "StagedExchange",
    "Traffic",
    "WireLog",
    "fastest_exchange",
]
