"""``deepspeed.pipe``: pipelines by DeepSpeed's names, on ``zero_ext.parallel.pipeline``."""

from zero_ext.integrations.deepspeed import process_topology as topology
from zero_ext.integrations.deepspeed.unsupported import names_of

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec", "topology"]

# Torch's pipelines, which these are made on, take a second to import: only when they are asked for.
__getattr__ = names_of("deepspeed.pipe", "deepspeed.runtime.pipe")
