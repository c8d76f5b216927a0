"""Chat templates, incremental detokenization and stop strings."""
