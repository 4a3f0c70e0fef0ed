"""The check of the CUDA kernels without a GPU: compiles them, reads their machine code, writes a table."""
