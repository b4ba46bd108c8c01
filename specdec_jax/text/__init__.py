"""Text in, text out: models joined to a decoder, requests, streams, strategies in words, calibrations."""
