"""Pipeline parallelism: a model cut into stages on torch's schedules. ZeRO shards the state of each stage."""

from zero_ext.parallel.pipeline.pipeline import Pipeline
from zero_ext.parallel.pipeline.schedule.pipeline_timeline import Slot, plot_timeline
from zero_ext.parallel.pipeline.schedule.schedule_replay import bubble_bound, busy_fraction, replay
from zero_ext.parallel.pipeline.schedule.schedules import SCHEDULES
from zero_ext.parallel.pipeline.stages.hf_pipeline import HfPipelineModule, apply_pipeline_parallel
from zero_ext.parallel.pipeline.stages.layer_timing import profile_layers
from zero_ext.parallel.pipeline.stages.layers import LayerSpec, TiedLayerSpec
from zero_ext.parallel.pipeline.stages.stage_layers import PipelineModule, layer_seed

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
