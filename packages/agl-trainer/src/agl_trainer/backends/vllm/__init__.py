"""vLLM as a backend: servers of our own or of the user's, kept at the trainer's weights."""
