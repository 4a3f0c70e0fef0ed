"""Several kinds of parallelism at once: which rank takes which part in each, and the meshes they run on."""

from typing import TYPE_CHECKING

from zero_ext.config.lazy import lazily

if TYPE_CHECKING:
    from zero_ext.parallel.automatic import automatic_plan
    from zero_ext.parallel.cross_entropy import vocabulary_cross_entropy
    from zero_ext.parallel.grid import RankGrid
    from zero_ext.parallel.mapping import Mapping, all_mappings, best_mapping, naive_mapping
    from zero_ext.parallel.mesh import make_mesh
    from zero_ext.parallel.partition import split_stages
    from zero_ext.parallel.sequence import SequenceExchange
    from zero_ext.parallel.sequence_attention import SequenceAttention, sequence_attention
    from zero_ext.parallel.sequence_batch import cut_batch
    from zero_ext.parallel.tensor import split_tensors, tensor_plan
    from zero_ext.parallel.topology import Level, Topology
    from zero_ext.parallel.traffic import AxisTraffic, TransformerStep, transformer_traffic

__all__ = [
    "AxisTraffic",
    "Level",
    "Mapping",
    "RankGrid",
    "SequenceAttention",
    "SequenceExchange",
    "Topology",
    "TransformerStep",
    "all_mappings",
    "automatic_plan",
    "best_mapping",
    "cut_batch",
    "make_mesh",
    "naive_mapping",
    "sequence_attention",
    "split_stages",
    "split_tensors",
    "tensor_plan",
    "transformer_traffic",
    "vocabulary_cross_entropy",
]

# Mappings are computed without torch, whose split tensors take a second to import.
__getattr__ = lazily(
    __name__,
    {
        "AxisTraffic": "zero_ext.parallel.traffic",
        "Level": "zero_ext.parallel.topology",
        "Mapping": "zero_ext.parallel.mapping",
        "RankGrid": "zero_ext.parallel.grid",
        "SequenceAttention": "zero_ext.parallel.sequence_attention",
        "SequenceExchange": "zero_ext.parallel.sequence",
        "Topology": "zero_ext.parallel.topology",
        "TransformerStep": "zero_ext.parallel.traffic",
        "all_mappings": "zero_ext.parallel.mapping",
        "automatic_plan": "zero_ext.parallel.automatic",
        "best_mapping": "zero_ext.parallel.mapping",
        "cut_batch": "zero_ext.parallel.sequence_batch",
        "make_mesh": "zero_ext.parallel.mesh",
        "naive_mapping": "zero_ext.parallel.mapping",
        "experts": "",
        "pipeline": "",
        "sequence_attention": "zero_ext.parallel.sequence_attention",
        "split_stages": "zero_ext.parallel.partition",
        "split_tensors": "zero_ext.parallel.tensor",
        "tensor_plan": "zero_ext.parallel.tensor",
        "transformer_traffic": "zero_ext.parallel.traffic",
        "vocabulary_cross_entropy": "zero_ext.parallel.cross_entropy",
    },
)
