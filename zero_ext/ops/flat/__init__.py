"""Python face of the ops on flat buffers."""
