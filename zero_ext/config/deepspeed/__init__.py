"""Translation of DeepSpeed's JSON into the native configuration."""

from .translate import Translation, load_deepspeed_config
from .translation_note import Note

__all__ = ["Note", "Translation", "load_deepspeed_config"]
