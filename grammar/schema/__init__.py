"""Routing of JSON schemas: finds a form of a schema that a backend enforces exactly."""
