"""JSON schemas rewritten into equivalent ones that grammar backends can enforce."""
