"""Complete and tested, but outside the core: nothing in the rest of the package imports it, the command line apart."""
