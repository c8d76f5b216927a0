"""Host work: Python callables and native functions that a stream or a graph runs."""
