"""GGUF files: reading weights and tokenizers. `contrib/gguf_writer.py` writes them."""
