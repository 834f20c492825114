"""The Lightning server: a durable rollout queue, and an OpenAI-compatible gateway that keeps the exact tokens."""
