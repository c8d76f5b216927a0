"""``graft serve``: an OpenAI-compatible HTTP server with streaming, tool calls and replicas.

``app``
    The ASGI application with its endpoints, authentication, admission control and streaming.
``protocol``, ``tool_calls``, ``responses``, ``errors``
    Conversion of requests, tool calls, responses and errors from and to OpenAI's format.
``engine_driver``
    The thread that runs an engine, and its interface to the event loop of the server.
``replicas``, ``router``, ``actors``
    Data parallel serving. Each replica is an engine in a separate process, a Ray actor.
``metrics``
    Prometheus metrics.
``command``, ``server``
    The command line, and startup, draining and shutdown of the server process.
"""
