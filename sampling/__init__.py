"""Mask apply, sampling and chain verification on the device."""
