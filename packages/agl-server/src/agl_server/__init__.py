"""The Lightning server of agl: durable rollout queue and OpenAI-compatible gateway that keeps exact tokens."""
