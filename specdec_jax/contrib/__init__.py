"""Complete and tested, but outside the core: nothing in the package imports it."""
