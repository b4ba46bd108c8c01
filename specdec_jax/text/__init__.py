"""Text generation: pairs of models with a decoder, requests, streams, parsing of strategies, calibrations."""
