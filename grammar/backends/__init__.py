"""Grammar backends: what one is, XGrammar, LLGuidance, and the names under which they are had."""
