"""Routing of JSON schemas: find the form of a schema that a backend enforces exactly."""
