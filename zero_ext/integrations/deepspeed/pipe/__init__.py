"""``deepspeed.pipe``: pipelines by DeepSpeed's names, on ``zero_ext.parallel.pipeline``."""

from typing import TYPE_CHECKING

from zero_ext.integrations.deepspeed import topology
from zero_ext.integrations.deepspeed.refused import names_of

if TYPE_CHECKING:
    from zero_ext.integrations.deepspeed.pipe.layers import LayerSpec, TiedLayerSpec
    from zero_ext.integrations.deepspeed.pipe.module import PipelineModule

__all__ = ["LayerSpec", "PipelineModule", "TiedLayerSpec", "topology"]

# Torch's pipelines, which these are made on, take a second to import.
__getattr__ = names_of(
    "deepspeed.pipe",
    dict.fromkeys(("LayerSpec", "PipelineModule", "TiedLayerSpec"), "deepspeed.runtime.pipe.module"),
)
