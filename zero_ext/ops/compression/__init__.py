"""Python face of the quantization and sign compression ops."""
