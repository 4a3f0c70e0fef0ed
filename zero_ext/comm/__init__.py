"""The one interface to collectives: gather, reduce-scatter and small all-reduces, with byte counters."""

from zero_ext.comm.collectives import Collectives
from zero_ext.comm.cross_process_transport import CrossProcessTransport, fastest_host_transport
from zero_ext.comm.device_transport import DeviceTransport
from zero_ext.comm.hierarchical import NodeMap
from zero_ext.comm.host_staged_transport import HostStagedTransport
from zero_ext.comm.pending_collective import PendingCollective
from zero_ext.comm.traffic_stats import CollectiveTraffic, TrafficStats
from zero_ext.comm.transport import (
    DeviceDispatch,
    PointToPointTransport,
    ProcessGroupTransport,
    Transport,
    TransportSelector,
)

__all__ = [
    "CollectiveTraffic",
    "Collectives",
    "CrossProcessTransport",
    "DeviceDispatch",
    "DeviceTransport",
    "HostStagedTransport",
    "NodeMap",
    "PendingCollective",
    "PointToPointTransport",
    "ProcessGroupTransport",
    "TrafficStats",
    "Transport",
    "TransportSelector",
    "fastest_host_transport",
]
