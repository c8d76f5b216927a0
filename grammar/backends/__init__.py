"""Grammar backends: LLGuidance, XGrammar and their registry."""
