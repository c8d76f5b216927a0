"""JSON schema router, which finds a form of a schema that a grammar backend enforces exactly."""
