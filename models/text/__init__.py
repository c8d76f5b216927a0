"""Chat templates and streaming text decoding."""
