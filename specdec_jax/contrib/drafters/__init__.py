"""Experimental drafters, one per file; the factory has the file's name."""
