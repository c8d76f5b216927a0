"""What is behind `route`: a JSON schema goes in, and out comes what a backend is to compile."""
