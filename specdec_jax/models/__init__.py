"""Model families, one a file named as Hugging Face's model_type; all obey `types.LanguageModel`."""
