"""Pipeline parallelism: a model cut into stages on torch's schedules. ZeRO shards the state of each stage."""

from zero_ext.parallel.pipeline.hf_pipeline import HfPipelineModule, apply_pipeline_parallel
from zero_ext.parallel.pipeline.layers import LayerSpec, TiedLayerSpec, layer_seed, profile_layers
from zero_ext.parallel.pipeline.pipeline import Pipeline
from zero_ext.parallel.pipeline.pipeline_timeline import (
    Slot,
    bubble_bound,
    busy_fraction,
    plot_timeline,
    replay,
)
from zero_ext.parallel.pipeline.stage_layers import PipelineModule
from zero_ext.parallel.pipeline.stage_module import SCHEDULES

__all__ = [
    "SCHEDULES",
    "HfPipelineModule",
    "LayerSpec",
    "Pipeline",
    "PipelineModule",
    "Slot",
    "TiedLayerSpec",
    "apply_pipeline_parallel",
    "bubble_bound",
    "busy_fraction",
    "layer_seed",
    "plot_timeline",
    "profile_layers",
    "replay",
]
