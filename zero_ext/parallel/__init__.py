"""Several kinds of parallelism at once: which rank takes which part in each, and the meshes they run on."""

from typing import TYPE_CHECKING

from zero_ext.config.lazy_imports import lazily

if TYPE_CHECKING:
    from zero_ext.parallel.pipeline.stages.stage_partition import split_stages
    from zero_ext.parallel.ranks.comm_cost import AxisTraffic, TransformerStep, transformer_traffic
    from zero_ext.parallel.ranks.link_topology import Level, Topology
    from zero_ext.parallel.ranks.mesh import make_mesh
    from zero_ext.parallel.ranks.rank_grid import RankGrid
    from zero_ext.parallel.ranks.rank_mapping import Mapping, all_mappings, best_mapping, naive_mapping
    from zero_ext.parallel.sequence.batch_sharding import cut_batch
    from zero_ext.parallel.sequence.sequence_attention import SequenceAttention, sequence_attention
    from zero_ext.parallel.sequence.ulysses import SequenceExchange
    from zero_ext.parallel.tensor.auto_tp_plan import automatic_plan
    from zero_ext.parallel.tensor.cross_entropy import vocabulary_cross_entropy
    from zero_ext.parallel.tensor.tensor_parallel import split_tensors, tensor_plan

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
        "AxisTraffic": "zero_ext.parallel.ranks.comm_cost",
        "Level": "zero_ext.parallel.ranks.link_topology",
        "Mapping": "zero_ext.parallel.ranks.rank_mapping",
        "RankGrid": "zero_ext.parallel.ranks.rank_grid",
        "SequenceAttention": "zero_ext.parallel.sequence.sequence_attention",
        "SequenceExchange": "zero_ext.parallel.sequence.ulysses",
        "Topology": "zero_ext.parallel.ranks.link_topology",
        "TransformerStep": "zero_ext.parallel.ranks.comm_cost",
        "all_mappings": "zero_ext.parallel.ranks.rank_mapping",
        "automatic_plan": "zero_ext.parallel.tensor.auto_tp_plan",
        "best_mapping": "zero_ext.parallel.ranks.rank_mapping",
        "cut_batch": "zero_ext.parallel.sequence.batch_sharding",
        "make_mesh": "zero_ext.parallel.ranks.mesh",
        "naive_mapping": "zero_ext.parallel.ranks.rank_mapping",
        "experts": "",
        "pipeline": "",
        "sequence_attention": "zero_ext.parallel.sequence.sequence_attention",
        "split_stages": "zero_ext.parallel.pipeline.stages.stage_partition",
        "split_tensors": "zero_ext.parallel.tensor.tensor_parallel",
        "tensor_plan": "zero_ext.parallel.tensor.tensor_parallel",
        "transformer_traffic": "zero_ext.parallel.ranks.comm_cost",
        "vocabulary_cross_entropy": "zero_ext.parallel.tensor.cross_entropy",
    },
)
