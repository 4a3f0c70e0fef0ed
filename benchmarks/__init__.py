"""Benchmarks of zero_ext; each prints itself beside its peers, measured in turn in the same run."""
