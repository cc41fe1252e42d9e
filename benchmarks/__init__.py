"""Measurements of our service beside its peers, each pair in one run on one machine."""
