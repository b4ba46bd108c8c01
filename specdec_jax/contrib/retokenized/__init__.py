"""A drafter of another vocabulary that drafts its own tokens, whose text is tokenised again as the target's.

`loading/across.py` imports this package by name where a drafter's source ends in `@text`, or where the two vocabularies
have few tokens in common.
"""

from specdec_jax.contrib.retokenized.drafter import retokenized as retokenized
from specdec_jax.contrib.retokenized.drafter import with_text as with_text
from specdec_jax.contrib.retokenized.merges import check_target as check_target
from specdec_jax.contrib.retokenized.merges import is_bpe as is_bpe
