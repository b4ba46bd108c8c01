"""`python -m specdec_jax`."""

import sys

from specdec_jax.app.cli import main

if __name__ == "__main__":
    sys.exit(main())
