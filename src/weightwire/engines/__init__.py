"""Inference engines: how a version gets into what they serve from."""
