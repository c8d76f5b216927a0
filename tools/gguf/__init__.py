"""Conversion of GGUF files to folders that graft loads."""
