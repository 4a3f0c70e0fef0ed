"""The demonstration of pipelines, split tensors and ZeRO in several layouts of four ranks."""
