"""The one interface to collectives: gather, reduce-scatter and small all-reduces, with byte counters."""

from zero_ext.comm.collectives import Collectives, Traffic
from zero_ext.comm.device_dispatch import ExchangeByDevice
from zero_ext.comm.device_transport import BackendExchange
from zero_ext.comm.host_staged_transport import StagedExchange
from zero_ext.comm.node_map import NodeMap
from zero_ext.comm.shared_memory_transport import HostExchange, fastest_exchange
from zero_ext.comm.traffic_stats import WireLog
from zero_ext.comm.transport import Exchange, GroupExchange, Pending, PointToPoint

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
