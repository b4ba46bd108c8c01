"""Experimental stopping policies, one per file; the factory has the file's name."""
