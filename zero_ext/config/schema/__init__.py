"""What every configuration section is built on: the base model, errors by key path, JSON, generated docs."""
