"""Drafters with another vocabulary that draft their own tokens, whose text is tokenised again for the target.

`loading/across.py` imports this package by name if a drafter's source ends in `@text`, or if the two vocabularies have
few tokens in common.
"""

from specdec_jax.contrib.retokenized.byte_pairs import check_target as check_target
from specdec_jax.contrib.retokenized.byte_pairs import is_bpe as is_bpe
from specdec_jax.contrib.retokenized.drafter import retokenized as retokenized
from specdec_jax.contrib.retokenized.drafter import with_text as with_text
