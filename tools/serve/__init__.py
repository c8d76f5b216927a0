"""``graft serve``: an OpenAI-compatible HTTP server with streaming, tool calls and replicas.

``app``
    The ASGI application with its endpoints, authentication, admission control and streaming.
``fields``, ``requests``, ``messages``
    Pydantic models of requests and chat messages in OpenAI's format, and texts of their errors.
``request_parser``, ``grammars``
    Conversion of requests to requests of the engine.
``completion_writer``, ``reasoning``, ``errors``
    Conversion of outputs and errors to OpenAI's format.
``responses_request``, ``responses_writer``
    The endpoint ``/v1/responses``: conversion from and to chat completions.
``tool_calls``, ``tool_formats``
    The functions that a model may call, and the notations of calls: grammars and parsers.
``tokenization``, ``prompt_logprobs``
    The endpoints ``/tokenize`` and ``/detokenize``, and log probabilities of prompts.
``connections``
    Limits on connections and on repeated log messages.
``engine_driver``, ``request_stream``
    The thread that runs an engine, and its interface to the event loop of the server.
``replicas``, ``router``, ``actors``
    Data parallel serving. Each replica is an engine in a separate process, a Ray actor.
``metrics``
    Prometheus metrics.
``command``, ``server``
    The command line, and startup, draining and shutdown of the server process.
"""
