"""Several kinds of parallelism at once: which rank takes which part in each, and the meshes they run on."""

from zero_ext.parallel.grid import RankGrid
from zero_ext.parallel.mapping import Mapping, all_mappings, best_mapping, naive_mapping
from zero_ext.parallel.mesh import make_mesh
from zero_ext.parallel.partition import split_stages
from zero_ext.parallel.tensor import split_tensors
from zero_ext.parallel.topology import Level, Topology
from zero_ext.parallel.traffic import AxisTraffic, TransformerStep, transformer_traffic

__all__ = [
    "AxisTraffic",
    "Level",
    "Mapping",
    "RankGrid",
    "Topology",
    "TransformerStep",
    "all_mappings",
    "best_mapping",
    "make_mesh",
    "naive_mapping",
    "split_stages",
    "split_tensors",
    "transformer_traffic",
]
