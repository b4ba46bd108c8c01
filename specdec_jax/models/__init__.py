"""Model families, one per file named like Hugging Face's model_type; all implement `types.LanguageModel`."""
