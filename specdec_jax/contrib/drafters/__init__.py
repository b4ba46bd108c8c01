"""Drafters that are new here, one a file; a file's factory has the file's name."""
