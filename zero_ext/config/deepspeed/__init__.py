"""Translation of DeepSpeed's JSON into the native configuration."""

from .deepspeed_keys import Note
from .translate import Translation, load_deepspeed_config

__all__ = ["Note", "Translation", "load_deepspeed_config"]
