"""``graft serve``: an endpoint that speaks as OpenAI's does."""
