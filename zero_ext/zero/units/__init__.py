"""Units: parameters that are gathered, reduced and released together, and what single parameters carry."""
