"""The format on disk: directory, manifest, safetensors headers, JSON state, and the state it is made from."""
