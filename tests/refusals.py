"""What every test of bad weights asks: one line, of the right type, that names what is wrong."""

import pytest

from specdec_jax.loading import load_model

BAD = (ValueError, FileNotFoundError)


def refusal(source, **options) -> str:
    """The message `load_model` fails with: one line, of the two types the command line turns into exit code 2."""
    with pytest.raises(BAD) as caught:
        load_model(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    return message


def assert_says(message: str, *parts) -> None:
    for part in parts:
        assert str(part) in message, message
