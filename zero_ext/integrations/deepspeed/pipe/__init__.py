"""``deepspeed.pipe``: pipelines by DeepSpeed's names, for programs that import them from here."""

from zero_ext.integrations.deepspeed.import_alias import names_of

__getattr__ = names_of("deepspeed.pipe", globals())
