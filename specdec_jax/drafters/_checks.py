"""What drafters check of their options."""


def check_length(max_draft_length: int) -> None:
    """Raises ValueError below 1."""
    if max_draft_length < 1:
        raise ValueError(f"max_draft_length must be at least 1, got {max_draft_length}")
