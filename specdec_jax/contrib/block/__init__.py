"""Drafters that draft a block of tokens in one pass, from their exact distribution.

`loading/families.py` finds the model type `llama_block` here by name.
"""

from specdec_jax.contrib.block.drafter import block as block
