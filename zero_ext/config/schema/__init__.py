"""The base of every configuration section: the base model, errors by key path, JSON, generated docs."""
