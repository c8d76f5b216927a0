"""Grammar compilation outside the decoding loop."""
