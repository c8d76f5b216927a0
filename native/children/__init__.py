"""Child processes that can be killed, for work that may hang, crash or exhaust memory."""
