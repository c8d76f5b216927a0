"""Paged KV cache and prefix cache."""
