"""Which driver calls that keep the GIL hang against which callbacks."""
