"""What a pipeline stage is made of: layers, splits of models, shared parameters."""
