"""Several kinds of parallelism in one run: which rank takes which part in each, and the meshes they
run on.
"""

from typing import TYPE_CHECKING

from zero_ext.config.lazy_imports import lazy_getattr

if TYPE_CHECKING:
    from zero_ext.parallel.batch_sharding import shard_batch
    from zero_ext.parallel.expert_parallel import apply_expert_parallel
    from zero_ext.parallel.link_topology import (
        AxisTraffic,
        LinkLevel,
        LinkTopology,
        TransformerStep,
        transformer_traffic,
    )
    from zero_ext.parallel.mesh import make_mesh
    from zero_ext.parallel.pipeline.stage_module import split_stages
    from zero_ext.parallel.rank_grid import RankGrid
    from zero_ext.parallel.rank_mapping import RankMapping, all_mappings, best_mapping, naive_mapping
    from zero_ext.parallel.ring import RingAttention, ring_attention, shard_indices
    from zero_ext.parallel.tensor.auto_tp_plan import automatic_plan
    from zero_ext.parallel.tensor.cross_entropy import vocabulary_cross_entropy
    from zero_ext.parallel.tensor.tensor_parallel import apply_tensor_parallel, tensor_plan
    from zero_ext.parallel.ulysses import SequenceAttention, SequenceExchange, sequence_attention

__all__ = [
    "AxisTraffic",
    "LinkLevel",
    "LinkTopology",
    "RankGrid",
    "RankMapping",
    "RingAttention",
    "SequenceAttention",
    "SequenceExchange",
    "TransformerStep",
    "all_mappings",
    "apply_expert_parallel",
    "apply_tensor_parallel",
    "automatic_plan",
    "best_mapping",
    "make_mesh",
    "naive_mapping",
    "ring_attention",
    "sequence_attention",
    "shard_batch",
    "shard_indices",
    "split_stages",
    "tensor_plan",
    "transformer_traffic",
    "vocabulary_cross_entropy",
]

# Mappings are computed without torch, whose split tensors take a second to import.
_NAMES = {
    "batch_sharding": "shard_batch",
    "expert_parallel": "apply_expert_parallel",
    "link_topology": "AxisTraffic LinkLevel LinkTopology TransformerStep transformer_traffic",
    "mesh": "make_mesh",
    "pipeline.stage_module": "split_stages",
    "rank_grid": "RankGrid",
    "rank_mapping": "RankMapping all_mappings best_mapping naive_mapping",
    "ring": "RingAttention ring_attention shard_indices",
    "tensor.auto_tp_plan": "automatic_plan",
    "tensor.cross_entropy": "vocabulary_cross_entropy",
    "tensor.tensor_parallel": "apply_tensor_parallel tensor_plan",
    "ulysses": "SequenceAttention SequenceExchange sequence_attention",
}
_MODULES = {name: f"{__name__}.{module}" for module, names in _NAMES.items() for name in names.split()}
__getattr__ = lazy_getattr(__name__, {"experts": "", "pipeline": "", **_MODULES})
