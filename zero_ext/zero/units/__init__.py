"""Units of parameters that share a flat buffer, their master weights, and marks of single parameters."""
