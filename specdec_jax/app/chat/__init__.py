"""The tool people talk to: a conversation that keeps its cache, slash commands, and a terminal around both."""
