"""Translation of DeepSpeed's JSON into the native configuration."""

from .translate import Note, Translation, load_deepspeed_config

__all__ = ["Note", "Translation", "load_deepspeed_config"]
