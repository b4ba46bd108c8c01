"""The chat: a session that keeps its cache, slash commands, and a terminal."""
