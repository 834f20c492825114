"""The embedded backend: continuous batching inside the trainer's process, on the trainer's own weights."""
