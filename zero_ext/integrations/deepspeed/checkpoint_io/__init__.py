"""DeepSpeed checkpoints: read without running their pickles, imported, and written under DeepSpeed tags."""
