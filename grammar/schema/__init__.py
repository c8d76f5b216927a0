"""JSON schema router: rewrites a schema into a form that a grammar backend enforces exactly."""
