"""Weights in Hugging Face formats: read into shards, loaded into meta models, exported."""
