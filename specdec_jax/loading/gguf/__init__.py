"""GGUF files: reading and writing weights and tokenizers."""
