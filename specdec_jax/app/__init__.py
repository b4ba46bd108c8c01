"""The user interface: the command line, the chat, and their views."""
