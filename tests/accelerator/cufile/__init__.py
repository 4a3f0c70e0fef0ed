"""A stand-in for NVIDIA's cuFile library, for the stand-in accelerator."""
