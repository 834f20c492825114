"""OpenAI-compatible model calls on every agent's path: label, route, forward, record, answer.

`request` reads what the agent sent, `target` decides who answers, `sampled` collects the exact tokens, `events`
reads server-sent events, and `handler` is the life of one call.
"""
