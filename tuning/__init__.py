"""Finds the batch settings that suit a model, a device and a traffic: measures, simulates, chooses, and tries them."""
