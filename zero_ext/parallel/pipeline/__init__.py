"""Pipeline parallelism: a model cut into stages, each of whose state ZeRO shards, on torch's schedules."""

from zero_ext.parallel.pipeline.layers import LayerSpec, TiedLayerSpec
from zero_ext.parallel.pipeline.model import StagedModel, split_model
from zero_ext.parallel.pipeline.module import PipelineModule, layer_seed
from zero_ext.parallel.pipeline.pipeline import Pipeline
from zero_ext.parallel.pipeline.replay import bubble_bound, busy_part, replay
from zero_ext.parallel.pipeline.schedules import SCHEDULES
from zero_ext.parallel.pipeline.seconds import layer_seconds
from zero_ext.parallel.pipeline.timeline import Slot, plot_timeline

__all__ = [
    "SCHEDULES",
    "LayerSpec",
    "Pipeline",
    "PipelineModule",
    "Slot",
    "StagedModel",
    "TiedLayerSpec",
    "bubble_bound",
    "busy_part",
    "layer_seconds",
    "layer_seed",
    "plot_timeline",
    "replay",
    "split_model",
]
