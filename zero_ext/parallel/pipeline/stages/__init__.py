"""The parts of a pipeline stage: layers, splits of models, shared parameters."""
