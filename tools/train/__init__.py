"""Training of the demo model and its drafters. Requires torch and is not part of the package."""
