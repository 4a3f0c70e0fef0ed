"""``deepspeed.pipe``: pipelines by DeepSpeed's names, for programs that import them from here."""

from zero_ext.integrations.deepspeed.pipeline_module import LayerSpec, PipelineModule, TiedLayerSpec

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec"]
