"""``graft serve``: an OpenAI-compatible HTTP server with streaming, tool calls and replicas.

``app``
    ASGI application: endpoints, authentication, admission, streaming.
``protocol``, ``tool_calls``, ``responses``, ``errors``
    Requests, tool calls, responses and errors in OpenAI's format.
``engine_driver``
    The thread that runs an engine.
``replicas``, ``router``, ``actors``
    Data parallel serving: several engines in separate processes, as Ray actors.
``metrics``
    Prometheus metrics.
``command``, ``server``
    Command line and the life of the server process.
"""
