"""Whether a pair will work and pay, on one page."""
