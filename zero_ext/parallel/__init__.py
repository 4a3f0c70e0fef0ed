"""Several kinds of parallelism in one run: which rank takes which part in each, and the meshes they
run on.
"""

from typing import TYPE_CHECKING

from zero_ext.config.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from zero_ext.parallel.pipeline.stages.stage_partition import split_stages
    from zero_ext.parallel.ranks.comm_cost import AxisTraffic, TransformerStep, transformer_traffic
    from zero_ext.parallel.ranks.link_topology import LinkLevel, LinkTopology
    from zero_ext.parallel.ranks.mesh import make_mesh
    from zero_ext.parallel.ranks.rank_grid import RankGrid
    from zero_ext.parallel.ranks.rank_mapping import RankMapping, all_mappings, best_mapping, naive_mapping
    from zero_ext.parallel.sequence.batch_sharding import shard_batch
    from zero_ext.parallel.sequence.sequence_attention import SequenceAttention, sequence_attention
    from zero_ext.parallel.sequence.ulysses import SequenceExchange
    from zero_ext.parallel.tensor.auto_tp_plan import automatic_plan
    from zero_ext.parallel.tensor.cross_entropy import vocabulary_cross_entropy
    from zero_ext.parallel.tensor.tensor_parallel import apply_tensor_parallel, tensor_plan

__all__ = [
    "AxisTraffic",
    "LinkLevel",
    "LinkTopology",
    "RankGrid",
    "RankMapping",
    "SequenceAttention",
    "SequenceExchange",
    "TransformerStep",
    "all_mappings",
    "apply_tensor_parallel",
    "automatic_plan",
    "best_mapping",
    "make_mesh",
    "naive_mapping",
    "sequence_attention",
    "shard_batch",
    "split_stages",
    "tensor_plan",
    "transformer_traffic",
    "vocabulary_cross_entropy",
]

# Mappings are computed without torch, whose split tensors take a second to import.
__getattr__ = lazy_getattr(
    __name__,
    {
        "AxisTraffic": "zero_ext.parallel.ranks.comm_cost",
        "LinkLevel": "zero_ext.parallel.ranks.link_topology",
        "RankMapping": "zero_ext.parallel.ranks.rank_mapping",
        "RankGrid": "zero_ext.parallel.ranks.rank_grid",
        "SequenceAttention": "zero_ext.parallel.sequence.sequence_attention",
        "SequenceExchange": "zero_ext.parallel.sequence.ulysses",
        "LinkTopology": "zero_ext.parallel.ranks.link_topology",
        "TransformerStep": "zero_ext.parallel.ranks.comm_cost",
        "all_mappings": "zero_ext.parallel.ranks.rank_mapping",
        "automatic_plan": "zero_ext.parallel.tensor.auto_tp_plan",
        "best_mapping": "zero_ext.parallel.ranks.rank_mapping",
        "shard_batch": "zero_ext.parallel.sequence.batch_sharding",
        "make_mesh": "zero_ext.parallel.ranks.mesh",
        "naive_mapping": "zero_ext.parallel.ranks.rank_mapping",
        "experts": "",
        "pipeline": "",
        "sequence_attention": "zero_ext.parallel.sequence.sequence_attention",
        "split_stages": "zero_ext.parallel.pipeline.stages.stage_partition",
        "apply_tensor_parallel": "zero_ext.parallel.tensor.tensor_parallel",
        "tensor_plan": "zero_ext.parallel.tensor.tensor_parallel",
        "transformer_traffic": "zero_ext.parallel.ranks.comm_cost",
        "vocabulary_cross_entropy": "zero_ext.parallel.tensor.cross_entropy",
    },
)
