"""Helpers for tests of the fields of requests."""

from graft.tools.serve.fields import read_fields
from graft.tools.serve.requests import ChatRequest


def chat_request(**fields):
    """Return a chat completion request with the given fields."""
    return read_fields(ChatRequest, fields)


def chosen_tools(fields):
    """Return the functions that the model may call in a request."""
    return chat_request(**fields).chosen_tools
