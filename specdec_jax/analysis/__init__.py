"""What is computed from results: repeated text, intervals over prompts. Nothing here runs inside a generation."""
