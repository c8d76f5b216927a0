"""How the demo model and the tests' fixtures were made: needs torch, and is in no wheel."""
