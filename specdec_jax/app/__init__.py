"""What a person uses: the command line, the chat, and what they show."""
